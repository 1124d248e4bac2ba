"""Who may do what: secrets that are shown or sent, and places that nobody allowed."""

import socket
import struct
import threading

from lab import Seen


def r33(lab):
    """A submitter makes a stream on any subject, the control API's own included."""
    lab.cluster("ingest")
    streams = lambda: {stream.config.name: stream.config.subjects for stream in
                       lab.ask(lambda _, jetstream: jetstream.streams_info())}
    before = streams()
    ended = lab.submit("job", "nats://trommel.api.>", f"{lab.folder}/rows/")
    lab.until("it is answered", lambda: ended.returncode or lab.state("job") in ("failed", "running") or
              set(streams()) - set(before))
    if made := {name: subjects for name, subjects in streams().items() if name not in before}:
        raise Seen(f"a stream was made: {made}")
    return f"no stream is made: {lab.show('job')['reason']['text']}"


def r34(lab):
    """`trommel config` prints the broker's password."""
    shown = lab.run("config", env={"TROMMEL_BROKER__URL": "nats://worker:s3cret@broker:4222"}).stdout.decode()
    [line] = [line for line in shown.splitlines() if line.startswith("url") and "broker" in line]
    if "s3cret" in shown:
        raise Seen(f"it prints {line}")
    return f"it prints {line}"


class Listener:
    """A PostgreSQL of a stranger's: asks whoever comes for a password in the clear, and keeps it."""

    def __init__(self):
        self.told = None
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            client, _ = self.server.accept()
            try:
                self.ask(client)
            except OSError:
                pass
            client.close()

    def ask(self, client):
        size, code = struct.unpack("!II", client.recv(8))
        if code == 80877103:  # asks for TLS
            client.sendall(b"N")
            size, _ = struct.unpack("!II", client.recv(8))
        client.recv(size - 8)
        client.sendall(b"R" + struct.pack("!II", 8, 3))
        self.told = client.recv(1024)[5:].rstrip(b"\0").decode() or self.told


def r35(lab):
    """The password of the operator's database goes to any host that a submitter names."""
    stranger = Listener()
    lab.env["PGPASSWORD"] = "operators-secret"
    lab.cluster()
    address = f"postgres://me@127.0.0.1:{stranger.port}/db?table=t&sslmode=disable"
    lab.submit("job", lab.images(3), address)
    lab.until("the job ends, or the stranger knows", lambda: stranger.told or lab.state("job") == "failed")
    if stranger.told:
        raise Seen(f"the stranger was sent {stranger.told!r}")
    return f"the stranger was sent nothing: {lab.show('job')['reason']['text']}"


def r36(lab):
    """A submitter names any file that a worker can read."""
    lab.broker()
    lab.worker("ingest,preprocess,infer,sink", allowed=lab.write_all)
    (lab.folder / "list.txt").write_text("/etc/passwd\n")
    submitted = lab.submit("job", lab.folder / "list.txt", f"{lab.folder}/rows/")
    lab.until("it ends", lambda: submitted.returncode or lab.state("job") in ("complete", "failed"))
    if lab.state("job") == "complete":
        [row] = lab.rows(lab.folder / "rows")
        raise Seen(f"/etc/passwd was opened, {row['bytes']} bytes of it: {row['error_kind']}")
    return f"refused: {lab.show('job')['reason']['text']}"


def r52(lab):
    """A relative output leaves the folder that the worker runs in."""
    (lab.folder / "a/b").mkdir(parents=True)
    lab.broker()
    lab.worker("ingest,preprocess,infer,sink", allowed=lab.read_all, cwd=lab.folder / "a/b")
    submitted = lab.submit("job", lab.images(3), "../../outside/")
    lab.until("it ends", lambda: submitted.returncode or lab.state("job") in ("complete", "failed"))
    if (lab.folder / "outside").exists():
        raise Seen(f"written two folders above: {len(lab.rows(lab.folder / 'outside'))} rows")
    return f"refused: {lab.show('job')['reason']['text']}"


def r57(lab):
    """A role that lacks a permission of the broker neither starts nor ends."""
    lab.env["TROMMEL_BROKER__ACK_WAIT"] = "3s"
    lab.broker('authorization { users: [ { user: full, password: p }, { user: less, password: p, permissions: '
               '{ publish: { deny: "$JS.API.CONSUMER.>" } } } ] }')
    address = lab.url.removeprefix("nats://")
    lab.url = lab.env["TROMMEL_BROKER__URL"] = f"nats://full:p@{address}"
    lab.worker("ingest")
    worker = lab.start("--log", "info,ort=off", "worker", "--role", "preprocess", "--model-repository", lab.models,
                       *lab.read_all, log="less", env={"TROMMEL_BROKER__URL": f"nats://less:p@{address}"})
    log = lab.folder / "less.log"
    lab.until("it ends, or says again and again that it waits",
              lambda: lab.ended(worker) or log.read_text().lower().count("permissions violation") > 4)
    lines = log.read_text().strip().splitlines()
    if not lab.ended(worker):
        raise Seen(f"it runs on and on, not working: {lines[-1][-160:]}")
    if "CONSUMER" not in lines[-1]:
        raise Seen(f"it ends without naming the subject: {lines[-1]}")
    return f"it ends: {lines[-1]}"


FINDINGS = {"R33": r33, "R34": r34, "R35": r35, "R36": r36, "R52": r52, "R57": r57}

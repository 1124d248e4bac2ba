"""A trommel binary at work: its commands, its workers, and a broker of their own, seen from outside."""

import asyncio
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time

import nats

ROOT = pathlib.Path(__file__).resolve().parents[2]
DIGITS = ROOT / "models/digits"
# Generous: what takes this long does not happen.
END = float(os.environ.get("FINDINGS_END", 90))
ALL = "ingest,preprocess,infer,sink"


class Seen(Exception):
    """The finding is there, and this is what was seen of it."""


class Lab:
    """A temporary folder, a broker, and workers of one binary; all gone at the end."""

    def __init__(self, binary):
        self.binary = str(pathlib.Path(binary).resolve())
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="finding-"))
        self.models = self.folder / "models"
        self.models.mkdir()
        self.children = []
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("TROMMEL_")}
        self.env.pop("ORT_DISABLE_TELEMETRY", None)
        self.env.setdefault("ORT_DYLIB_PATH", str(ROOT / ".tools/onnxruntime/libonnxruntime.so"))
        self.env.update({"XDG_CACHE_HOME": str(self.folder / "cache"), "TROMMEL_BROKER__ACK_WAIT": "3s",
                         "TROMMEL_SINK__LEASE": "2s", "TROMMEL_SINK__PART_INTERVAL": "300ms",
                         "TROMMEL_BROKER__TENSORS_MAX_BYTES": "100000000",
                         "TROMMEL_BROKER__RESULTS_MAX_BYTES": "100000000"})
        # What later binaries ask of an operator and earlier ones do not know.
        knows = self.run("worker", "--help").stdout.decode()
        self.is_later = "--allow-source" in knows
        self.read_all = self.allow("source", "/", "s3://photos/", *(f"nats://photos.{name}" for name in "01234567"))
        self.write_all = self.allow("output", "/", "s3://rows/", "postgres://127.0.0.1:1/nowhere")
        self.model("digits")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for child in self.children:
            child.send_signal(signal.SIGCONT)
            child.kill()
            child.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def allow(self, what, *places):
        """Flags by which a worker may read (`source`) or write (`output`) there, where it asks for any."""
        return [word for place in places if self.is_later for word in (f"--allow-{what}", place)]

    # Files

    def tree(self):
        """The checkout that the binary was built in; this one if it lies somewhere else."""
        parents = pathlib.Path(self.binary).parents
        return next((folder for folder in parents if (folder / "docs/wire.md").exists()), ROOT)

    def model(self, name, **files):
        """A copy of the shipped model in the workers' repository; `files` replace its own."""
        shutil.copytree(DIGITS, self.models / name, ignore=shutil.ignore_patterns("examples"))
        for file, content in files.items():
            (self.models / name / file.replace("__", ".")).write_bytes(content)
        return self.models / name

    def images(self, count, name="images"):
        """A folder of this many digits, in listing order."""
        folder = self.folder / name
        folder.mkdir()
        digits = sorted(path for path in (DIGITS / "examples").rglob("*") if path.is_file())
        for number, digit in zip(range(count), itertools.cycle(digits)):
            os.link(shutil.copy(digit, folder / "copy"), folder / f"{number:06}{digit.suffix}")
            (folder / "copy").unlink()
        return folder

    def rows(self, folder):
        """Rows of all parts of JSON Lines in a folder, whoever wrote them."""
        parts = sorted(pathlib.Path(folder).glob("part-*.jsonl"))
        return [json.loads(line) for part in parts for line in part.read_text().splitlines()]

    # Processes

    def run(self, *args, timeout=END, **more):
        """A command to its end."""
        env = self.env | more.pop("env", {})
        return subprocess.run([self.binary, *map(str, args)], env=env, timeout=timeout,
                              capture_output=True, **{"stdin": subprocess.DEVNULL} | more)

    def start(self, *args, log="command", **more):
        """A command in the background; its standard error goes to the file `log`."""
        env = self.env | more.pop("env", {})
        with open(self.folder / f"{log}.log", "ab") as errors:
            child = subprocess.Popen([self.binary, *map(str, args)], env=env, stdin=subprocess.DEVNULL,
                                     stdout=subprocess.DEVNULL, stderr=errors, **more)
        self.children.append(child)
        return child

    def broker(self, config=""):
        """A nats-server with an empty store; `config` is more of its configuration."""
        place = self.folder / "nats"
        place.mkdir()
        (place / "server.conf").write_text(f'jetstream {{ store_dir: "{place}/store" }}\n{config}')
        log = open(place / "log", "wb")
        self.children.append(subprocess.Popen(
            [ROOT / ".tools/bin/nats-server", "-c", place / "server.conf", "-a", "127.0.0.1", "-p", "-1",
             "--ports_file_dir", place], stdout=log, stderr=log))
        port = self.until("the broker listens", lambda: next(place.glob("*.ports"), None))
        self.url = self.until("its port is written", lambda: json.loads(port.read_text() or "{}")).get("nats")[0]
        self.env["TROMMEL_BROKER__URL"] = self.url

    def worker(self, roles, *args, allowed=None, **more):
        """A worker that is at work, or has ended; its log is what `log` gives. It may read and write all places
        of these programs unless `allowed` says which."""
        number = sum(child.args[1] == "worker" for child in self.children)
        child = self.start("--log", "info,ort=off", "worker", "--role", roles, "--model-repository", self.models,
                           *(self.read_all + self.write_all if allowed is None else allowed), *args, log=f"worker-{number}", **more)
        child.log = lambda: (self.folder / f"worker-{number}.log").read_text(errors="replace")
        child.args[1] = "worker"
        self.until("the worker is at work", lambda: "working as" in child.log() or self.ended(child))
        return child

    @staticmethod
    def ended(child):
        return child.poll() is not None

    def cluster(self, *roles, broker="", **more):
        """A broker, and a worker for each of these roles."""
        self.broker(broker)
        return [self.worker(role, **more) for role in roles or (ALL,)]

    # Jobs

    def submit(self, name, source, output, *args, model="digits"):
        """A job named `name` with parts of JSON Lines."""
        return self.run("submit", source, "--model", model, "--output", output, "--id", name, "--format", "jsonl", *args)

    def show(self, name):
        """How a job stands; empty while nobody knows it."""
        shown = self.run("jobs", "show", name, "--json")
        return json.loads(shown.stdout) if shown.returncode == 0 else {}

    def state(self, name):
        return self.show(name).get("state")

    def committed(self, name):
        return sum(model["committed"] for model in self.show(name).get("models", []))

    def until(self, what, look, seconds=None):
        """What `look` finds, as soon as it finds something."""
        seconds = seconds or END
        deadline = time.monotonic() + seconds
        while not (found := look()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds} s")
            time.sleep(0.05)
        return found

    # The broker

    def ask(self, work):
        """Runs `work(client, jetstream)` over a connection of its own."""
        async def connected():
            client = await nats.connect(self.url)
            try:
                return await work(client, client.jetstream(timeout=10))
            finally:
                await client.close()
        return asyncio.run(connected())

    def request(self, subject, message):
        """The answer of a subject to a message in JSON."""
        async def asked(client, _):
            return json.loads((await client.request(subject, json.dumps(message).encode(), timeout=20)).data or "null")
        return self.ask(asked)

    def publish(self, subject, payload):
        """Stores a message in the stream of a subject."""
        return self.ask(lambda _, jetstream: jetstream.publish(subject, payload))

    def waiting(self, stream):
        """Messages in a stream of Trommel's."""
        try:
            return self.ask(lambda _, jetstream: jetstream.stream_info(f"TROMMEL_{stream}")).state.messages
        except nats.js.errors.NotFoundError:
            return 0

    def records(self, prefix=""):
        """Records of jobs whose keys begin so, as JSON by key."""
        async def read(_, jetstream):
            bucket = await jetstream.key_value("trommel-jobs")
            try:
                keys = [key for key in await bucket.keys() if key.startswith(prefix)]
            except nats.js.errors.NoKeysError:
                keys = []
            return {key: json.loads((await bucket.get(key)).value) for key in keys}
        return self.ask(read)

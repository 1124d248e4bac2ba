"""Rows of jobs that are lost, doubled or another's: a worker stops, dies or changes in mid-job."""

import asyncio
import collections
import json
import signal

from lab import Seen
from store import Store

SMALL = {"TROMMEL_SINK__PART_ROWS": "20"}
# A short queue, so that a job of thousands is caught before its end.
SLOW = {"TROMMEL_BROKER__TASKS_MAX_MESSAGES": "200"}


class Writes:
    """What is written to a record of the broker, in order, from now on."""

    def __init__(self, lab, key):
        self.lab, self.key = lab, key

    def during(self, work):
        """Runs `work()`; gives the values that were written meanwhile."""
        async def listen(client, _):
            written = []

            async def hear(message):
                written.append(json.loads(message.data or b"{}"))
            await client.subscribe(f"$KV.trommel-jobs.{self.key}", cb=hear)
            await client.flush()
            await asyncio.to_thread(work)
            await client.flush()
            return written
        return self.lab.ask(listen)


def r1(lab):
    """A sink with another configuration deletes rows that are committed."""
    lab.env |= SMALL | SLOW
    lab.cluster("ingest,preprocess")
    infer, sink = lab.worker("infer"), lab.worker("sink")
    output = lab.folder / "rows"
    lab.submit("job", lab.images(3000), f"{output}/", "--overwrite")
    lab.until("rows are committed", lambda: lab.committed("job") > 0)
    infer.send_signal(signal.SIGSTOP)
    sink.kill()
    sink.wait()
    before = set(output.glob("part-*"))
    # A setting that shapes rows, as an operator rolls one out.
    changed = lab.worker("sink", env={"TROMMEL_INFER__TOP_K": "3"})
    if lab.ended(changed):
        lab.worker("sink")
    infer.send_signal(signal.SIGCONT)

    def ended():
        gone = before - set(output.glob("part-*"))
        return gone or lab.state("job") in ("complete", "failed")
    lab.until("the job ends", ended)
    if gone := before - set(output.glob("part-*")):
        raise Seen(f"{len(gone)} of {len(before)} committed parts are gone")
    if lab.state("job") == "failed":
        raise Seen(f"the job fails: {lab.show('job')['reason']}")
    return f"the job is complete, with all {len(before)} parts of before; a sink with the setting does not start"


def r2(lab):
    """The tasks of a job whose record cannot be read are thrown away."""
    lab.cluster("ingest")
    lab.submit("job", lab.images(20), f"{lab.folder}/rows/")
    lab.until("all are listed", lambda: lab.show("job").get("total") == 20)
    good = lab.records("job.job")["job.job"]

    def write(record):
        async def put(_, jetstream):
            await (await jetstream.key_value("trommel-jobs")).put("job.job", json.dumps(record).encode())
        lab.ask(put)
    write(good | {"state": "of_a_later_version"})
    preprocess = lab.worker("preprocess")
    lab.until("preprocess has met the record",
              lambda: "job.job" in preprocess.log() or lab.waiting("TASKS") == 0)
    lab.worker("infer,sink")
    write(good)
    lab.until("the tasks are gone", lambda: lab.waiting("TASKS") == 0)
    # What is in no stream and has no row is lost.
    lab.until("all is settled", lambda: lab.state("job") == "complete" or not any(
        lab.waiting(stream) for stream in ("TASKS", "TENSORS", "RESULTS")))
    if lab.state("job") != "complete" and lab.committed("job") == 0:
        raise Seen("20 tasks were settled as done, without a tensor or a row")
    lab.until("the job is complete", lambda: lab.state("job") == "complete")
    return f"the tasks wait until it can be read: {len(lab.rows(lab.folder / 'rows'))} rows"


def r4(lab):
    """An ingest worker that was stopped writes its old checkpoint over the end of the listing."""
    lab.env |= SLOW
    [stopped] = lab.cluster("ingest")
    lab.submit("job", lab.images(600), f"{lab.folder}/rows/")
    lab.until("the queue of tasks is full", lambda: lab.waiting("TASKS") >= 50)
    stopped.send_signal(signal.SIGSTOP)
    lab.worker("ingest,preprocess,sink")
    lab.until("another has listed all", lambda: lab.show("job").get("total") == 600)
    key = "progress.job" if lab.is_later else "listing.job"

    def go_on():
        stopped.send_signal(signal.SIGCONT)
        lab.until("it has seen what happened", lambda: any(
            sign in stopped.log() for sign in ("another ingest has", "has the job now", "fenced")) or going_on(lab))
    written = Writes(lab, key).during(go_on)
    ended = [(record.get("listing") or record)["ended"] for record in written if record.get("listing") or "ended" in record]
    if False in ended:
        raise Seen(f"of {len(ended)} records that were written after the end of the listing {ended.count(False)} say that it goes on")
    return f"{len(ended)} records were written after its end, none of the old place"


def r5(lab):
    """Cancelled and submitted again with --overwrite, a job gets rows of the one before."""
    lab.env |= SMALL | SLOW
    lab.cluster("ingest,sink", "preprocess,infer")
    images, output = lab.images(3000), lab.folder / "rows"
    for attempt in range(6):
        lab.submit(f"old-{attempt}", images, f"{output}/", "--overwrite")
        lab.until("it has rows", lambda: lab.committed(f"old-{attempt}") > 0)
        lab.run("jobs", "cancel", f"old-{attempt}")
        lab.submit(f"new-{attempt}", images, f"{output}/", "--overwrite")
        state = lab.until("the new job ends", lambda: lab.state(f"new-{attempt}") in ("complete", "failed")
                          and lab.state(f"new-{attempt}"))
        foreign = sum(row["job_id"] != f"new-{attempt}" for row in lab.rows(output))
        if state == "failed" or foreign:
            raise Seen(f"attempt {attempt + 1}: the new job is {state}, with {foreign} rows of the cancelled one")
    return "six times each row is the new job's"


def r6(lab):
    """Two jobs at one prefix of a store without preconditions: one loses its parts."""
    store = Store(preconditions=False)
    lab.env |= store.env() | SMALL
    lab.cluster("ingest,preprocess,sink")
    for name, count in (("first", 300), ("second", 200)):
        lab.submit(name, lab.images(count, name), "s3://rows/a/", "--overwrite")
        lab.until("it is taken", lambda: lab.state(name) not in (None, "queued") and (
            lab.state(name) == "failed" or lab.show(name).get("total")))
    lab.worker("infer")
    states = [lab.until("the job ends", lambda: lab.state(name) in ("complete", "failed") and lab.state(name))
              for name in ("first", "second")]
    rows = collections.Counter(json.loads(line)["job_id"] for name, body in store.objects.items()
                               if "/part-" in name for line in body.splitlines())
    if states == ["complete", "complete"] or rows["first"] < 300:
        raise Seen(f"both are {states}, the first with {rows['first']} of 300 rows, the second with {rows['second']} of 200")
    return f"the second is {states[1]}: {lab.show('second')['reason']['text']}; the first has {rows['first']} of 300 rows"


def r10(lab):
    """A model that is replaced in place gives its labels to rows that name the one before."""
    lab.cluster("ingest,preprocess,sink")
    lab.submit("job", lab.images(60), f"{lab.folder}/rows/")
    lab.until("tensors wait", lambda: lab.waiting("TENSORS") == 60)
    config = lab.models / "digits/config.json"
    labels = json.loads(config.read_text())
    labels["id2label"] = {number: f"new {label}" for number, label in labels["id2label"].items()}
    version = lab.show("job")["models"][0]["version"]
    config.write_text(json.dumps(labels))
    infer = lab.worker("infer")

    def ended():
        return lab.state("job") in ("complete", "failed") or lab.ended(infer)
    lab.until("the job ends", ended)
    if lab.ended(infer):
        raise Seen("the infer worker ends: " + infer.log().splitlines()[-1])
    rows = lab.rows(lab.folder / "rows")
    mixed = [row for row in rows if row["label"] and row["label"].startswith("new") and row["model_version"] == version]
    if mixed:
        raise Seen(f"{len(mixed)} rows have the new model's labels and the old one's version")
    return f"the job is {lab.state('job')}: {lab.show('job').get('reason')}; {len(rows)} rows, none mixed"


def r11(lab):
    """A sink that was stopped writes its counts over those of the finished job."""
    lab.env |= SMALL | SLOW
    lab.cluster("ingest,preprocess", "infer")
    stopped = lab.worker("sink")
    lab.submit("job", lab.images(2000), f"{lab.folder}/rows/")
    lab.until("rows are committed", lambda: lab.committed("job") > 0)
    stopped.send_signal(signal.SIGSTOP)
    lab.worker("sink")
    lab.until("the job is complete", lambda: lab.state("job") == "complete")

    def go_on():
        stopped.send_signal(signal.SIGCONT)
        lab.until("it has seen what happened", lambda: "has the job now" in stopped.log() or going_on(lab))
    key = "progress.job" if lab.is_later else "rows.job.digits"
    written = Writes(lab, key).during(go_on)
    rows = [record["rows"]["digits"] if lab.is_later else record for record in written]
    less = [row["committed"] for row in rows if row["committed"] < 2000 or not row["finished"]]
    if less:
        raise Seen(f"the finished job's record says {less[-1]} of 2000 rows after {len(less)} writes")
    shown = lab.committed("job")
    if shown != 2000:
        raise Seen(f"jobs show says {shown} rows")
    return "the record stays at 2000 rows"


def r24(lab):
    """Job `a-b` with model `c` and job `a` with model `b-c` share a consumer."""
    lab.model("c")
    lab.model("b-c")
    lab.cluster("ingest,sink")
    images = lab.images(3)
    lab.submit("a-b", images, f"{lab.folder}/one/", model="c")
    lab.submit("a", images, f"{lab.folder}/two/", model="b-c")
    lab.until("both run", lambda: all(lab.state(name) == "running" for name in ("a", "a-b")))

    def consumers():
        found = lab.ask(lambda _, jetstream: jetstream.consumers_info("TROMMEL_RESULTS"))
        return {consumer.name for consumer in found}
    lab.until("the sink listens", consumers)
    try:
        lab.until("it listens for both", lambda: len(consumers()) == 2, seconds=15)
    except TimeoutError:
        raise Seen(f"one consumer for both: {consumers()}") from None
    return f"two consumers: {sorted(consumers())}"


def r32(lab):
    """What could not be worked on is kept without a limit of bytes."""
    lab.cluster("ingest")
    limit = lab.ask(lambda _, jetstream: jetstream.stream_info("TROMMEL_DEAD")).config.max_bytes
    if limit in (None, -1):
        raise Seen("TROMMEL_DEAD has no limit of bytes")
    return f"TROMMEL_DEAD holds {limit >> 20} MiB at most"


def r58(lab):
    """A store that honours preconditions at one opening and not at the next hides committed parts."""
    store, count = Store(), 3000
    lab.env |= store.env() | SMALL | SLOW
    _, infer, sink = lab.cluster("ingest,preprocess", "infer", "sink")
    lab.submit("job", lab.images(count), "s3://rows/a/")
    lab.until("rows are committed", lambda: lab.committed("job") > 0)
    infer.send_signal(signal.SIGSTOP)
    sink.kill()
    sink.wait()
    assert lab.state("job") == "running"
    # As behind a proxy that drops the header now and then.
    store.preconditions = False
    lab.worker("sink")
    infer.send_signal(signal.SIGCONT)

    def indices():
        parts = [body for name, body in dict(store.objects).items() if "/part-" in name]
        return [json.loads(line)["index"] for part in parts for line in part.splitlines()]
    try:
        lab.until("the job ends", lambda: lab.state("job") in ("complete", "failed"), seconds=40)
    except TimeoutError:
        found = indices()
        raise Seen(f"{len(found)} rows in the store, {len(set(found))} of {count} images, and the job does not end") from None
    found = indices()
    if len(found) > len(set(found)):
        raise Seen(f"{len(found)} rows in the store for {count} images")
    return f"the job is {lab.state('job')}, with {len(found)} rows for {count} images"


def r60(lab):
    """Claims of parts and probes of the store are left behind."""
    store = Store(preconditions=False)
    lab.env |= store.env() | SMALL
    lab.cluster()
    lab.submit("job", lab.images(300), "s3://rows/a/")
    lab.until("the job is complete", lambda: lab.state("job") == "complete")

    def claims():
        async def count(_, jetstream):
            info = await jetstream.stream_info("KV_trommel-jobs", subjects_filter="$KV.trommel-jobs.claim.>")
            return sum((info.state.subjects or {}).values())
        return lab.ask(count)
    try:
        lab.until("no claim is left", lambda: claims() == 0, seconds=15)
    except TimeoutError:
        raise Seen(f"{claims()} marks of claims are left in the broker") from None
    left = sorted(name for name in store.objects if "probe" in name)
    if left:
        raise Seen(f"left in the store: {left}")
    return "no claim and no probe is left"


def going_on(lab):
    """Whether a worker that was woken has had the time of several leases to do its worst."""
    lab.waited = getattr(lab, "waited", 0) + 1
    return lab.waited > 100


FINDINGS = {"R1": r1, "R2": r2, "R4": r4, "R5": r5, "R6": r6, "R10": r10, "R11": r11, "R24": r24, "R32": r32,
            "R58": r58, "R60": r60}

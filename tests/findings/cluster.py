"""A fleet that goes down or stands still because of one job, one message or one worker."""

import asyncio
import json
import signal
import subprocess

import msgpack
import nats

from lab import DIGITS, ROOT, Seen


def good_job(lab, images, name="good", model="digits"):
    """A job that has nothing wrong; gives its state, which `complete` should be."""
    lab.submit(name, images, f"{lab.folder}/{name}/", model=model)
    return lab.until("the good job ends", lambda: lab.state(name) in ("complete", "failed") and lab.state(name))


def dead(lab, *workers):
    return [worker for worker in workers if lab.ended(worker)]


def why(worker):
    return worker.log().strip().splitlines()[-1]


def fate(lab, name):
    """The state of a job, and why."""
    shown = lab.show(name)
    reason = shown.get("reason") or ""
    return f"{shown.get('state')}: {reason.get('text') if isinstance(reason, dict) else reason}"


def r14(lab):
    """A model that does not load ends every infer worker in turn."""
    lab.model("unknown-operator", model__onnx=(DIGITS / "model.onnx").read_bytes().replace(b"Relu", b"Rexu"))
    _, infer = lab.cluster("ingest,preprocess,sink", "infer")
    images = lab.images(50)
    submitted = lab.submit("bad", images, f"{lab.folder}/bad/", model="unknown-operator")
    lab.until("the bad job or a worker ends", lambda: submitted.returncode or dead(lab, infer) or
              lab.state("bad") == "failed")
    if dead(lab, infer):
        again = lab.worker("infer")
        lab.until("the next one ends too", lambda: dead(lab, again))
        raise Seen(f"two infer workers of two end: {why(again)}")
    return f"the good job is {good_job(lab, images)}; the bad one {fate(lab, 'bad')}"


def r16(lab):
    """A uri that no message can hold ends one worker after the other."""
    workers = lab.cluster("ingest", "preprocess", "infer,sink")
    [image] = lab.images(1).iterdir()
    (lab.folder / "list.txt").write_text(f"{image}\n{'x' * 600_000}\n{'y' * 1_048_570}\n{image}\n")
    lab.submit("long", lab.folder / "list.txt", f"{lab.folder}/long/")
    lab.until("the job or a worker ends", lambda: dead(lab, *workers) or lab.state("long") in ("complete", "failed") or
              any(worker.log().count("will be listed again") > 1 for worker in workers))
    if ended := dead(lab, *workers):
        raise Seen(f"a worker ends: {why(ended[0])[:200]}")
    if lab.state("long") != "complete":
        raise Seen(f"the job is {lab.state('long')}: {why(workers[0])[:200]}")
    failed = [row["error_kind"] for row in lab.rows(lab.folder / "long") if row["status"] == "failed"]
    return f"the job is complete, the two rows failed as {failed}"


def r17(lab):
    """The rows of a job whose output is dead fill the stream that all jobs share."""
    lab.env |= {"TROMMEL_BROKER__RESULTS_MAX_BYTES": "200000", "TROMMEL_BROKER__TASKS_MAX_MESSAGES": "200"}
    lab.cluster("ingest,sink", "preprocess,infer")
    lab.submit("dead", lab.images(2000), "postgres://nobody@127.0.0.1:1/nowhere?table=t")
    stuck = []

    def stands():
        stuck.append([lab.waiting(stream) for stream in ("TASKS", "TENSORS", "RESULTS")])
        return sum(stuck[-1]) and stuck[-40:].count(stuck[-1]) == 40
    lab.until("nothing moves in the dead job", stands)
    lab.submit("good", lab.images(50, "few"), f"{lab.folder}/good/")
    try:
        lab.until("the good job ends", lambda: lab.state("good") == "complete", seconds=40)
    except TimeoutError:
        raise Seen(f"the good job has {lab.committed('good')} of 50 rows; waiting: {stuck[-1]}") from None
    return f"the good job is complete, while {stuck[-1][-1]} rows of the dead one wait"


def r19(lab):
    """`jobs list` ends for good at some 1,500 jobs."""
    jobs = 2500
    lab.cluster("ingest")

    async def submit(client, _):
        one_at_a_time = asyncio.Semaphore(50)

        async def ask(number):
            job = {"id": f"job-{number}", "sources": [f"/nowhere/{number:0200}"], "models": ["digits"],
                   "output": f"{lab.folder}/rows/{number}/"}
            async with one_at_a_time:
                await client.request("trommel.api.submit", json.dumps(job).encode(), timeout=60)
        await asyncio.gather(*map(ask, range(jobs)))
    lab.ask(submit)
    all_of_them = ["--limit", "0"] if b"--limit" in lab.run("jobs", "list", "--help").stdout else []
    listed = lab.run("jobs", "list", "--json", *all_of_them)
    if listed.returncode:
        raise Seen(f"with {jobs} jobs: {listed.stderr.decode().strip()}")
    return f"{len(json.loads(listed.stdout))} jobs are listed"


def r22(lab):
    """A job id of thousands of letters cuts each ingest worker off from the broker."""
    [ingest] = lab.cluster()
    job = {"id": "a" * 6000, "sources": [str(lab.images(3))], "models": ["digits"], "output": f"{lab.folder}/rows/"}
    lab.publish("trommel.jobs.normal", json.dumps(job).encode())
    log = lab.folder / "nats/log"
    lab.until("the message is answered", lambda: lab.waiting("JOBS") == 0 or
              "maximum control line" in log.read_text(errors="replace").lower())
    cut = log.read_text(errors="replace").lower().count("maximum control line")
    if cut:
        raise Seen("the broker cuts the connection of the worker: maximum control line exceeded")
    return f"the message is settled; the good job is {good_job(lab, lab.folder / 'images')}"


def r23(lab):
    """A job with images in it makes a record that no message can hold, and is tried again and again."""
    [worker] = lab.cluster()
    image = next(lab.images(1).iterdir()).read_bytes()
    job = {"version": 1, "id": "inline", "models": ["digits"], "output": f"{lab.folder}/rows/",
           "images": [{"uri": f"image-{number}", "bytes": image + b"\xff" * 100_000} for number in range(5)]}
    lab.publish("trommel.jobs.normal", msgpack.packb(job))
    lab.until("it is settled, or tried again and again", lambda: lab.waiting("JOBS") == 0 or
              worker.log().count("max payload size exceeded") > 1 or lab.ended(worker))
    if lab.waiting("JOBS"):
        raise Seen(f"the job is tried again and again: {why(worker)[:200]}")
    return f"the message is settled: {why(worker)[-200:]}"


def r25(lab):
    """A sink with room does not look at the job that waits for it."""
    lab.env["TROMMEL_SINK__MAX_JOBS"] = "8"
    lab.cluster("ingest,preprocess,infer")

    async def make(_, jetstream):
        await jetstream.add_stream(name="photos", subjects=["photos.>"])
    lab.ask(make)
    lab.worker("sink")
    for number in range(8):
        lab.submit(f"standing-{number}", f"nats://photos.{number}", f"{lab.folder}/standing-{number}/")
    lab.until("the first sink is full", lambda: len(lab.ask(
        lambda _, jetstream: jetstream.consumers_info("TROMMEL_RESULTS"))) == 8)
    lab.env["TROMMEL_SINK__MAX_JOBS"] = "1"
    lab.worker("sink")
    for number in range(3):
        lab.submit(f"good-{number}", lab.images(20, f"images-{number}"), f"{lab.folder}/good-{number}/")
    states = lambda: [lab.state(f"good-{number}") for number in range(3)]
    try:
        lab.until("they end", lambda: states() == ["complete"] * 3, seconds=30)
    except TimeoutError:
        raise Seen(f"beside 8 standing jobs of another sink, the three jobs are {states()}") from None
    return "the three jobs beside 8 standing ones are complete"


def r28(lab):
    """A dry run that no worker serves says nothing, and an invalid job vanishes."""
    lab.cluster("ingest")
    job = {"id": "not a name", "sources": ["/photos"], "models": ["digits"], "output": f"{lab.folder}/rows/"}
    lab.publish("trommel.jobs.normal", json.dumps(job).encode())
    lab.until("the message is settled", lambda: lab.waiting("JOBS") == 0)
    listed = json.loads(lab.run("jobs", "list", "--json").stdout or "[]")
    dry = lab.start("submit", lab.images(3), "--model", "digits", "--output", f"{lab.folder}/dry/", "--dry-run", log="dry")
    log = lab.folder / "dry.log"
    try:
        lab.until("it says something", lambda: lab.ended(dry) or "worker" in log.read_text(), seconds=30)
    except TimeoutError:
        raise Seen(f"the dry run says nothing of a role that is missing; the invalid job is listed {len(listed)} times") from None
    if not listed:
        raise Seen("the invalid job is listed nowhere")
    return f"the dry run: {log.read_text().strip()[-160:]}; the invalid job is listed as {listed[0]['state']}"


def r44(lab):
    """An exit code is chosen by the text of a reason."""
    lab.cluster()
    ended = lab.submit("job", f"{lab.folder}/max-failure-rate/photos", f"{lab.folder}/rows/", "--wait")
    said = ended.stderr.decode().strip().splitlines()[-1]
    if ended.returncode == 4:
        raise Seen(f"exit code 4 (too many failures) for: {said}")
    return f"exit code {ended.returncode} for: {said}"


def r45(lab):
    """The event of a job's progress is never sent."""
    # Without infer the job stays on its way.
    lab.cluster("ingest,preprocess,sink")
    images = lab.images(50)

    async def listen(client, _):
        events = await client.subscribe("trommel.events.job.>")
        await client.flush()
        await asyncio.to_thread(lab.submit, "job", images, f"{lab.folder}/rows/")
        return (await events.next_msg(timeout=20)).subject
    try:
        return f"heard: {lab.ask(listen)}"
    except nats.errors.TimeoutError:
        raise Seen("nothing is heard of a running job for 20 s") from None


def r47(lab):
    """One model whose tensors no message holds stops all preprocess workers."""
    lab.model("large", trommel__toml=b"[preprocess]\nresize = [700, 700]\ncrop = [700, 700]\n")
    workers = lab.cluster("ingest,infer,sink", "preprocess")
    if dead(lab, *workers):
        raise Seen(f"preprocess ends at its start: {why(workers[1])[:200]}")
    return f"the job of another model is {good_job(lab, lab.images(20))}"


def r49(lab):
    """The Python program of docs/wire.md crashes while nobody has taken its job."""
    lab.env["TROMMEL_INGEST__MAX_JOBS"] = "1"
    lab.cluster()
    lab.ask(lambda _, jetstream: jetstream.add_stream(name="photos", subjects=["photos.>"]))
    lab.submit("standing", "nats://photos.0", f"{lab.folder}/standing/")
    lab.until("it takes the only place", lambda: lab.state("standing") == "running")
    page = (lab.tree() / "docs/wire.md").read_text()
    (lab.folder / "client.py").write_text(page.split("```python\n")[1].split("```")[0])
    python = ROOT / ".tools/wire-venv/bin/python"
    client = subprocess.Popen([python, lab.folder / "client.py", lab.url, lab.images(5), f"{lab.folder}/rows/"],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    lab.children.append(client)

    async def asked(broker, _):
        question = await broker.subscribe("trommel.api.status")
        while client.poll() is None:
            try:
                return await question.next_msg(timeout=1)
            except nats.errors.TimeoutError:
                continue
    lab.ask(asked)
    lab.run("jobs", "cancel", "standing")
    _, errors = client.communicate(timeout=90)
    if client.returncode:
        raise Seen(f"it ends with {errors.decode().strip().splitlines()[-1]}")
    return "it waits until the job is taken, and ends with its labels"


def r53(lab):
    """docs/wire.md does not say what an answer holds."""
    lab.cluster()
    good_job(lab, lab.images(5))
    page = (lab.tree() / "docs/wire.md").read_text()
    missing = [key for key in lab.request("trommel.api.status", {"id": "good"}) if f"`{key}`" not in page]
    if missing:
        raise Seen(f"fields of `status` that the page does not have: {missing}")
    return "the page has every field of `status`"


def r54(lab):
    """Next to a paused ingest worker every second question is answered by nobody."""
    paused, _ = lab.cluster("ingest", "ingest")
    paused.send_signal(signal.SIGSTOP)
    failed = [ended.stderr.decode().strip() for ended in (lab.run("jobs", "list") for _ in range(8)) if ended.returncode]
    if failed:
        raise Seen(f"{len(failed)} of 8 questions fail: {failed[0]}")
    return "eight questions of eight are answered"


def r55(lab):
    """A tensor of a model or version that nobody has ends the infer worker."""
    infer, _ = lab.cluster("infer", "ingest,preprocess")
    images = lab.images(20)
    # Without a sink it is on its way.
    lab.submit("before", images, f"{lab.folder}/before/")
    lab.until("it has results", lambda: lab.waiting("RESULTS") == 20)
    image = {"version": 1, "job": "before", "index": 0, "uri": "/a.png"}
    tensor = {"version": 1, "image": image, "model": "digits", "model_version": "", "pixels": bytes(3072),
              "shape": {"height": 32, "width": 32, "channels": 3}, "bytes": 10, "original": {"width": 32, "height": 32},
              "attempts": 1}
    subjects = lab.ask(lambda _, jetstream: jetstream.consumers_info("TROMMEL_TENSORS"))
    filters = {consumer.config.filter_subject for consumer in subjects}
    for name in filters:
        lab.publish(name.replace("*", "before").replace(">", "before"), msgpack.packb(tensor))
    lab.until("the tensor is settled", lambda: lab.ended(infer) or lab.waiting("TENSORS") == 0)
    if lab.ended(infer):
        raise Seen(f"the infer worker ends: {why(infer)[:200]}")
    lab.worker("sink")
    return f"the tensor is settled; the next job is {good_job(lab, images)}"


def r59(lab):
    """A job whose output is dead is `running` without a reason."""
    if lab.is_later:
        lab.env["TROMMEL_SINK__PATIENCE"] = "3s"
    [worker] = lab.cluster()
    lab.submit("dead", lab.images(20), "postgres://nobody@127.0.0.1:1/nowhere?table=t")
    lab.until("it is tried", lambda: worker.log().count("127.0.0.1:1") > 5 or lab.show("dead").get("reason") or
              worker.log().lower().count("refused") > 5)
    shown = lab.show("dead")
    if not shown.get("reason"):
        raise Seen(f"it is {shown['state']} without a reason, while the sink logs: {why(worker)[-160:]}")
    return f"it is {fate(lab, 'dead')}"


FINDINGS = {"R14": r14, "R16": r16, "R17": r17, "R19": r19, "R22": r22, "R23": r23, "R25": r25, "R28": r28,
            "R44": r44, "R45": r45, "R47": r47, "R49": r49, "R53": r53, "R54": r54, "R55": r55, "R59": r59}

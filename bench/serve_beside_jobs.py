"""Both duties on one machine: a job that saturates it, and requests at a tenth of what it can answer.

Three states, each in a fresh worker with a broker of its own, one after the other and as many rounds as
--rounds: a worker without --serve (the job alone), one with --serve that nobody asks, and one that is asked
at --share of --capacity in an open loop (bench/serve_load.py). The job's rate is that of the rows which reach
its sink within the window. Prints a line of JSON with the medians, and the load of the machine before it began.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processes import connects, free_port, get, stop, wait_for


def rows(telemetry):
    """Rows that have reached the sink."""
    text = get(f"http://127.0.0.1:{telemetry}/metrics") or ""
    return sum(float(value) for value in re.findall(r"^trommel_rows_total\{[^}]*\} (\S+)$", text, re.MULTILINE))


def state(args, folder, serves, rate):
    """The job's rate, and what requests took if there were any."""
    broker_port, telemetry, port = free_port(), free_port(), free_port()
    repository = folder / "models"
    repository.mkdir(exist_ok=True)
    model = Path(args.model).resolve()
    if not (repository / model.name).exists():
        (repository / model.name).symlink_to(model)
    # The job lasts longer than the window: its list names the images again and again.
    images = sorted(str(path.resolve()) for path in Path(args.images).rglob("*") if path.is_file())
    manifest = folder / "images.txt"
    repeats = -(-args.job_images // len(images))
    manifest.write_text("".join(f"{image}\n" for image in images * repeats))
    environment = os.environ | {"TROMMEL_BROKER__URL": f"nats://127.0.0.1:{broker_port}"}
    worker = [
        args.trommel, "worker", "--role", "ingest,preprocess,infer,sink", "--tensor-hop", "local",
        "--model-repository", repository, "--allow-source", "/", "--allow-output", folder,
        "--listen", f"127.0.0.1:{telemetry}", "--log", "warn,ort=off",
    ]  # fmt: skip
    if serves:
        worker += ["--serve", model.name, "--serve-listen", f"127.0.0.1:{port}"]
    store = tempfile.mkdtemp(dir=folder)
    running = [subprocess.Popen([args.nats_server, "-js", "-sd", store, "-p", str(broker_port), "-a", "127.0.0.1", "-l", "/dev/null"])]  # fmt: skip
    try:
        wait_for("the broker is there", lambda: connects(broker_port))
        running.append(subprocess.Popen(worker, env=environment))
        ready = f"http://127.0.0.1:{telemetry}/readyz"
        wait_for("the worker is ready", lambda: get(ready))
        output = Path(tempfile.mkdtemp(dir=folder)) / "rows"
        subprocess.run(
            [args.trommel, "submit", manifest, "--model", model.name, "--output", f"{output}/", "--format", "jsonl", "--quiet"],
            env=environment, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for("rows come", lambda: rows(telemetry) > 200 or None)
        time.sleep(args.settle)
        load = None
        if rate:
            command = [
                sys.executable, Path(__file__).with_name("serve_load.py"), args.images, "--model", model.name,
                "--port", str(port), "--rate", str(rate), "--seconds", str(args.seconds), "--warm-up", "0",
            ]  # fmt: skip
            load = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        begin, before = time.monotonic(), rows(telemetry)
        time.sleep(args.seconds)
        took, done = time.monotonic() - begin, rows(telemetry) - before
        asked = json.loads(load.communicate()[0]) if load else None
        return done / took, asked
    finally:
        stop(running)


def main(args):
    rate = args.capacity * args.share
    alone, unasked, asked, took = [], [], [], []
    before = os.getloadavg()
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="both-duties-") as folder:
            folder = Path(folder)
            alone.append(state(args, folder, False, 0)[0])
            unasked.append(state(args, folder, True, 0)[0])
            jobs, requests = state(args, folder, True, rate)
            asked.append(jobs)
            took.append(requests)
    median = statistics.median
    bulk, answered = median(alone), median(one["answered"] for one in took)
    report = {
        "job_alone": round(bulk, 1),
        "job_with_nobody_asking": round(median(unasked), 1),
        "of_alone": round(median(unasked) / bulk, 3),
        "job_beside_requests": round(median(asked), 1),
        "requests_answered": round(answered, 1),
        "of_alone_less_the_requests": round(median(asked) / (bulk - answered), 3),
        "requests_p50_ms": median(one["p50_ms"] for one in took),
        "requests_p95_ms": median(one["p95_ms"] for one in took),
        "statuses": [one["statuses"] for one in took],
        "load_before": [round(load, 1) for load in before],
    }
    print(json.dumps(report))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("images", help="folder of images")
parser.add_argument("--model", required=True, help="model directory")
parser.add_argument("--capacity", type=float, required=True, help="requests a second that the machine can answer")
parser.add_argument("--share", type=float, default=0.1, help="share of it that is requested")
parser.add_argument("--trommel", default="target/release/trommel")
parser.add_argument("--nats-server", default="nats-server")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--seconds", type=float, default=30, help="length of the window")
parser.add_argument("--settle", type=float, default=5, help="time before the window")
parser.add_argument("--job-images", type=int, default=200_000, help="length of the job")
main(parser.parse_args())

"""Kills one of two infer workers under live load, and tells which requests notice.

A broker, a serve worker and two infer workers, requests in an open loop (bench/serve_load.py) through all of
it; after a third of --seconds one infer worker gets SIGKILL. Prints a line of JSON: requests that had no row or
took longer than --budget, by whether they were due before or after the kill; and how many seconds after the kill
the last half second was due whose p95 was above --budget. Requests that were in flight at the killed worker
are sent to the other one after --infer-timeout.
"""

import asyncio
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import serve_load
from processes import connects, free_port, get, stop, wait_for

#: Length of the windows that p95 is looked at in, in seconds.
WINDOW = 0.5


def start(args, folder, running):
    """Starts everything; the last process is the infer worker to kill."""
    broker_port, port = free_port(), args.port
    repository = folder / "models"
    repository.mkdir()
    model = Path(args.model_folder).resolve()
    (repository / model.name).symlink_to(model)
    running.append(subprocess.Popen([args.nats_server, "-js", "-sd", folder / "store", "-p", str(broker_port), "-a", "127.0.0.1", "-l", "/dev/null"]))  # fmt: skip
    wait_for("the broker is there", lambda: connects(broker_port))
    environment = os.environ | {
        "TROMMEL_BROKER__URL": f"nats://127.0.0.1:{broker_port}",
        "TROMMEL_SERVE__INFER_TIMEOUT": args.infer_timeout,
    }

    def worker(role, *flags):
        telemetry = free_port()
        command = [
            args.trommel, "worker", "--role", role, "--serve", model.name, "--model-repository", repository,
            "--listen", f"127.0.0.1:{telemetry}", "--log", "warn,ort=off", *flags,
        ]  # fmt: skip
        running.append(subprocess.Popen(command, env=environment))
        return f"http://127.0.0.1:{telemetry}/readyz"

    infers = [worker("infer"), worker("infer")]
    ready = worker("serve", "--serve-listen", f"127.0.0.1:{port}")
    for url in [*infers, ready]:
        wait_for(f"{url} is ready", lambda url=url: get(url))
    return running[2]


async def kill_under_load(args, victim):
    killed = 0.0

    async def kill():
        nonlocal killed
        await asyncio.sleep(args.warm_up + args.seconds / 3)
        killed = time.perf_counter()
        victim.kill()

    (samples, _), _ = await asyncio.gather(serve_load.load(args), kill())
    return samples, killed


def report(args, samples, killed):
    took = lambda sample: sample.answered - sample.due
    late = [one for one in samples if one.status == 200 and took(one) > args.budget]
    failed = [one for one in samples if one.status != 200]
    split = lambda some: {
        "due_before": sum(one.due <= killed for one in some),
        "due_after": sum(one.due > killed for one in some),
    }
    windows = {}
    for one in samples:
        windows.setdefault(int((one.due - killed) // WINDOW), []).append(took(one))
    p95 = {at: serve_load.percentile(sorted(times), 0.95) for at, times in windows.items()}
    slow = [at for at, time in p95.items() if at >= -1 and time > args.budget]
    times = lambda some: round(1000 * (serve_load.percentile(sorted(map(took, some)), 0.95) or 0), 1)
    return {
        "requests": len(samples),
        "failed": split(failed),
        "statuses_of_failed": sorted({one.status for one in failed}),
        "late": split(late),
        "in_flight_at_the_kill": sum(one.due <= killed < one.answered for one in samples),
        "p95_ms_before": times([one for one in samples if one.answered <= killed]),
        "p95_ms_from_5_s_after": times([one for one in samples if one.due > killed + 5]),
        "p95_back_after_s": (max(slow) + 1) * WINDOW if slow else 0.0,
    }


def main():
    parser = serve_load.arguments()
    parser.description = __doc__
    parser.add_argument("--model-folder", help="model directory; --model is its name", required=True)
    parser.add_argument("--infer-timeout", default="2s", help="serve.infer-timeout of the serve worker")
    parser.add_argument("--trommel", default="target/release/trommel")
    parser.add_argument("--nats-server", default="nats-server")
    parser.set_defaults(rate=50.0, seconds=30.0, port=free_port())
    args = parser.parse_args()
    running = []
    with tempfile.TemporaryDirectory(prefix="serve-kill-") as folder:
        try:
            victim = start(args, Path(folder), running)
            samples, killed = asyncio.run(kill_under_load(args, victim))
        finally:
            stop(running)
    print(json.dumps(report(args, samples, killed)))


main()

"""Sends the same images to Trommel and to what else answers requests, one server after the other, and adds what they took to
a file.

Usage: python bench/compare/serve.py WORK RESULTS [--only NAME;...] [--clients N] | serve.py --table RESULTS PAGE
WORK is what scripts/compare.sh has made. The server runs on CORES (2,3), the clients on LOAD_CORES (0,1);
TROMMEL is the binary. For each server: its rate with 16 clients that never pause, the highest of some rates at which 95 of
100 answers come within 120 ms and 99 of 100 requests have one, and the times at rates that are the same for all. Requests of a rate
come at random times, whatever is answered (bench/serve_load.py). With --clients only the first is measured, with so many.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import watch

HERE = Path(__file__).parent
CORES, LOAD_CORES = os.environ.get("CORES", "2,3"), os.environ.get("LOAD_CORES", "0,1")
SECONDS = float(os.environ.get("SECONDS_EACH", "6"))
PORT = 18100
BUDGET_MS = 120
# Of the requests at a rate, those that have to get a label.
ANSWERED = 0.99
# Of the rate without a pause: tried from above until one keeps the budget.
SHARES = [1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
# Requests a second at which all are asked.
EQUAL_RATES = [10, 50, 100]
# Python's own start, with imports of PyTorch or Ray.
PATIENCE = 120
MARKS = "<!-- services: begin -->\n", "<!-- services: end -->\n"


def service(name: str) -> list[str]:
    return [str(HERE / "services" / name)]


# Each: the program, how the image is sent, and the environment that it needs.
SERVERS = {
    "Trommel": (None, "raw"),
    "FastAPI + ONNX Runtime + OpenCV, threads": (service("fastapi_service.py"), "raw"),
    "LitServe, dynamic batches": (service("litserve_service.py"), "multipart"),
    "PyTriton, dynamic batches": (service("pytriton_service.py"), "oip"),
    "Ray Serve, batches": (service("ray_service.py"), "raw"),
    "Flask + Transformers pipeline": (service("flask_service.py"), "raw"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("work", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="names of servers, separated by semicolons")
    parser.add_argument("--clients", type=int, help="clients without a pause, and nothing else")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends, too
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    for name in args.only.split(";") if args.only else SERVERS:
        measured = measure(name, args.work.resolve(), args.clients)
        results.setdefault(name, []).append(measured)
        print(f"{name}: {json.dumps(measured)}", flush=True)
        args.results.write_text(json.dumps(results, indent=1) + "\n")


def measure(name: str, work: Path, clients: int | None) -> dict:
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", PORT))  # nobody else may answer
    form = SERVERS[name][1]
    mark = f"COMPARE_RUN={uuid.uuid4()}"
    with (work / "service.log").open("wb") as log:
        server = subprocess.Popen(
            ["env", mark, "taskset", "--cpu-list", CORES, *command(name, work)], stdout=log, stderr=log
        )
        try:
            started = time.monotonic()
            wait(server, name, started)
            if not load(work, form, clients=clients or 16)["answered"]:  # it also warms up
                sys.exit(f"{name} gave no image a label; see {work / 'service.log'}")
            if clients:
                return {"clients": clients, "saturated": load(work, form, clients=clients)["answered"]}
            saturated = load(work, form, clients=16)["answered"]
            within = next((found for share in SHARES if kept(found := load(work, form, rate=share * saturated))), None)
            # Requests would only pile up at a rate that is more than it can do.
            equal = {str(rate): load(work, form, rate=rate) for rate in EQUAL_RATES if rate < saturated}
            return {"saturated": saturated, "within": within, "equal": equal}
        finally:
            end(server, mark)


def end(server: subprocess.Popen, mark: str) -> None:
    """Ends it and all that it has started."""
    server.terminate()
    try:
        server.wait(20)
    except subprocess.TimeoutExpired:
        pass
    while left := watch.processes(mark):
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.1)
    server.wait()


def command(name: str, work: Path) -> list[str]:
    program, model = SERVERS[name][0], str(work / "model")
    if program is None:
        return [os.environ["TROMMEL"], "serve", "--model", model, "--listen", f"127.0.0.1:{PORT}"]
    python = work / ("triton-venv" if name.startswith("PyTriton") else "venv") / "bin/python"
    return [str(python), *program, model, str(PORT)]


def wait(server: subprocess.Popen, name: str, started: float) -> None:
    """Until something answers with other words than that it is not there."""
    while time.monotonic() - started < PATIENCE:
        if server.poll() is not None:
            raise SystemExit(f"{name} has ended before it answered: see service.log")
        for path in ("/", "/v2/health/ready"):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=1)
                time.sleep(2)
                return
            except urllib.error.HTTPError as error:
                if error.code in (404, 405) and not name.startswith("PyTriton"):
                    time.sleep(2)
                    return
            except OSError:
                pass
        time.sleep(0.2)
    raise SystemExit(f"{name} did not answer within {PATIENCE} s: see service.log")


def load(work: Path, form: str, rate: float = 0, clients: int = 16) -> dict:
    out = subprocess.run(
        ["taskset", "--cpu-list", LOAD_CORES, sys.executable, str(HERE.parent / "serve_load.py"), str(work / "photos")]
        + ["--model", "model", "--port", str(PORT), "--form", form, "--rate", str(rate), "--clients", str(clients)]
        + ["--seconds", str(SECONDS), "--warm-up", "1"],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(out.stdout)


def kept(found: dict) -> bool:
    share = found["statuses"].get("200", 0) / sum(found["statuses"].values())
    return share >= ANSWERED and found["p95_ms"] <= BUDGET_MS


def table(results: dict) -> str:
    head = ["", "without a pause, requests/s", f"with p95 ≤ {BUDGET_MS} ms, requests/s", "of Trommel's"]
    head += [f"p50 and p95 at {rate}/s, ms" for rate in EQUAL_RATES]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    within = lambda runs: statistics.median((run["within"] or {"answered": 0})["answered"] for run in runs)
    own = within(results["Trommel"])
    for name, runs in results.items():
        cells = [name, f"{statistics.median(run['saturated'] for run in runs):.0f}"]
        cells += [f"{within(runs):.0f}", f"{within(runs) / own:.2f}"]
        cells += [at_rate([run["equal"].get(str(rate)) for run in runs]) for rate in EQUAL_RATES]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def at_rate(runs: list[dict]) -> str:
    if not all(runs):
        return "too many"
    return " ".join(f"{statistics.median(run[share] for run in runs):.0f}" for share in ("p50_ms", "p95_ms"))


def write(results: Path, page: Path) -> None:
    before, rest = page.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(before + MARKS[0] + table(json.loads(results.read_text())) + MARKS[1] + after)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--table"]:
        write(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()

"""Runs Trommel and its peers one after the other on the same images and adds what they took to a file.

Usage: python bench/compare/run.py WHAT WORK RESULTS [--only NAME,...]
WHAT is `speed` (3,000 photos), `killed` (the same, SIGKILL after 0.6 of the time that `speed` took, then a second run
over the same output) or `broken` (1,000 images, 60 of them broken). WORK is what scripts/compare.sh has made,
with the model in WORK/model. CORES (2,3) are those that all run on; TROMMEL is the binary.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet
import watch

HERE = Path(__file__).parent
CORES = os.environ.get("CORES", "2,3")
KILL_AT = 0.6


def program(name: str) -> list[str]:
    return [sys.executable, str(HERE / name)]


PEERS = {
    "Trommel, one process": [str(HERE / "trommel.sh"), "embedded"],
    "Trommel, four processes and a broker": [str(HERE / "trommel.sh"), "broker"],
    "Trommel, two processes, local hop": [str(HERE / "trommel.sh"), "local"],
    "ONNX Runtime + OpenCV, threads": program("onnxruntime_opencv.py"),
    "WebDataset loop": program("webdataset_loop.py"),
    "ONNX Runtime + Pillow": program("onnxruntime_pillow.py"),
    "DataLoader + ONNX Runtime": program("dataloader.py"),
    "Daft": program("daft_frame.py"),
    "Ray Data": program("ray_data.py"),
    "Flask + Transformers pipeline": program("flask_pipeline.py"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["speed", "killed", "broken"])
    parser.add_argument("work", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--only", default="", help="names of peers, separated by semicolons")
    args = parser.parse_args()
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    chosen = args.only.split(";") if args.only else list(PEERS)
    for name in chosen:
        measured = {"speed": speed, "killed": killed, "broken": broken}[args.what](name, args.work, results)
        results.setdefault(name, {}).setdefault(args.what, []).append(measured)
        print(f"{args.what}, {name}: {json.dumps(measured)}", flush=True)
        args.results.write_text(json.dumps(results, indent=1) + "\n")


def speed(name: str, work: Path, _: dict) -> dict:
    output = empty(work)
    done = start(name, work, "photos", output)
    return asdict(done) | count(output)


def killed(name: str, work: Path, results: dict) -> dict:
    output = empty(work)
    whole = statistics.median(run["seconds"] for run in results[name]["speed"])
    start(name, work, "photos", output, kill_after=KILL_AT * whole)
    before = count(output)
    again = start(name, work, "photos", output)
    return {"kept": before["rows"], "exit_code": again.exit_code, "seconds": again.seconds} | count(output)


def broken(name: str, work: Path, _: dict) -> dict:
    output = empty(work)
    done = start(name, work, "broken", output)
    return {"exit_code": done.exit_code} | count(output)


def empty(work: Path) -> Path:
    """A folder for rows, without what a run before has left in it or next to it."""
    for path in work.glob("rows*"):
        shutil.rmtree(path)
    return work / "rows"


def start(name: str, work: Path, images: str, output: Path, kill_after: float = watch.END) -> watch.Run:
    folder = work / (f"{images}-tar" if name == "WebDataset loop" else images)
    command = [*PEERS[name], str(work / "model"), str(folder), str(output)]
    return watch.run(command, CORES, output, work / "log", kill_after)


def count(output: Path) -> dict:
    """Rows, images that have one, and those of them that have a label."""
    tables = [pyarrow.parquet.read_table(path, columns=["uri", "label"]) for path in output.glob("*.parquet")]
    rows = [row for table in tables for row in table.to_pylist()]
    images = {Path(row["uri"]).name for row in rows}
    labelled = {Path(row["uri"]).name for row in rows if row["label"] is not None}
    return {"rows": len(rows), "images": len(images), "labelled": len(labelled)}


if __name__ == "__main__":
    main()

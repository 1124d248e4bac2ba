"""Ten jobs, each after its dry run: what was forecast, what it took, and whether the interval held it.

Usage: python bench/forecast.py TROMMEL [ROUNDS]. Run by scripts/bench-forecast.sh, which makes the models and the
photos. Five jobs run in one process, five by four worker processes over a broker of their own.
"""

import json
import os
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/findings"))
from lab import Lab  # noqa: E402

MADE = pathlib.Path(os.environ["BENCH"])
ROLES = ("ingest", "preprocess", "infer", "sink")
# The tests' lab shortens these.
DEFAULTS = ("TROMMEL_BROKER__ACK_WAIT", "TROMMEL_SINK__LEASE", "TROMMEL_SINK__PART_INTERVAL",
            "TROMMEL_BROKER__TENSORS_MAX_BYTES", "TROMMEL_BROKER__RESULTS_MAX_BYTES")
# A model, and its images: the digits of this many files, or a folder of photos.
JOBS = [("digits", 30_000), ("digits", "photos-medium"), ("depthwise", "photos"), ("depthwise", "photos-large"),
        ("wide", "photos"), ("wide", "photos-medium")]
EMBEDDED, FLEET = JOBS[:5], [JOBS[0], JOBS[2], JOBS[3], JOBS[4], JOBS[5]]


def source(lab, images):
    if isinstance(images, str):
        return MADE / images
    folder = lab.folder / f"digits-{images}"
    return folder if folder.exists() else lab.images(images, folder.name)


def ended(run):
    """What a command has printed."""
    if run.returncode != 0:
        sys.exit(run.stderr.decode())
    return json.loads(run.stdout)


def embedded(lab, model, images, number):
    job = ["classify", images, "--model", lab.models / model, "--json", "--quiet",
           "--output", lab.folder / f"rows-{number}.parquet"]
    ended(lab.run(*job, "--dry-run", timeout=600))
    compared = ended(lab.run(*job, timeout=600))["run"]["forecast"]
    return compared["said"], compared["seconds"]


def fleet(lab, model, images, number):
    name = f"job-{number}"
    job = ["submit", images, "--model", model, "--json", "--quiet", "--output", f"{lab.folder}/{name}/"]
    ended(lab.run(*job, "--dry-run", timeout=600))
    ended(lab.run(*job, "--id", name, "--wait", timeout=600))
    shown = ended(lab.run("jobs", "show", name, "--json"))
    return shown["forecast"], (shown["finished_at"] - shown["started_at"]) / 1e6


def main(binary, rounds=1):
    found = []
    with Lab(binary) as lab:
        for variable in DEFAULTS:
            lab.env.pop(variable, None)
        lab.env["XDG_CACHE_HOME"] = str(lab.folder / "cache")
        for model in ("depthwise", "wide"):
            (lab.models / model).symlink_to(MADE / model)
        lab.cluster(*ROLES)
        print("| job | images | forecast, s | interval, s | took, s | took / forecast | within |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        numbers = iter(range(1_000))
        for _ in range(int(rounds)):
            for kind, jobs in ((embedded, EMBEDDED), (fleet, FLEET)):
                for model, images in jobs:
                    forecast, took = kind(lab, model, source(lab, images), next(numbers))
                    said = forecast["seconds"]
                    low, high = forecast.get("low_seconds"), forecast.get("high_seconds")
                    inside = low is not None and low <= took <= high
                    interval = f"{low:.1f} to {high:.1f}" if low is not None else "-"
                    print(f"| {kind.__name__}, {model} | {images} | {said:.1f} | {interval} | {took:.1f} | "
                          f"{took / said:.2f} | {'yes' if inside else 'no'} |", flush=True)
                    found.append((took / said, inside))
    off = [abs(ratio - 1) for ratio, _ in found]
    print(f"\n{sum(one <= 0.15 for one in off)} of {len(off)} within 15 %, median {statistics.median(off):.1%} off; "
          f"{sum(inside for _, inside in found)} in their interval")


if __name__ == "__main__":
    main(*sys.argv[1:])

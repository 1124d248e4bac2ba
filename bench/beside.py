"""Two trommel binaries side by side: the same work in turns, so that both see the same machine.

Usage: python bench/beside.py OLD NEW WHAT [ROUNDS], WHAT one of: digits, photos, fleet, listing, rows. Run by
scripts/beside.sh, which gives it two cores. Prints the rates of both, the processor time that they took for an
image, and the medians of their ratios. The time says more than the rate on a machine where others work too.
"""

import contextlib
import json
import os
import pathlib
import resource
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/findings"))
from lab import Lab  # noqa: E402

MADE = pathlib.Path(os.environ["BENCH"])
# The same size of batch for both: what is measured is not what was measured before.
SAME = {"TROMMEL_INFER__MAX_BATCH": "8"}


def classify(lab, source, model):
    """Images a second of one process, from its start to its end."""
    began = time.monotonic()
    ended = lab.run("classify", source, "--model", model, "--output", lab.folder / "rows.parquet", "--overwrite",
                    "--quiet", "--json", env=SAME, timeout=600)
    summary = json.loads(ended.stdout)
    return summary["images"] / (time.monotonic() - began)


@contextlib.contextmanager
def digits(lab):
    """The shipped model on 20,000 of its images: the pipeline's own cost."""
    images = lab.images(20_000)
    yield lambda: classify(lab, images, lab.models / "digits")


@contextlib.contextmanager
def photos(lab):
    """JPEGs of 500 x 375 with a model of depthwise convolutions: decoding and the model."""
    yield lambda: classify(lab, MADE / "photos", MADE / "depthwise")


@contextlib.contextmanager
def rows(lab):
    """Rows into Parquet, without decoding or a model: 100,000 images that are not there."""
    (lab.folder / "list.txt").write_text("".join(f"/nowhere/{number:07}.jpg\n" for number in range(100_000)))
    yield lambda: classify(lab, lab.folder / "list.txt", lab.models / "digits")


@contextlib.contextmanager
def listing(lab):
    """A folder of 100,000 files, listed and published by an ingest worker."""
    files = lab.folder / "files"
    files.mkdir()
    for number in range(100_000):
        (files / f"{number:06}.jpg").touch()
    # Room for all of them: a job gets a part of what is free.
    lab.env |= {"TROMMEL_BROKER__TASKS_MAX_MESSAGES": "8000000", "TROMMEL_BROKER__TENSORS_MAX_BYTES": "4000000000",
                "TROMMEL_BROKER__RESULTS_MAX_BYTES": "2000000000"}
    lab.cluster("ingest")
    numbers = iter(range(1000))

    def listed():
        name = f"job-{next(numbers)}"
        lab.submit(name, files, f"{lab.folder}/{name}/")

        def ended():
            shown = lab.request("trommel.api.status", {"id": name})
            return shown.get("total") and shown
        shown = lab.until("all are listed", ended)
        return shown["total"] / (time.time() - shown["started_at"] / 1e6)
    yield listed


@contextlib.contextmanager
def fleet(lab):
    """Four worker processes over NATS, 6,000 digits: from the first task to the last row."""
    lab.env |= SAME | {"TROMMEL_SINK__PART_INTERVAL": "5s"}
    lab.cluster("ingest", "preprocess", "infer", "sink")
    images, numbers = lab.images(6_000), iter(range(1000))

    def job():
        name = f"job-{next(numbers)}"
        lab.submit(name, images, f"{lab.folder}/{name}/")
        lab.until("it is complete", lambda: lab.state(name) == "complete")
        shown = lab.show(name)
        return shown["total"] / (shown["finished_at"] - shown["started_at"]) * 1e6
    yield job


WHAT = {work.__name__: work for work in (digits, photos, rows, listing, fleet)}


def used(lab):
    """Seconds of processor time of all commands that have ended, and of the lab's workers and broker."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ticks = 0
    for child in lab.children:
        fields = pathlib.Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ended.ru_utime + ended.ru_stime + ticks / os.sysconf("SC_CLK_TCK")


def measured(lab, work):
    """Images a second, and images for each second of processor time, of one round."""
    before, began = used(lab), time.monotonic()
    rate = work()
    images = rate * (time.monotonic() - began)
    return rate, images / (used(lab) - before)


def main(old, new, what, rounds=5):
    rounds, found = int(rounds), ([], [])
    with contextlib.ExitStack() as stack:
        labs = [stack.enter_context(Lab(binary)) for binary in (old, new)]
        works = [stack.enter_context(WHAT[what](lab)) for lab in labs]
        for work in works:
            work()  # warms the caches
        for number in range(rounds):
            # Each is first in turn.
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                found[side].append(measured(labs[side], works[side]))
    for kind, unit in enumerate(("images/s", "images for a second of processor time")):
        old, new = ([one[kind] for one in side] for side in found)
        ratios = sorted(now / before for before, now in zip(old, new))
        print(f"{what}: old {statistics.median(old):.0f}, new {statistics.median(new):.0f} {unit}; "
              f"new / old = {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})")


if __name__ == "__main__":
    main(*sys.argv[1:])

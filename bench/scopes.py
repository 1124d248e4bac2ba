"""What jobs that can never end cost the job next to them.

Usage: python bench/scopes.py TROMMEL [PAIRS]. In each pair, on a broker and four worker processes of its own, a
job of 20,000 digits alone, and the same next to a job of a model that does not load, one whose output does not
answer, and one in the high lane without images. Prints the rates and the median of their ratios.
"""

import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/findings"))
from lab import DIGITS, Lab  # noqa: E402

IMAGES = 20_000


def stand_still(lab):
    """The three other jobs, as far as they come."""
    broken = (DIGITS / "model.onnx").read_bytes().replace(b"Relu", b"Rexu")
    lab.model("unloadable", model__onnx=broken)
    lab.submit("unloadable", lab.images(500, "few"), f"{lab.folder}/unloadable/", model="unloadable")
    lab.submit("unreachable", lab.folder / "few", "postgres://nobody@127.0.0.1:1/nowhere?table=t")
    lab.ask(lambda _, jetstream: jetstream.add_stream(name="photos", subjects=["photos.>"]))
    lab.submit("empty", "nats://photos.0", f"{lab.folder}/empty/", "--lane", "high")
    # A submission that was refused at once ends nothing: it is no job.
    lab.until("all are begun", lambda: all(lab.state(name) not in ("queued", None)
                                           for name in ("unreachable", "empty")))
    streams = ("TASKS", "TENSORS", "RESULTS")
    before = []

    def still():
        before.append([lab.waiting(stream) for stream in streams])
        return len(before) > 20 and before[-20:] == [before[-1]] * 20
    lab.until("nothing of them moves", still)


def rate(trommel, beside):
    """Images a second of the good job."""
    with Lab(trommel) as lab:
        # As the settings come, but for what a quick start needs.
        lab.env |= {"TROMMEL_SINK__PART_INTERVAL": "5s", "TROMMEL_SINK__LEASE": "15s", "TROMMEL_BROKER__ACK_WAIT": "30s",
                    "TROMMEL_INFER__MAX_BATCH": "8"}
        lab.cluster("ingest", "preprocess", "infer", "sink")
        images = lab.images(IMAGES)
        lab.submit("warm", lab.images(200, "warm-images"), f"{lab.folder}/warm/")
        lab.until("the model is loaded", lambda: lab.state("warm") == "complete")
        if beside:
            stand_still(lab)
        lab.submit("good", images, f"{lab.folder}/good/")
        lab.until("it is complete", lambda: lab.state("good") == "complete")
        if beside:
            print("  next to", {name: lab.state(name) for name in ("unloadable", "unreachable", "empty")}, flush=True)
        shown = lab.show("good")
        return IMAGES / (shown["finished_at"] - shown["started_at"]) * 1e6


def main(trommel, pairs=5):
    ratios = []
    for pair in range(int(pairs)):
        # Each is first in turn.
        order = (False, True) if pair % 2 == 0 else (True, False)
        found = {beside: rate(trommel, beside) for beside in order}
        ratios.append(found[True] / found[False])
        print(f"alone {found[False]:.0f}, next to the others {found[True]:.0f} images/s: {ratios[-1]:.3f}", flush=True)
    print(f"median {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What one process does with bad luck: `trommel classify`, without a broker."""

import json
import os
import pathlib
import shutil
import time

from lab import DIGITS, Seen
from store import Store


def classify(lab, source, output, *args, **more):
    """The command; gives its end."""
    return lab.run("classify", source, "--model", DIGITS, "--output", output, "--quiet", *args, **more)


def peak(lab, *args, **more):
    """The most memory that a command took, in MiB."""
    child, most = lab.start(*args, **more), 0
    while child.poll() is None:
        status = pathlib.Path(f"/proc/{child.pid}/status").read_text()
        most = int(status.partition("VmHWM:")[2].split()[0]) if "VmHWM:" in status else most
        time.sleep(0.01)
    return most // 1024


def r9(lab):
    """An object is read without a condition, so that its row may carry another one's etag."""
    store = Store()
    store.upload(lab.images(5), "photos/")
    classify(lab, "s3://photos/", lab.folder / "rows.jsonl", env=store.env())
    reads = [headers for method, name, headers in store.asked if method == "GET" and name.startswith("photos/")]
    bare = sum("if-match" not in headers for headers in reads)
    if bare:
        raise Seen(f"{bare} of {len(reads)} reads without If-Match")
    return f"{len(reads)} reads, all with If-Match"


def r26(lab):
    """A store that asks for patience (429) has the image failed for good."""
    store = Store()
    store.upload(lab.images(20), "photos/")
    busy = {"photos/000003", "photos/000011"}

    def once(method, name, _headers):
        if method == "GET" and name.split(".")[0] in busy:
            busy.discard(name.split(".")[0])
            return 429, "TooManyRequests"
    store.before = once
    classify(lab, "s3://photos/", lab.folder / "rows.jsonl", env=store.env())
    rows = [json.loads(line) for line in (lab.folder / "rows.jsonl").read_text().splitlines()]
    failed = sum(row["status"] == "failed" for row in rows)
    if failed:
        raise Seen(f"{failed} of {len(rows)} rows failed after one 429 each")
    return f"{len(rows)} rows, none failed"


def r29(lab):
    """A part is as large as its rows happen to be."""
    [image] = lab.images(1).iterdir()
    line = json.dumps({"uri": str(image), "note": "x" * 200_000}) + "\n"
    (lab.folder / "list.jsonl").write_text(line * 1000)
    classify(lab, lab.folder / "list.jsonl", lab.folder / "rows", "--format", "jsonl",
             env={"TROMMEL_SINK__PART_INTERVAL": "1h"})
    sizes = [part.stat().st_size for part in (lab.folder / "rows").glob("part-*")]
    if max(sizes) > 128 << 20:
        raise Seen(f"a part of {max(sizes) >> 20} MiB")
    return f"{len(sizes)} parts, the largest of {max(sizes) >> 20} MiB"


def r30(lab):
    """One stray quote makes a record of the rest of the file."""
    with open(lab.folder / "list.csv", "w") as manifest:
        manifest.write('uri,note\n/a.png,"\n')
        for _ in range(300):
            manifest.write("/b.png,x\n" * (1 << 17))
    size = (lab.folder / "list.csv").stat().st_size >> 20
    most = peak(lab, "classify", lab.folder / "list.csv", "--model", DIGITS, "--output", lab.folder / "rows.jsonl")
    if most > size:
        raise Seen(f"{most} MiB of memory for a list of {size} MiB")
    return f"{most} MiB of memory for a list of {size} MiB"


def r38(lab):
    """Text that a spreadsheet runs as a formula, and no way to have it escaped."""
    [image] = lab.images(1).iterdir()
    (lab.folder / "list.csv").write_text(f'uri,note\n{image},"=1+1"\n')
    ended = classify(lab, lab.folder / "list.csv", lab.folder / "rows.csv", "--escape-formulas")
    if ended.returncode:
        raise Seen("no option for it: " + ended.stderr.decode().splitlines()[0])
    if "'=1+1" not in (lab.folder / "rows.csv").read_text():
        raise Seen("the formula stands in the cell")
    return "with --escape-formulas the cell begins with '"


def r41(lab):
    """The source is listed twice."""
    store = Store()
    store.upload(lab.images(5), "photos/a/")
    classify(lab, "s3://photos/a/", lab.folder / "rows.jsonl", env=store.env())
    lists = store.times("LIST")
    # One look whether anything is there, and the listing itself.
    if lists > 2:
        raise Seen(f"{lists} requests that list a bucket of five images")
    return f"{lists} requests that list a bucket: a look and the listing"


def r43(lab):
    """A binary that is replaced while it starts does not start."""
    copy = lab.folder / "trommel"
    shutil.copy(lab.binary, copy)
    held = os.open(copy, os.O_RDONLY)
    copy.unlink()
    copy.write_text("replaced")
    lab.binary = f"/proc/{os.getpid()}/fd/{held}"
    ended = classify(lab, lab.images(3), lab.folder / "rows.jsonl")
    os.close(held)
    if ended.returncode:
        raise Seen(f"exit code {ended.returncode}: {ended.stderr.decode().strip()}")
    return "it works on"


def r46(lab):
    """An image that kills the process ends each resume of the run."""
    store = Store()
    store.upload(lab.images(300), "photos/")
    running = []

    def kill(method, name, _headers):
        if method == "GET" and name.startswith("photos/000150"):
            running[-1].kill()
            return 500, "InternalError"
    store.before = kill
    limits = {"TROMMEL_RETRY__MAX_ATTEMPTS": "2", "TROMMEL_RETRY__MAX_DELIVERIES": "3"}
    for deaths in range(8):
        running.append(lab.start("classify", "s3://photos/", "--model", DIGITS, "--output", lab.folder / "rows.jsonl",
                                 "--quiet", env=store.env() | limits))
        if running[-1].wait() == 0:
            return f"after {deaths} deaths the run ends with code {running[-1].returncode}"
    assert running[-1].returncode < 0, (lab.folder / "command.log").read_text()
    raise Seen("the same image killed eight runs of eight, with three deliveries allowed")


def r56(lab):
    """The error of a row tells the first bytes of a file."""
    (lab.folder / "images").mkdir()
    (lab.folder / "images/key.png").write_bytes(b"MySecretKey of nobody else")
    classify(lab, lab.folder / "images", lab.folder / "rows.jsonl")
    [row] = [json.loads(line) for line in (lab.folder / "rows.jsonl").read_text().splitlines()]
    if any(told in row["error"] for told in ("MySe", "4d", "4D", "77, 121")):
        raise Seen(f"the row says: {row['error']}")
    return f"the row says: {row['error']}"


FINDINGS = {"R9": r9, "R26": r26, "R29": r29, "R30": r30, "R38": r38, "R41": r41, "R43": r43, "R46": r46,
            "R56": r56}

"""Looks for the findings of a review in two trommel binaries, an old and a new one.

    python tests/findings OLD NEW [FINDING ...]

Each finding is a function that drives a binary from outside and either sees it (`Seen`) or says what is there
instead. Prints a table, and ends with 1 unless each is seen in the old binary and not in the new one.
"""

import concurrent.futures
import sys
import traceback

import access
import cluster
import embedded
import jobs
from lab import Lab, Seen

FINDINGS = embedded.FINDINGS | cluster.FINDINGS | jobs.FINDINGS | access.FINDINGS
# More at once only share the processors.
AT_ONCE = 4


def look(binary, finding):
    """Whether a finding is there (`None`: the program itself failed), and what was seen."""
    try:
        with Lab(binary) as lab:
            return False, FINDINGS[finding](lab)
    except Seen as seen:
        return True, str(seen)
    except Exception:
        return None, traceback.format_exc(limit=-3)


def said(answer):
    is_there, what = answer
    verdict = {True: "fails", False: "holds", None: "cannot be told"}[is_there]
    return f"{verdict}: {' '.join(what.split()).replace('|', '/')[-300:]}"


def main(old, new, *wanted):
    wanted = wanted or sorted(FINDINGS, key=lambda name: int(name[1:]))
    print("| finding | what | at OLD | at NEW |\n| --- | --- | --- | --- |", flush=True)
    unlike = 0
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        looks = [[pool.submit(look, binary, finding) for binary in (old, new)] for finding in wanted]
        for finding, pair in zip(wanted, looks):
            before, now = (future.result() for future in pair)
            what = FINDINGS[finding].__doc__.strip().rstrip(".")
            print(f"| {finding} | {what} | {said(before)} | {said(now)} |", flush=True)
            unlike += (before[0], now[0]) != (True, False)
    print(f"\n{len(wanted) - unlike} of {len(wanted)} are there in OLD and gone in NEW")
    return unlike > 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

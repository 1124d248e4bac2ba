"""Writes the table of what scripts/compare.sh has measured into a page, between two marks.

Usage: python bench/compare/table.py RESULTS PAGE
"""

import json
import statistics
import sys
from pathlib import Path

MARKS = "<!-- compare: begin -->\n", "<!-- compare: end -->\n"
HEAD = [
    "|",
    "seconds",
    "images/s",
    "of Trommel's time",
    "first row, s",
    "peak, MB",
    "kept at SIGKILL",
    "rows (images) after a second run",
    "it took, s",
    "of 940 + 60 broken: rows, labelled",
]


def main() -> None:
    results, page = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    before, rest = page.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(before + MARKS[0] + table(results) + MARKS[1] + after)


def table(results: dict) -> str:
    own = median(next(iter(results.values()))["speed"], "seconds")
    lines = [" | ".join(HEAD) + " |", "| --- " * len(HEAD) + "|"]
    for name, measured in results.items():
        cells = [name, *speed(measured.get("speed"), own), *killed(measured.get("killed"))]
        cells.append(broken(measured.get("broken")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def median(runs: list[dict], what: str) -> float:
    return statistics.median(run[what] for run in runs)


def speed(runs: list[dict] | None, own: float) -> list[str]:
    if not runs:
        return [""] * 5
    seconds, first, peak = (median(runs, what) for what in ("seconds", "first_row", "peak_mb"))
    rate = runs[0]["images"] / seconds
    return [f"{seconds:.1f}", f"{rate:.0f}", f"{seconds / own:.1f}", f"{first:.1f}", f"{peak:.0f}"]


def killed(runs: list[dict] | None) -> list[str]:
    if not runs:
        return ["", "", ""]
    run = runs[-1]
    return [str(run["kept"]), f"{run['rows']} ({run['images']})", f"{run['seconds']:.1f}"]


def broken(runs: list[dict] | None) -> str:
    if not runs:
        return ""
    run = runs[-1]
    ended = "" if run["exit_code"] == 0 else f", exit code {run['exit_code']}"
    return f"{run['rows']}, {run['labelled']}{ended}"


if __name__ == "__main__":
    main()

"""Turns the figures of `scripts/bench.sh` into a table.

Usage: python bench/report.py STAGES.json RUN.json...   (RUN: `trommel classify --json`)
"""

import json
import os
import statistics
import sys
from pathlib import Path


def main() -> None:
    stages = json.loads(Path(sys.argv[1]).read_text())
    rates = [json.loads(Path(run).read_text())["run"]["images_per_second"] for run in sys.argv[2:]]
    cores = os.cpu_count() or 1
    batch, infer = max(stages["infer"].items(), key=lambda item: item[1])
    # Both rates are of all cores at work, so the seconds of an image add up.
    limit = 1 / (1 / stages["prepare"] + 1 / infer)
    rate = statistics.median(rates)
    print(f"| what | images/s |\n| --- | --- |")
    print(f"| decode + resize alone, {cores} cores | {stages['prepare']:.0f} |")
    print(f"| model alone, {cores} cores, best batch ({batch}) | {infer:.0f} |")
    print(f"| limit from both, {cores} cores | {limit:.0f} |")
    runs = ", ".join(f"{run:.0f}" for run in rates)
    print(f"| `trommel classify`, median of {len(rates)} ({runs}) | {rate:.0f} |")
    print(f"| share of the limit | {rate / limit:.2f} |")


if __name__ == "__main__":
    main()

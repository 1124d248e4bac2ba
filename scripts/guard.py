"""Counts instructions by callgrind and compares them with those recorded; scripts/guard.sh calls it.

Usage: python3 scripts/guard.py PROGRAM PROFILE [--record]

valgrind shows a program one processor on every machine: with AVX2, without AVX-512. So the counts differ only
where the program does, or what it is built with.
"""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RECORD = Path(__file__).parent.parent / "bench" / "instructions.json"
# Share by which a count may grow.
MARGIN = 0.03


def main() -> None:
    program, profile = sys.argv[1:3]
    counts = measure(program)
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if sys.argv[3:] == ["--record"]:
        recorded[profile] = {"rustc": rustc(), "instructions": counts}
        RECORD.write_text(json.dumps(recorded, indent=2) + "\n")
        print(f"guard: recorded {len(counts)} counts of profile {profile}")
        return
    if sys.argv[3:]:
        sys.exit(f"guard: {sys.argv[3]} is no option; give --record or nothing")
    if profile not in recorded:
        sys.exit(f"guard: {RECORD.name} has no counts of profile {profile}; record them with --record")
    compare(counts, recorded[profile])


def measure(program: str) -> dict[str, int]:
    """Instructions of each piece of work, done once."""
    listed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    pieces = [line.rsplit(" ", 1) for line in listed.splitlines()]
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        counts = pool.map(lambda piece: once(program, piece[0], int(piece[1])), pieces)
        return dict(zip((name for name, _ in pieces), counts))


def once(program: str, piece: str, times: int) -> int:
    """What `times` more of a piece cost, by one: the start of the program and first times are in both runs."""
    return round((run(program, piece, 1 + times) - run(program, piece, 1)) / times)


def run(program: str, piece: str, times: int) -> int:
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", program, piece, str(times)]
    done = subprocess.run(command, capture_output=True, text=True)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or not collected:
        sys.exit(f"guard: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return int(collected[1])


def compare(counts: dict[str, int], recorded: dict) -> None:
    before = recorded["instructions"]
    if counts.keys() != before.keys():
        differing = ", ".join(sorted(counts.keys() ^ before.keys()))
        sys.exit(f"guard: counted or recorded alone: {differing}; run scripts/guard.sh --record")
    changes = {piece: count / before[piece] - 1 for piece, count in counts.items()}
    for piece, count in counts.items():
        print(f"guard: {piece:14} {count:>12,} instructions, {changes[piece]:+.1%}")
    grown = [f"{piece} by {change:.1%}" for piece, change in changes.items() if change > MARGIN]
    if grown:
        compiler = "" if rustc() == recorded["rustc"] else f" (recorded with {recorded['rustc']}, this is {rustc()})"
        sys.exit(
            f"guard: takes more instructions than recorded: {', '.join(grown)}{compiler}; "
            "make it cheaper, or run scripts/guard.sh --record and say in the commit what it is worth"
        )
    if any(change < -MARGIN for change in changes.values()):
        print("guard: some take fewer than recorded; scripts/guard.sh --record keeps it so")


def rustc() -> str:
    return subprocess.run(["rustc", "--version"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()

"""Runs a program on some cores and says when its first rows were there and how much memory it took."""

import os
import signal
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

# Seconds between looks at the output, and looks at it for one at the memory.
TICK = 0.01
MEMORY_EVERY = 10
# A program that takes longer is ended.
END = 600


@dataclass
class Run:
    exit_code: int
    seconds: float
    # Until the first file of rows was there; nothing if none ever was.
    first_row: float | None
    # Memory of all its processes together, shared pages counted once, MB.
    peak_mb: float


def run(command: list[str], cores: str, output: Path, log: Path, kill_after: float = END) -> Run:
    """Runs until the end, or until all processes that it started are killed by SIGKILL."""
    mark = f"COMPARE_RUN={uuid.uuid4()}"
    name, value = mark.split("=")
    with log.open("ab") as out:
        start = time.monotonic()
        # Its children inherit the mark, also those that leave its session.
        program = subprocess.Popen(
            ["taskset", "--cpu-list", cores, *command], env=os.environ | {name: value}, stdout=out, stderr=out
        )
        first_row, peak, ticks = None, 0.0, 0
        while program.poll() is None and time.monotonic() - start < kill_after:
            if first_row is None and any(output.glob("*.parquet")):
                first_row = time.monotonic() - start
            if ticks % MEMORY_EVERY == 0:
                peak = max(peak, memory(mark))
            ticks += 1
            time.sleep(TICK)
        seconds = time.monotonic() - start
        if first_row is None and any(output.glob("*.parquet")):
            first_row = seconds
        # What it left running would disturb the next one.
        for pid in processes(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        return Run(program.wait(), seconds, first_row, peak)


def processes(mark: str) -> list[int]:
    """All that were started with this in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
            except OSError:
                pass  # it has ended, or is another user's
    return found


def memory(mark: str) -> float:
    total = 0
    for pid in processes(mark):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1000

"""Pairs that `trommel dedup` finds among 10 million perceptual hashes, with its time and memory.

Usage: python bench/dedup_hashes.py TROMMEL [COUNT]
Random hashes; every fifth is another one with 0 to 4 bits changed. All of them, and what they are copies of, have to be
found; random others are hardly ever so near.
"""

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DISTANCE = 4


def main():
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000_000
    random = np.random.default_rng(5)
    hashes = random.integers(0, 1 << 64, count, dtype=np.uint64)
    copies = np.arange(4, count, 5)
    originals = random.integers(0, copies // 5 + 1) * 5  # which are no copies themselves
    changed = np.zeros(len(copies), dtype=np.uint64)
    for bits in range(1, DISTANCE + 1):
        chosen = random.integers(0, DISTANCE + 1, len(copies)) >= bits
        turned = np.uint64(1) << random.integers(0, 64, len(copies), dtype=np.uint64)
        changed = np.where(chosen, changed ^ turned, changed)
    hashes[copies] = hashes[originals] ^ changed
    expected = set(copies.tolist()) | set(originals.tolist())
    text = lambda value: pa.array([value]).take(pa.array(np.zeros(count, np.int8)))
    table = pa.table({
        "index": np.arange(count), "uri": [f"{number}.jpg" for number in range(count)], "status": text("ok"),
        "model": text("digits"), "model_version": text("0123456789ab"), "phash": [f"{value:016x}" for value in hashes.tolist()],
    })  # fmt: skip
    with tempfile.TemporaryDirectory(dir=".") as folder:
        folder = Path(folder)
        pq.write_table(table, folder / "rows.parquet", compression="zstd")
        del table
        start = time.perf_counter()
        command = [sys.argv[1], "dedup", folder / "rows.parquet", "--distance", str(DISTANCE), "--output", folder / "found.parquet"]
        subprocess.run(list(map(str, command)), check=True)
        seconds = time.perf_counter() - start
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        found = {int(uri.split(".")[0]) for uri in pq.read_table(folder / "found.parquet")["uri"].to_pylist()}
    print(
        f"{count} hashes at a distance of {DISTANCE} bits: {len(found & expected)} of {len(expected)} images with a partner found, "
        f"{len(found - expected)} others, in {seconds:.1f} s and {memory:,.0f} MiB at most"
    )


if __name__ == "__main__":
    main()

"""Pairs that `trommel dedup` finds among 100,000 embeddings, compared with all of them.

Usage: python bench/dedup_recall.py TROMMEL [COUNT]
Random embeddings that lean to one side, as those of CLIP do; every fifth is a copy of another with noise, of a cosine
from 0.93 to 1. An image counts as found when it stands in a group.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WIDTH, THRESHOLD = 512, 0.95


def main():
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    random = np.random.default_rng(5)
    vectors = random.standard_normal((count, WIDTH), dtype=np.float32) + 1.0
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for place in range(4, count, 5):
        cosine = random.uniform(0.93, 1.0)
        noise = random.standard_normal(WIDTH, dtype=np.float32)
        original = vectors[random.integers(place)]
        noise -= original * (noise @ original)
        noise /= np.linalg.norm(noise)
        vectors[place] = cosine * original + np.sqrt(1 - cosine**2) * noise
    expected = set()
    for first in range(0, count, 2000):
        cosines = vectors[first : first + 2000] @ vectors.T
        rows, columns = np.nonzero(cosines >= THRESHOLD)
        rows += first
        expected.update(rows[rows != columns].tolist())
    text = lambda value: pa.array([value] * count)
    table = pa.table({
        "index": np.arange(count), "uri": [f"{number}.jpg" for number in range(count)], "status": text("ok"),
        "model": text("clip"), "model_version": text("0123456789ab"),
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), WIDTH),
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        pq.write_table(table, folder / "rows.parquet", compression="none", use_dictionary=False)
        start = time.perf_counter()
        command = [sys.argv[1], "dedup", folder / "rows.parquet", "--threshold", str(THRESHOLD), "--output", folder / "found.parquet"]
        subprocess.run(list(map(str, command)), check=True)
        seconds = time.perf_counter() - start
        found = {int(uri.split(".")[0]) for uri in pq.read_table(folder / "found.parquet")["uri"].to_pylist()}
    print(
        f"{count} embeddings of {WIDTH} values: {len(found & expected)} of {len(expected)} images with a partner found "
        f"({len(found & expected) / len(expected):.4f}), {len(found - expected)} others, in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()

"""Writes results with embeddings as Trommel has them, of random values: ROWS rows of 512 halves of length 1.

Usage: python bench/relabel_rows.py FILE.parquet ROWS MODEL_VERSION
"""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

WIDTH, GROUP = 512, 65536


def group(first, count, version):
    random = np.random.default_rng(first)
    vectors = random.standard_normal((count, WIDTH), dtype=np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    values = pa.array(vectors.astype(np.float16).reshape(-1))
    text = lambda value: pa.array([value] * count)
    none = lambda kind: pa.nulls(count, kind)
    top = pa.list_(pa.struct([("label", pa.string()), ("class", pa.int32()), ("score", pa.float32())]))
    columns = {
        "job_id": text("job"),
        "index": pa.array(np.arange(first, first + count)),
        "uri": pa.array([f"s3://photos/2026/{number:09}.jpg" for number in range(first, first + count)]),
        "etag": none(pa.string()),
        "bytes": pa.array(random.integers(10_000, 200_000, count)),
        "width": pa.array(np.full(count, 640, np.int32)),
        "height": pa.array(np.full(count, 480, np.int32)),
        "status": text("ok"),
        "error_kind": none(pa.string()),
        "error": none(pa.string()),
        "label": none(pa.string()),
        "score": none(pa.float32()),
        "top": pa.array([[]] * count, top),
        "model": text("clip"),
        "model_version": text(version),
        "attempts": pa.array(np.ones(count, np.int32)),
        "finished_at": pa.array(np.full(count, 1_780_000_000_000_000), pa.timestamp("us", "UTC")),
        "embedding": pa.FixedSizeListArray.from_arrays(values, WIDTH),
    }
    return pa.table(columns)


def main():
    path, rows, version = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    writer = None
    for first in range(0, rows, GROUP):
        table = group(first, min(GROUP, rows - first), version)
        writer = writer or pq.ParquetWriter(
            path, table.schema, compression={name: "zstd" for name in table.schema.names if name != "embedding"},
            use_dictionary=[name for name in table.schema.names if name != "embedding"],
        )  # fmt: skip
        writer.write_table(table)
    writer.close()


if __name__ == "__main__":
    main()

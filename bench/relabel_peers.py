"""`trommel relabel` side by side with NumPy and DuckDB: rows a second from the same file to labels in a file.

Usage: python bench/relabel_peers.py TROMMEL FILE.parquet HEAD.json THREADS ROUNDS
Each reads the embeddings, multiplies, takes the best class, and writes Parquet: Trommel all columns of its rows,
the others index, label and score. They take turns; medians over the rounds, and the range.
"""

import base64
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def numpy(path, labels, weights, bias, out):
    writer = None
    for batch in pq.ParquetFile(path).iter_batches(8192, columns=["index", "embedding"]):
        vectors = batch.column("embedding").flatten().to_numpy(zero_copy_only=False)
        logits = vectors.reshape(len(batch), -1).astype(np.float32) @ weights.T + bias
        best = logits.argmax(1)
        powers = np.exp(logits - logits.max(1, keepdims=True))
        scores = powers.max(1) / powers.sum(1)
        table = pa.table({"index": batch.column("index"), "label": labels[best], "score": scores})
        writer = writer or pq.ParquetWriter(out, table.schema, compression="zstd")
        writer.write_table(table)
    writer.close()


def duck(path, labels, weights, bias, out, threads):
    database = duckdb.connect(config={"threads": threads})
    database.execute(f"create table head (label varchar, weights float[{weights.shape[1]}], bias float)")
    rows = [[label, row.tolist(), float(value)] for label, row, value in zip(labels, weights, bias)]
    database.executemany("insert into head values (?, ?, ?)", rows)
    database.execute(f"""
        copy (select "index", arg_max(label, logit) as label, max(exp(logit)) / sum(exp(logit)) as score from (
            select "index", head.label, array_inner_product(embedding::float[{weights.shape[1]}], head.weights) + head.bias as logit
            from read_parquet('{path}'), head) group by "index") to '{out}' (format parquet, compression zstd)
    """)


def trommel(binary, path, head, out):
    command = [binary, "relabel", path, "--head", head, "--top-k", "1", "--output", out]
    subprocess.run(command, stderr=subprocess.DEVNULL, check=True)


def main():
    binary, path, head = sys.argv[1:4]
    threads, rounds = int(sys.argv[4]), int(sys.argv[5])
    linear = json.loads(Path(head).read_text())
    weights = np.frombuffer(base64.b64decode(linear["weights"]), np.float32).reshape(-1, linear["width"])
    bias, labels = np.array(linear["bias"], np.float32), np.array(linear["labels"])
    rows = pq.ParquetFile(path).metadata.num_rows
    pa.set_cpu_count(threads)
    ways = {
        "trommel relabel": lambda out: trommel(binary, path, head, f"{out}/rows"),
        "NumPy and PyArrow": lambda out: numpy(path, labels, weights, bias, f"{out}/out.parquet"),
        "DuckDB": lambda out: duck(path, labels, weights, bias, f"{out}/out.parquet", threads),
    }
    seconds = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
                start = time.perf_counter()
                run(folder)
                seconds[name].append(time.perf_counter() - start)
    for name, taken in seconds.items():
        rates = sorted(rows / second for second in taken)
        print(f"{name}: {statistics.median(rates):,.0f} rows a second ({rates[0]:,.0f} to {rates[-1]:,.0f})", flush=True)


if __name__ == "__main__":
    main()

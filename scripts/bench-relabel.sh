#!/usr/bin/env bash
# New labels from stored embeddings: rows a second on two cores, next to NumPy and DuckDB on the same file in
# turns, and memory over ten times as many rows (of 1 KiB each on the disk); then what fit and dedup find next to scikit-learn and brute force, and
# whether labels of two towers are those of Transformers. Usage: scripts/bench-relabel.sh [ROWS]
# scripts/bench.sh has to have run before.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

rows=${1:-1000000}
[[ -x $python ]] || { echo "$(basename "$0"): run scripts/bench.sh first, which makes $python" >&2; exit 1; }
build
scratch

python3 - "$run/head.json" <<'PYTHON'
import array, base64, json, random, sys

random.seed(1)
weights = array.array("f", (random.gauss(0, 1) for _ in range(10 * 512)))
head = {
    "version": 1, "model": "clip", "model_version": "0123456789ab", "labels": [f"class {n}" for n in range(10)],
    "width": 512, "normalize": False, "activation": "softmax",
    "weights": base64.b64encode(weights.tobytes()).decode(), "bias": [0.0] * 10,
}
json.dump(head, open(sys.argv[1], "w"))
PYTHON

peers=$run/venv
python3 -m venv "$peers"
"$peers/bin/python" -m pip install --quiet --disable-pip-version-check numpy pyarrow==26.0.1 duckdb==2.0.0
"$peers/bin/python" bench/relabel_rows.py "$run/rows.parquet" "$rows" 0123456789ab
cat "$run/rows.parquet" > /dev/null # all of them from the system's cache
OMP_NUM_THREADS=2 OPENBLAS_NUM_THREADS=2 taskset -c 0,1 \
    "$peers/bin/python" bench/relabel_peers.py "$trommel" "$run/rows.parquet" "$run/head.json" 2 5

# Memory does not grow with the rows.
for count in "$rows" $((10 * rows)); do
    "$peers/bin/python" bench/relabel_rows.py "$run/rows.parquet" "$count" 0123456789ab
    taskset -c 0,1 /usr/bin/time -f "trommel relabel, $count rows: %M KiB at most, %e seconds" \
        "$trommel" relabel "$run/rows.parquet" --head "$run/head.json" --top-k 1 --output "$run/new-$count/"
done

"$python" -m pip install --quiet --disable-pip-version-check pyarrow==26.0.1
"$python" bench/fit_peers.py "$trommel"
"$python" bench/dedup_recall.py "$trommel"
"$python" bench/dedup_hashes.py "$trommel"
"$python" bench/towers.py "$trommel" "$work"

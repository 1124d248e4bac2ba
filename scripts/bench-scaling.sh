#!/usr/bin/env bash
# Two preprocess processes next to one, on large JPEGs (4000 x 3000), each with one decoding thread:
# how much faster the job gets. Next to it what a second process gives on this machine at all: two
# embedded runs side by side, each with one thread, against one. Then, with small photos and a model
# on one thread, so that tensors wait for it, how full its batches are.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
large_photos
build
. scripts/workers.bash
large=$run/photos
for copy in 1 2 3 4 5; do
    mkdir -p "$large/$copy"
    ln -s "$work"/large/*.jpg "$large/$copy"
done
export TROMMEL_PREPROCESS__THREADS=1

# seconds COMMAND...: how long it takes.
seconds() {
    local start=$EPOCHREALTIME
    "$@" >/dev/null 2>&1
    python3 -c 'import sys; print(float(sys.argv[2]) - float(sys.argv[1]))' "$start" "$EPOCHREALTIME"
}
alone() {
    "$trommel" classify "$large" --model models/digits --quiet --overwrite --output "$run/rows-$1.parquet"
}
pair() {
    alone 1 &
    local first=$!
    alone 2
    wait "$first"
}

for number in 1 2 3; do
    seconds alone 1 >>"$run/alone"
    seconds pair >>"$run/pair"
done
broker
worker ingest,sink
worker infer
worker preprocess
submit_thrice one "$large" digits
worker preprocess
submit_thrice two "$large" digits
stop
broker
worker ingest,sink
TROMMEL_INFER__INSTANCES=1 TROMMEL_INFER__INTRA_THREADS=1 worker infer
TROMMEL_PREPROCESS__THREADS=2 worker preprocess
"$trommel" submit "$work/photos" --model mobilenet --output "$run/full/" --wait --quiet >/dev/null 2>&1
stop
fill=$(batch_fill)

python3 - "$run" "$(images_per_second "$run"/one-?.json)" "$(images_per_second "$run"/two-?.json)" "$fill" <<'PYTHON'
import pathlib, statistics, sys
run, one, two, fill = pathlib.Path(sys.argv[1]), *map(float, sys.argv[2:])
alone, pair = (statistics.median(map(float, (run / name).read_text().split())) for name in ("alone", "pair"))
print(f"one preprocess process: {one:.1f} images/s, two: {two:.1f}; {two / one:.2f} times")
print(f"what a second process gives on this machine: {2 * alone / pair:.2f} times")
print(f"mean fill of batches while tensors wait: {fill:.3f}")
PYTHON

#!/usr/bin/env bash
# Rows a second into Parquet parts, and the time and memory that a job of a billion committed rows
# takes to continue. Writes to target, so to a disk and not to memory.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

build
scratch
for number in 1 2 3; do
    target/release/examples/sink commit "$run/rows-$number"
done
target/release/examples/sink simulate "$run/billion"
for _ in 1 2 3; do
    target/release/examples/sink resume "$run/billion"
done

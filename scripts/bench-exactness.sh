#!/usr/bin/env bash
# Trommel's tensors next to the reference processors', family by family and format by format; and
# whether labels and logits agree with the Python reference on 510 images and three architectures.
# scripts/bench.sh has to have run before.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
"$python" -m pip install --quiet --disable-pip-version-check pyarrow==26.0.1
build
"$python" -m unittest models/test_export.py
"$python" bench/exactness.py target/release/examples/tensor
"$python" bench/agreement.py target/release/trommel .tools/bench

#!/usr/bin/env bash
# A job that names two models next to a job for each of them, on large JPEGs (4000 x 3000), whose decoding
# dominates: each image is decoded once. Roles in two processes on a broker of their own, three jobs each,
# medians. scripts/bench.sh has to have run before.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
large_photos
build
. scripts/workers.bash
broker
worker ingest,sink
worker preprocess,infer
for models in mobilenet digits mobilenet,digits; do
    submit_thrice "$models" "$work/large" "$models"
done
stop

python3 - "$(images_per_second "$run"/mobilenet-?.json)" "$(images_per_second "$run"/digits-?.json)" \
    "$(images_per_second "$run"/mobilenet,digits-?.json)" <<'PYTHON'
import sys
mobilenet, digits, both = map(float, sys.argv[1:])
dearer = min(mobilenet, digits)
print("| models of the job | images/s | time of the dearer one alone |\n| --- | --- | --- |")
for name, rate in [("MobileNetV3-small", mobilenet), ("digits", digits), ("both", both)]:
    print(f"| {name} | {rate:.1f} | {dearer / rate:.2f} |")
PYTHON

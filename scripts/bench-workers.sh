#!/usr/bin/env bash
# Throughput of separate worker processes next to the embedded run, in one sitting: the model and the
# photos of scripts/bench.sh, which has to have run before. Tensors go through the broker, then by
# the local hop.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
build
. scripts/workers.bash

for number in 1 2 3; do
    "$trommel" classify "$work/photos" --model "$work/mobilenet" --json --quiet \
        --output "$run/rows.parquet" --overwrite >"$run/embedded-$number.json"
done
broker
for role in ingest preprocess infer sink; do worker "$role"; done
submit_thrice jetstream "$work/photos" mobilenet
stop
fill=$(batch_fill)
broker
worker ingest,sink
worker preprocess,infer --tensor-hop local
submit_thrice local "$work/photos" mobilenet
stop
local_fill=$(batch_fill)

python3 - "$run" "$(images_per_second "$run"/jetstream-?.json)" "$fill" \
    "$(images_per_second "$run"/local-?.json)" "$local_fill" <<'PYTHON'
import json, pathlib, statistics, sys
run, through_broker, fill, local, local_fill = sys.argv[1:]
runs = [json.loads(path.read_text())["run"] for path in pathlib.Path(run).glob("embedded-?.json")]
alone = statistics.median(one["images_per_second"] for one in runs)
print("| what | images/s | of embedded | mean batch fill |\n| --- | --- | --- | --- |")
print(f"| embedded | {alone:.0f} | 1 | |")
for what, rate, filled in [
    ("four processes, tensors through JetStream", float(through_broker), fill),
    ("two processes, local tensor hop", float(local), local_fill),
]:
    print(f"| {what} | {rate:.0f} | {rate / alone:.2f} | {filled} |")
PYTHON

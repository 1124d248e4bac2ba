#!/usr/bin/env bash
# Throughput of separate worker processes beside the embedded run, in one sitting: the model and the
# photos of scripts/bench.sh, which has to have run before. Tensors go through the broker, then by
# the local hop.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH"

work=$PWD/.tools/bench
[[ -d $work/photos && -d $work/mobilenet ]] || {
    echo "bench-workers: run scripts/bench.sh first, which makes the photos and the model" >&2
    exit 1
}
cargo build --release --quiet -p trommel
trommel=$PWD/target/release/trommel
run=$(mktemp -d)
pids=()
stop() {
    kill "${pids[@]}" 2>/dev/null || true
    wait 2>/dev/null || true
    pids=()
}
trap 'stop; rm -rf "$run"' EXIT
mkdir "$run/models"
ln -s "$work/mobilenet" "$run/models/mobilenet"

# workers HOP ROLES...: one process for each of ROLES, on a broker of their own.
workers() {
    nats-server --jetstream --store_dir "$run/store-$1" --port -1 --ports_file_dir "$run" >/dev/null 2>&1 &
    pids+=($!)
    local ports
    until ports=$(ls "$run"/*.ports 2>/dev/null) && [[ -s $ports ]]; do sleep 0.1; done
    TROMMEL_BROKER__URL=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["nats"][0])' "$ports")
    export TROMMEL_BROKER__URL
    for roles in "${@:2}"; do
        hop=jetstream
        [[ $roles != preprocess,infer ]] || hop=$1
        "$trommel" worker --role "$roles" --tensor-hop "$hop" --model-repository "$run/models" 2>>"$run/log" &
        pids+=($!)
    done
    until [[ $(grep -c "working as" "$run/log") == $(($# - 1)) ]]; do sleep 0.1; done
}

# rate NAME: runs the job three times; the median of images/s from the first task to the last row.
rate() {
    for number in 1 2 3; do
        "$trommel" submit "$work/photos" --model mobilenet --output "$run/$1-$number/" --wait --json --quiet \
            >"$run/$1-$number.json"
    done
    python3 - "$run/$1"-?.json <<'PYTHON'
import json, statistics, sys
jobs = [json.load(open(path)) for path in sys.argv[1:]]
rates = [job["total"] / (job["finished_at"] - job["started_at"]) * 1e6 for job in jobs]
print(f"{statistics.median(rates):.0f}")
PYTHON
}

embedded() {
    for number in 1 2 3; do
        "$trommel" classify "$work/photos" --model "$work/mobilenet" --json --quiet \
            --output "$run/rows.parquet" --overwrite >"$run/embedded-$number.json"
    done
    python3 - "$run"/embedded-?.json <<'PYTHON'
import json, statistics, sys
rates = [json.load(open(path))["run"]["images_per_second"] for path in sys.argv[1:]]
print(f"{statistics.median(rates):.0f}")
PYTHON
}

alone=$(embedded)
workers jetstream ingest preprocess infer sink
through_broker=$(rate jetstream)
stop
rm -f "$run"/*.ports "$run/log"
workers local ingest,sink preprocess,infer
local=$(rate local)
stop

echo "| what | images/s | of embedded |"
echo "| --- | --- | --- |"
echo "| embedded | $alone | 1 |"
python3 - "$alone" "$through_broker" "$local" <<'PYTHON'
import sys
alone, through_broker, local = map(float, sys.argv[1:])
print(f"| four processes, tensors through JetStream | {through_broker:.0f} | {through_broker / alone:.2f} |")
print(f"| two processes, local tensor hop | {local:.0f} | {local / alone:.2f} |")
PYTHON

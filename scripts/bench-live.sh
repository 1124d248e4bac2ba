#!/usr/bin/env bash
# What six cameras of 25 frames a second get, each with bursts of three times as many: the age of frames at
# their result, the least share that a source has of what is fair, and the memory of `trommel serve` at a
# tenth of the time and at its end. The first argument is the time in seconds, ten minutes unless it is given; then MODEL is a model
# directory and IMAGES a folder; without them the ones of scripts/bench.sh. All share the machine.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

seconds=${1:-600}
if [[ $# -lt 3 ]]; then
    need_bench
fi
model=${2:-$work/mobilenet}
images=${3:-$work/photos}
port=${PORT:-18090}
[[ -n ${TROMMEL:-} ]] || build
trommel=${TROMMEL:-$trommel}
scratch
export PATH=$PWD/.tools/bin:$PATH
nats-server -a 127.0.0.1 -p "$port" -js -sd "$run/nats" >"$run/nats.log" 2>&1 &
broker=$!
"$trommel" serve --model "$model" --listen "127.0.0.1:$((port + 1))" --nats "nats://127.0.0.1:$port" \
    --telemetry-listen "127.0.0.1:$((port + 2))" --live '*' 2>"$run/log" &
server=$!
trap 'kill $server $broker 2>/dev/null; rm -rf "$run"' EXIT
for _ in $(seq 600); do
    grep -q 'answering on' "$run/log" && break
    kill -0 $server || { cat "$run/log" >&2; exit 1; }
    sleep 0.1
done
memory() { awk '/VmRSS/ { print int($2 / 1024) " MB" }' "/proc/$server/status"; }
.tools/wire-venv/bin/python bench/live_load.py "$images" --nats "nats://127.0.0.1:$port" \
    --seconds "$seconds" ${RATE:+--rate "$RATE"} &
load=$!
sleep "$((seconds / 10 + 1))"
early=$(memory)
wait $load
echo "memory: $early, then $(memory)"
curl -s "http://127.0.0.1:$((port + 2))/metrics" | grep '^trommel_live_frames_dropped_total' | grep -v ' 0$' || true

#!/usr/bin/env bash
# What `trommel serve` takes and gives on this machine: the rate at saturation, and the times of answers at
# low load, at half load, and at three times what it can do; then both duties, requests beside a job. Requests
# come in an open loop (bench/serve_load.py, bench/serve_beside_jobs.py). OVERLOAD_SECONDS=300 overloads it for five
# minutes. MODEL is a model directory and IMAGES a folder; without them the ones of
# scripts/bench.sh. The clients share the machine with the server.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

if [[ $# == 0 ]]; then
    need_bench
fi
model=${1:-$work/mobilenet}
images=${2:-$work/photos}
port=${PORT:-18080}
overload=${OVERLOAD_SECONDS:-30}
window=${WINDOW_SECONDS:-30}
[[ -n ${TROMMEL:-} ]] || build
trommel=${TROMMEL:-$trommel}
scratch
"$trommel" serve --model "$model" --listen "127.0.0.1:$port" 2>"$run/log" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -rf "$run"' EXIT
for _ in $(seq 600); do
    grep -q 'answering on' "$run/log" && break
    kill -0 $server || { cat "$run/log" >&2; exit 1; }
    sleep 0.1
done

load() { python3 bench/serve_load.py "$images" --model "$(basename "$model")" --port "$port" "$@"; }
share() { python3 -c "print($1 * $2)"; }
saturated=$(load --clients 16 | tee /dev/stderr | python3 -c 'import json, sys; print(json.load(sys.stdin)["answered"])')
goodput='import json, sys; one = json.load(sys.stdin); one["goodput"] = round(one["answered"] / float(sys.argv[1]), 3); print(json.dumps(one))'
for round in $(seq "${ROUNDS:-3}"); do
    echo "round $round, load of the machine $(cut -d ' ' -f 1-3 /proc/loadavg)"
    for times in 0.02 0.5 0.9; do
        echo "$times of saturation: $(load --rate "$(share "$saturated" "$times")")"
    done
    # What it gives of what it can, and to whom it answers in time.
    echo "3 times saturation: $(load --rate "$(share "$saturated" 3)" --seconds "$overload" | python3 -c "$goodput" "$saturated")"
done
kill $server
wait $server || true

# Both duties: a job that saturates the machine, and requests at a tenth of what it can answer.
echo "both duties: $(python3 bench/serve_beside_jobs.py "$images" --model "$model" --capacity "$saturated" \
    --trommel "$trommel" --seconds "$window" --rounds "${ROUNDS:-3}")"

#!/usr/bin/env bash
# What `trommel serve` takes and gives on this machine: the rate at saturation, and the times of answers at
# low load, at half load, near saturation, and at three times what it can do; whether they are what `trommel bench`
# said; the same by hey, next to ours; then both duties, requests with a job; last, SIGKILL of one of two infer
# workers. Requests come in an open loop (bench/serve_load.py), but for saturation and hey.
#
# The arguments are a model directory and a folder of images; without them, the ones of scripts/bench.sh. ROUNDS=3,
# and lengths in seconds: LOAD_SECONDS=10 of each load, OVERLOAD_SECONDS=30, WINDOW_SECONDS=30 of both duties and
# KILL_SECONDS=30. TROMMEL is the binary. The clients share the machine with the server; SERVER_CORES=0,1 keeps
# the server of the first part, and what it is compared with, on these cores, and the clients on CLIENT_CORES=2,3.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

if [[ $# == 0 ]]; then
    need_bench
fi
scripts/setup.sh bench
model=${1:-$work/mobilenet}
images=${2:-$work/photos}
port=${PORT:-18080}
seconds=${LOAD_SECONDS:-10}
overload=${OVERLOAD_SECONDS:-30}
window=${WINDOW_SECONDS:-30}
rounds=${ROUNDS:-3}
python=${PYTHON:-$python}
name=$(basename "$model")
[[ -n ${TROMMEL:-} ]] || build
trommel=${TROMMEL:-$trommel}
scratch
on_server=() on_client=()
[[ -z ${SERVER_CORES:-} ]] || on_server=(taskset --cpu-list "$SERVER_CORES")
[[ -z ${CLIENT_CORES:-} ]] || on_client=(taskset --cpu-list "$CLIENT_CORES")

"${on_server[@]}" "$trommel" classify "$images" --model "$model" --json --quiet --output "$run/rows.parquet" >"$run/bulk.json"

"${on_server[@]}" "$trommel" serve --model "$model" --listen "127.0.0.1:$port" 2>"$run/log" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -rf "$run"' EXIT
until grep -q 'answering on' "$run/log"; do
    kill -0 $server || { cat "$run/log" >&2; exit 1; }
    sleep 0.1
done

load() { "${on_client[@]}" python3 bench/serve_load.py "$images" --model "$name" --port "$port" --seconds "$seconds" "$@"; }
product() { python3 -c "print($1 * $2)"; }
load --clients 16 >"$run/saturated.json"
saturated=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["answered"])' "$run/saturated.json")
for round in $(seq "$rounds"); do
    echo "round $round, load of the machine $(cut -d ' ' -f 1-3 /proc/loadavg)" >&2
    # What `trommel bench` says of a load, and what the same load then has. Queues near saturation need time.
    for times in 0.3 0.6 0.8; do
        "${on_client[@]}" "$trommel" bench "$images" --against "http://127.0.0.1:$port" --model "$name" --seed "$round" \
            --rates "$(product "$saturated" "$times")" --duration "$((3 * seconds))s" --json >"$run/bench-$times-$round.json"
        load --rate "$(product "$saturated" "$times")" --seconds "$((3 * seconds))" >"$run/$times-$round.json"
    done
    for times in 0.02 0.5 0.9 0.95; do
        load --rate "$(product "$saturated" "$times")" >"$run/$times-$round.json"
    done
    load --rate "$(product "$saturated" 3)" --seconds "$overload" >"$run/3-$round.json"
done
"${on_server[@]}" "$python" bench/serve_bare.py "$model" "$images" 4 "$(product "$saturated" 0.02)" >"$run/bare.json"
# The same photo by both generators, as hey sends only one.
photo=$(find "$images" -type f | sort | sed -n 1p)
echo "$seconds" >"$run/seconds.json"
for clients in 1 16; do
    "${on_client[@]}" hey -z "${seconds}s" -c "$clients" -m POST -T image/jpeg -D "$photo" -o csv \
        "http://127.0.0.1:$port/v1/models/$name/classify" >"$run/hey-$clients.csv"
    load --clients "$clients" --files 1 >"$run/ours-$clients.json"
done
kill $server
wait $server || true
# What no server can avoid: the same client around one that does nothing.
"${on_server[@]}" python3 bench/serve_echo.py "$port" &
server=$!
until (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do sleep 0.1; done
load --rate "$(product "$saturated" 0.02)" >"$run/echo-paused.json"
load --clients 1 --files 1 >"$run/echo.json"
kill $server
wait $server || true
python3 bench/serve_report.py "$run"

# Both duties: a job that saturates the machine, and requests at a tenth of what it can answer.
echo "both duties: $(python3 bench/serve_beside_jobs.py "$images" --model "$model" --capacity "$saturated" \
    --trommel "$trommel" --seconds "$window" --rounds "$rounds")"
echo "one of two infer workers killed: $(python3 bench/serve_kill.py "$images" --model-folder "$model" --model "$name" \
    --rate "$(product "$saturated" 0.3)" --trommel "$trommel" --seconds "${KILL_SECONDS:-30}")"

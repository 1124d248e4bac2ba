# Sourced by benchmarks after benchmark.bash: worker processes on a broker of their own, in the temporary
# folder "$run", with the models digits and, if scripts/bench.sh has run, mobilenet.

scratch
pids=()
expected=0
trap 'stop; rm -rf "$run"' EXIT
mkdir "$run/models"
ln -s "$PWD/models/digits" "$run/models/digits"
[[ ! -d $work/mobilenet ]] || ln -s "$work/mobilenet" "$run/models/mobilenet"

# Ends all of them, workers first, so that what they say at their end is in "$run/log".
stop() {
    local pid
    for ((at = ${#pids[@]} - 1; at >= 0; at--)); do
        pid=${pids[at]}
        kill "$pid" 2>/dev/null || true
        wait "$pid" 2>/dev/null || true
    done
    pids=()
}

# broker: a nats-server with an empty store, whose address all later commands get.
broker() {
    rm -rf "$run/store" "$run"/*.ports "$run/log"
    expected=0
    nats-server --jetstream --store_dir "$run/store" --port -1 --ports_file_dir "$run" >/dev/null 2>&1 &
    pids+=($!)
    local ports
    until ports=$(ls "$run"/*.ports 2>/dev/null) && [[ -s $ports ]]; do sleep 0.1; done
    TROMMEL_BROKER__URL=$(python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["nats"][0])' "$ports")
    export TROMMEL_BROKER__URL
}

# worker ROLES FLAG...: one process. Its log goes to "$run/log".
worker() {
    TROMMEL_LOG=trommel_worker=info "$trommel" worker --role "$1" --model-repository "$run/models" \
        --allow-source / --allow-output / "${@:2}" 2>>"$run/log" &
    pids+=($!)
    expected=$((expected + 1))
    until [[ $(grep -c "working as" "$run/log") == "$expected" ]]; do sleep 0.1; done
}

# submit_thrice NAME SOURCE MODEL: the job three times, each summary in "$run/NAME-NUMBER.json".
submit_thrice() {
    for number in 1 2 3; do
        "$trommel" submit "$2" --model "$3" --output "$run/$1-$number/" --wait --json --quiet \
            >"$run/$1-$number.json"
    done
}

# images_per_second SUMMARY...: the median over jobs, from the first task to the last row.
images_per_second() {
    python3 - "$@" <<'PYTHON'
import json, statistics, sys
jobs = [json.load(open(path)) for path in sys.argv[1:]]
rates = [job["total"] / (job["finished_at"] - job["started_at"]) * 1e6 for job in jobs]
print(f"{statistics.median(rates):.1f}")
PYTHON
}

# batch_fill: the mean fill of the batches of the last infer process that ended.
batch_fill() {
    grep -o 'fill=[0-9.]*' "$run/log" | tail -1 | cut -d= -f2
}

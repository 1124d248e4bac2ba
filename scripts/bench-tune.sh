#!/usr/bin/env bash
# trommel tune beside a full grid of the same settings, on two models: the digits and MobileNetV3-small. Of both
# the settings found run five times by turns at the end. scripts/bench.sh has to have run before.
#
# IMAGES is the number of images of a trial with the whole budget.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
build
scratch
images=${IMAGES:-512}
cores=$(nproc)

# trial MODEL SETTINGS...: images a second with these settings, of one trial with all images.
trial() {
    local model=$1 batch=$2 sessions=$3 threads=$4 held=$5 wait=$6
    TROMMEL_INFER__MAX_WAIT=$wait TROMMEL_PREPROCESS__MAX_IN_FLIGHT=$held \
        "$trommel" tune "$work/photos" --model "$model" --images "$images" --dry-run --json \
        --max-batch "$batch" --instances "${sessions%x*}" --intra-threads "${sessions#*x}" \
        --preprocess-threads "$threads" |
        "$python" -c 'import json, sys; print(json.load(sys.stdin)["tried"][-1]["images_per_second"])'
}

# grid MODEL FILE: all settings that tune would search, a line each.
grid() {
    local batch sessions threads each wait
    for batch in 1 2 4 8 16; do
        for sessions in $(printf '%s\n' 1 2 $((cores / 2)) "$cores" | sort -nu | awk -v c="$cores" '$1 >= 1 && $1 <= c { print $1 "x" int(c / $1) }'); do
            for threads in $(printf '%s\n' $(((cores + 1) / 2)) "$cores" $((cores + (cores + 1) / 2)) | sort -nu); do
                for each in 2 4 8; do
                    for wait in 2ms 20ms 100ms; do
                        local held=$((each * threads))
                        echo "$batch $sessions $threads $held $wait $(trial "$1" "$batch" "$sessions" "$threads" "$held" "$wait")"
                    done
                done
            done
        done
    done >"$2"
}

for model in models/digits "$work/mobilenet"; do
    name=$(basename "$model")
    start=$EPOCHREALTIME
    "$trommel" tune "$work/photos" --model "$model" --images "$images" --dry-run --json >"$run/$name.json"
    tuned=$EPOCHREALTIME
    grid "$model" "$run/$name.grid"
    end=$EPOCHREALTIME
    read -r batch sessions threads held wait _ < <(sort -k6,6gr "$run/$name.grid" | head -n 1)
    found=$("$python" - "$run/$name.json" <<'PYTHON'
import json, sys
best = json.load(open(sys.argv[1]))["best"]
print(best["max-batch"], f'{best["instances"]}x{best["intra-threads"]}', best["preprocess-threads"], best["max-in-flight"], best["max-wait"])
PYTHON
    )
    for _ in 1 2 3 4 5; do
        # shellcheck disable=SC2086
        trial "$model" $found >>"$run/$name.found"
        trial "$model" "$batch" "$sessions" "$threads" "$held" "$wait" >>"$run/$name.best"
    done
    "$python" - "$run" "$name" "$start" "$tuned" "$end" <<'PYTHON'
import pathlib, statistics, sys

run, name = pathlib.Path(sys.argv[1]), sys.argv[2]
start, tuned, end = map(float, sys.argv[3:])
median = lambda kind: statistics.median(map(float, (run / f"{name}.{kind}").read_text().split()))
found, best = median("found"), median("best")
print(f"{name}: tune {found:.1f}/s in {tuned - start:.0f} s, grid {best:.1f}/s in {end - tuned:.0f} s; "
      f"ratio {found / best:.3f}, time {(tuned - start) / (end - tuned):.3f}")
PYTHON
done

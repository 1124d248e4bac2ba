#!/usr/bin/env bash
# Throughput next to the limit of the bare stages, in one run: MobileNetV3-small (timm, random
# weights), 3,000 JPEGs of 500 x 375, all cores. Fetches PyTorch once, to export the model.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

if [[ ! -x $python ]] || ! "$python" -c 'import timm, torch, onnx' 2>/dev/null; then
    echo "bench: installing PyTorch to export the model (some gigabytes, once)"
    python3 -m venv .tools/venv-models
    "$python" -m pip install --quiet --disable-pip-version-check -r models/requirements.txt
fi
mkdir -p "$work"
model mobilenet timm/mobilenetv3_small_100
[[ -d $work/photos ]] || "$python" bench/make_photos.py "$work/photos" 3000 500 375

build

nproc --all | sed 's/$/ cores/'
grep -m1 'model name' /proc/cpuinfo | cut -d: -f2- || true
runs=()
for run in 1 2 3; do
    "$trommel" classify "$work/photos" --model "$work/mobilenet" --json \
        --output "$work/rows.parquet" --overwrite >"$work/run-$run.json"
    runs+=("$work/run-$run.json")
    # Between the runs, so that all see the same machine.
    [[ $run != 2 ]] || target/release/examples/stages "$work/mobilenet" "$work/photos" >"$work/stages.json"
done
"$python" bench/report.py "$work/stages.json" "${runs[@]}"

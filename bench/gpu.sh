#!/usr/bin/env bash
# Trommel on a GPU compared with ONNX Runtime alone, by device, precision and size of batch. It
# needs no network: everything is given.
#
#   bench/gpu.sh MODEL_DIR…
#
# In the environment:
#   ONNXRUNTIME  folder with a GPU build of libonnxruntime.so and its providers
#                (default: .tools/onnxruntime; fetched by: ONNXRUNTIME=gpu scripts/setup.sh build)
#   PYTHON       a Python with the same build of onnxruntime (default: .tools/venv-models/bin/python)
#   PROGRAMS     folder with the release programs trommel and examples/engine (default: target/release)
#   PHOTOS       folder of JPEGs for the whole pipeline (default: .tools/bench/photos, of scripts/bench.sh)
#   DEVICES      default: cuda:0 tensorrt:0
#   BATCHES      default: 1 8 32 128
#   SECONDS_EACH default: 5
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
[[ $# -gt 0 ]] || { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }
onnxruntime=${ONNXRUNTIME:-$here/.tools/onnxruntime}
python=${PYTHON:-$here/.tools/venv-models/bin/python}
programs=${PROGRAMS:-$here/target/release}
photos=${PHOTOS:-$here/.tools/bench/photos}
read -ra devices <<<"${DEVICES:-cuda:0 tensorrt:0}"
read -ra batches <<<"${BATCHES:-1 8 32 128}"
seconds=${SECONDS_EACH:-5}
export ORT_DYLIB_PATH=$onnxruntime/libonnxruntime.so ORT_DISABLE_TELEMETRY=1
for file in "$ORT_DYLIB_PATH" "$python" "$programs/trommel" "$programs/examples/engine" "$photos"; do
    [[ -e $file ]] || { echo "gpu.sh: there is no $file; see the head of this script" >&2 && exit 1; }
done
run=$(mktemp -d)
trap 'stop_watching; rm -rf "$run"' EXIT

# watch_gpu DEVICE FILE: writes how much the GPU is in use each half second, until stop_watching.
watcher=
watch_gpu() {
    command -v nvidia-smi >/dev/null && [[ $1 == *:* ]] || return 0
    nvidia-smi --id="${1##*:}" --query-gpu=utilization.gpu --format=csv,noheader,nounits --loop-ms=500 >"$2" &
    watcher=$!
}
stop_watching() { [[ -z $watcher ]] || { kill "$watcher"; wait "$watcher" 2>/dev/null; } || true; watcher=; }

measure() {
    local model=$1 device=$2 precision=$3 name
    name=$(basename "$model")-${device//:/-}-$precision
    local fp16=()
    [[ $precision == model ]] || fp16=(--fp16)
    for round in 1 2 3; do
        "$python" "$here/bench/bare_onnxruntime.py" "$model" "$seconds" --device "$device" \
            --batches "$(IFS=, && echo "${batches[*]}")" "${fp16[@]}" >"$run/$name.bare.$round"
        for batch in "${batches[@]}"; do
            for instances in 1 2; do
                "$programs/examples/engine" "$model" "$seconds" "$instances" 1 "$batch" "$device" "$precision" \
                    >"$run/$name.engine-$batch-$instances.$round"
            done
        done
        watch_gpu "$device" "$run/$name.gpu.$round"
        TROMMEL_INFER__PRECISION=$precision "$programs/trommel" classify "$photos" --model "$model" \
            --device "$device" --output "$run/$name.$round.parquet" --json >"$run/$name.whole.$round"
        stop_watching
    done
}

for model; do
    for device in "${devices[@]}"; do
        measure "$model" "$device" model
        [[ $device == tensorrt* ]] && measure "$model" "$device" fp16
    done
done
"$python" "$here/bench/gpu_table.py" "$run"

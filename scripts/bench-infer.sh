#!/usr/bin/env bash
# The model's stage alone next to ONNX Runtime from Python, in one run: ViT-B/16, ResNet-50 and
# MobileNetV3-small with random weights, and ViT-B/16 in INT8. Three rounds, medians; of Python the
# best size of batch counts. scripts/bench.sh has to have run before.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
model vit hf/vit-base
model vit-int8 hf/vit-base --int8 dynamic
model resnet50 timm/resnet50
build
scratch
models=(vit resnet50 mobilenet vit-int8)
for round in 1 2 3; do
    for model in "${models[@]}"; do
        "$python" bench/bare_onnxruntime.py "$work/$model" 2 >"$run/$model-bare-$round.json"
        target/release/examples/engine "$work/$model" 6 >"$run/$model-engine-$round.json"
    done
done

"$python" - "$run" "${models[@]}" <<'PYTHON'
import json, pathlib, statistics, sys

run, names = pathlib.Path(sys.argv[1]), sys.argv[2:]
read = lambda name, what: [json.loads(path.read_text()) for path in sorted(run.glob(f"{name}-{what}-?.json"))]
median = lambda rounds, key: statistics.median(one[key] for one in rounds)
print("| model | Python, best batch | images/s | Trommel, images/s | ratio | mean fill | time between batches |")
print("| --- | --- | --- | --- | --- | --- | --- |")
rates = {}
for name in names:
    bare, engine = read(name, "bare"), read(name, "engine")
    best = max(bare[0], key=lambda batch: median(bare, batch))
    limit, rates[name] = median(bare, best), median(engine, "images_per_second")
    fill, gaps = median(engine, "fill"), median(engine, "gaps")
    print(f"| {name} | {best} | {limit:.1f} | {rates[name]:.1f} | {rates[name] / limit:.2f} | {fill:.3f} | {100 * gaps:.2f} % |")
print(f"\nINT8 is {rates['vit-int8'] / rates['vit']:.2f} times FP32.")
PYTHON

#!/usr/bin/env bash
# Where teams come from: a Flask service around the Transformers pipeline, one image a request, next to
# `trommel classify` on the same 200 photos, ViT-B/16 with random weights, in FP32 and in INT8. Three
# rounds in one run, medians. scripts/bench.sh has to have run before.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
"$python" -c 'import flask' 2>/dev/null || "$python" -m pip install --quiet --disable-pip-version-check flask==3.1.2
model vit hf/vit-base
model vit-int8 hf/vit-base --int8 dynamic
build
scratch
images=200
mkdir "$run/photos"
mapfile -t photos < <(find "$work/photos" -name '*.jpg' | sort)
ln -s "${photos[@]:0:images}" "$run/photos"
for round in 1 2 3; do
    "$python" bench/flask_service.py "$run/photos" "$images" 2>/dev/null >"$run/flask-$round.json"
    for model in vit vit-int8; do
        "$trommel" classify "$run/photos" --model "$work/$model" --json --quiet --overwrite \
            --output "$run/$model.parquet" >"$run/$model-$round.json"
    done
done

python3 - "$run" <<'PYTHON'
import json, pathlib, statistics, sys

run = pathlib.Path(sys.argv[1])
read = lambda name: [json.loads(path.read_text()) for path in sorted(run.glob(f"{name}-?.json"))]
flask = statistics.median(one["images_per_second"] for one in read("flask"))
print("| what | images/s | of the service |\n| --- | --- | --- |")
print(f"| Flask, Transformers pipeline, PyTorch FP32 | {flask:.1f} | 1 |")
for name, what in [("vit", "FP32"), ("vit-int8", "INT8 (dynamic)")]:
    rate = statistics.median(one["run"]["images_per_second"] for one in read(name))
    print(f"| `trommel classify`, {what} | {rate:.1f} | {rate / flask:.2f} |")
PYTHON
"$trommel" evaluate "$run/vit-int8.parquet" --against "$run/vit.parquet" | sed -n 1,3p

#!/usr/bin/env bash
# `trommel serve` next to what else answers requests with labels: the same photos, model and clients, each server on two
# cores (CORES=2,3), the clients on two others (LOAD_CORES=0,1). One file a server in bench/compare/services, which says how
# it is set up. Three rounds, all servers in each; then ViT-B/16 in INT8 next to Flask and PyTorch with 8 clients. Writes
# bench/compare/services.json and the table in docs/benchmarks.md. Run scripts/compare.sh first, which installs the peers; PyTriton
# gets an environment of its own, by TRITON_PYTHON (python3), as it wants an older NumPy; it works with few patch releases
# of Python, of 3.11 with 3.11.2 but not with 3.11.7. Takes 25 minutes. TROMMEL names
# a binary that is built already.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

compare=$PWD/.tools/compare
python=$compare/venv/bin/python
results=$PWD/bench/compare/services.json
export DO_NOT_TRACK=1 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1
[[ -d $compare/photos && -d $compare/model ]] || { echo "compare-serve: run scripts/compare.sh first" >&2; exit 1; }
if ! "$compare/triton-venv/bin/python" -c 'import pytriton' 2>/dev/null; then
    "${TRITON_PYTHON:-python3}" -m venv --clear "$compare/triton-venv"
    "$compare/triton-venv/bin/pip" install --quiet --disable-pip-version-check --only-binary=:all: \
        -r bench/compare/services/triton-requirements.txt
fi
for kind in fp32 int8; do
    mkdir -p "$compare/vit-$kind"
    ln -sfn "$compare"/{photos,venv} "$compare/vit-$kind/"
    way=(--output "$compare/vit-$kind/model")
    [[ $kind == fp32 ]] || way+=(--int8 dynamic)
    [[ -d $compare/vit-$kind/model ]] ||
        "$python" models/export.py timm/vit_base_patch16_224 --random "${way[@]}" >/dev/null
done
if [[ -z ${TROMMEL:-} ]]; then
    build
    TROMMEL=$trommel
fi
export TROMMEL

rm -f "$results"
for _ in 1 2 3; do
    "$python" bench/compare/serve.py "$compare" "$results"
done
"$python" bench/compare/serve.py --table "$results" docs/benchmarks.md
rm -f "$compare"/vit-*/services.json
for _ in 1 2 3; do
    "$python" bench/compare/serve.py "$compare/vit-fp32" "$compare/vit-fp32/services.json" --clients 8 \
        --only "Trommel;Flask + Transformers pipeline"
    "$python" bench/compare/serve.py "$compare/vit-int8" "$compare/vit-int8/services.json" --clients 8 --only Trommel
done

#!/usr/bin/env bash
# Trommel next to what else classifies folders of images, on the same photos, with the same model, rows as Parquet,
# on two cores (CORES=2,3): time with start-up, the first row, memory, rows after a SIGKILL and a second run, rows of
# 1,000 images of which 60 are broken. One file a peer in bench/compare, which says how it is set up and why.
# Three rounds, all peers in each. Writes bench/compare/results.json and the table in docs/benchmarks.md.
# TROMMEL names a binary that is built already. Takes half an hour, and 7 GB in
# .tools/compare, which may be removed afterwards.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

compare=$PWD/.tools/compare
results=$PWD/bench/compare/results.json
python=$compare/venv/bin/python
# None of them may report its use, or look for models elsewhere.
export DO_NOT_TRACK=1 DAFT_ANALYTICS_ENABLED=0 RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1
if [[ ! -x $python ]] || ! "$python" -c 'import daft, flask, litserve, multipart, ray.serve, timm, torch, waitress, webdataset' 2>/dev/null; then
    echo "compare: installing the peers (7 GB, once)"
    python3 -m venv --clear "$compare/venv"
    "$python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --only-binary=:all: \
        -r models/requirements.txt -r bench/compare/requirements.txt
fi
[[ -d $compare/photos ]] || "$python" bench/make_photos.py "$compare/photos" 3000 500 375
[[ -d $compare/model ]] ||
    "$python" models/export.py timm/mobilenetv3_small_100 --random --output "$compare/model" >/dev/null
if [[ ! -d $compare/broken-tar ]]; then
    rm -rf "$compare/broken" "$compare/photos-tar"
    "$python" bench/compare/prepare.py "$compare/photos" "$compare"
fi
if [[ -z ${TROMMEL:-} ]]; then
    build
    TROMMEL=$trommel
fi
export TROMMEL

rm -f "$results"
for what in speed speed speed killed broken; do
    "$python" bench/compare/run.py $what "$compare" "$results"
done
"$python" bench/compare/table.py "$results" docs/benchmarks.md

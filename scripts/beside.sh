#!/usr/bin/env bash
# Two trommel binaries side by side on two cores, in turns: `scripts/beside.sh OLD NEW [WHAT …]`. WHAT: digits,
# photos, rows, listing, fleet (all of them unless named). Build both in one profile. Five rounds, or ROUNDS.
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
. "$(dirname "$0")/benchmark.bash"

old=$1 new=$2
shift 2
[[ $# -gt 0 ]] || set -- digits photos rows listing fleet
for what in "$@"; do
    if [[ $what == photos && ! (-d $work/photos && -d $work/depthwise) ]]; then
        python3 -m venv "$work/venv"
        "$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy pillow onnx
        "$work/venv/bin/python" bench/make_photos.py "$work/photos" 3000 500 375
        "$work/venv/bin/python" bench/depthwise.py "$work/depthwise"
    fi
    taskset --cpu-list "${CORES:-0,1}" .tools/wire-venv/bin/python bench/beside.py "$old" "$new" "$what" "${ROUNDS:-5}"
done

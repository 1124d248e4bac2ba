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
    if [[ $what == photos ]]; then
        made photos make_photos.py 3000 500 375
        made depthwise depthwise.py
    fi
    taskset --cpu-list "${CORES:-0,1}" .tools/wire-venv/bin/python bench/beside.py "$old" "$new" "$what" "${ROUNDS:-5}"
done

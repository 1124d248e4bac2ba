#!/usr/bin/env bash
# Ten jobs after their dry runs, in one process and by a fleet: how long was forecast, and how long it took. Three
# models, four sizes of images, two cores. TROMMEL is the binary (unless set, a release build of now), ROUNDS 1.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

[[ -n ${TROMMEL:-} ]] || build
made depthwise depthwise.py
made wide depthwise.py 2
made photos make_photos.py 3000 500 375
made photos-medium make_photos.py 1000 1600 1200
made photos-large make_photos.py 600 2400 1800
taskset --cpu-list "${CORES:-0,1}" .tools/wire-venv/bin/python bench/forecast.py "${TROMMEL:-$trommel}" "${ROUNDS:-1}"

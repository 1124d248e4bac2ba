#!/usr/bin/env bash
# trommel tune next to a full grid of the settings that it searches, on two cores: the most throughput with the
# digits and with a model of depthwise convolutions, and with p95 within a time at a rate. A trial of the grid is as long
# as the longest of tune. What both have found is measured again in turns. TROMMEL is the binary (unless set,
# a release build of now), IMAGES of a trial 256, ROUNDS of the comparison 21, CASES some of digits, depthwise, requests.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

[[ -n ${TROMMEL:-} ]] || build
made depthwise depthwise.py
made photos make_photos.py 3000 500 375
scratch
export XDG_CACHE_HOME=$run
export ORT_DYLIB_PATH=${ORT_DYLIB_PATH:-$PWD/.tools/onnxruntime/libonnxruntime.so}
# shellcheck disable=SC2086
TROMMEL=${TROMMEL:-$trommel} python3 bench/tune_grid.py ${CASES:-digits depthwise requests}

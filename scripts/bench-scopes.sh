#!/usr/bin/env bash
# The rate of a job alone and next to a model that does not load, an output that does not answer and an empty
# lane: five pairs, or PAIRS. Of the release build, or of TROMMEL.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

[[ -n ${TROMMEL:-} ]] || build
exec .tools/wire-venv/bin/python bench/scopes.py "${TROMMEL:-$trommel}" "${PAIRS:-5}"

#!/usr/bin/env bash
# Runs a fleet under a seeded script of faults: chaos.sh [SEED] [MINUTES]. A failed run is repeated
# with its seed; what the machine's scheduler adds to it is not. FAULTS=kill,stop limits the kinds.
# LOGS=FOLDER keeps the logs of a run that failed.
set -euo pipefail
cd "$(dirname "$0")/.."

export SEED=${1:-$RANDOM} MINUTES=${2:-10}
cargo build --workspace
exec cargo test --workspace --test fleet_chaos -- --nocapture

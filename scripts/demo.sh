#!/usr/bin/env bash
# Classifies the held-out handwritten digits with the shipped model and scores the result. Builds the
# binary alone, by the profile `demo` and without the features that the digits do not need; TROMMEL names one
# that is built already.
set -euo pipefail
cd "$(dirname "$0")/.."

if [[ -z ${TROMMEL:-} ]]; then
    echo "demo: building the binary, which takes minutes the first time"
    cargo build --package trommel --profile demo --no-default-features
    TROMMEL=target/demo/trommel
fi
output=$(mktemp -d)/digits.parquet
trap 'rm -rf "$(dirname "$output")"' EXIT

echo '$ trommel classify models/digits/examples --model models/digits --output digits.parquet'
"$TROMMEL" classify models/digits/examples --model models/digits --output "$output"
echo
echo '$ trommel evaluate digits.parquet --labels-from folders'
"$TROMMEL" evaluate "$output" --labels-from folders --min-accuracy 0.98

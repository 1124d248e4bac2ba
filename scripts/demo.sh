#!/usr/bin/env bash
# Classifies the held-out handwritten digits with the shipped model and scores the result.
set -euo pipefail
cd "$(dirname "$0")/.."

cargo build --quiet --workspace --bins
output=$(mktemp -d)/digits.parquet
trap 'rm -rf "$(dirname "$output")"' EXIT
trommel=target/debug/trommel

echo '$ trommel classify models/digits/examples --model models/digits --output digits.parquet'
"$trommel" classify models/digits/examples --model models/digits --output "$output"
echo
echo '$ trommel evaluate digits.parquet --labels-from folders'
"$trommel" evaluate "$output" --labels-from folders --min-accuracy 0.98

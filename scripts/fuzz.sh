#!/usr/bin/env bash
# Fuzzes the decoders and the resizing for SECONDS (600 unless given), from the images of the tests. An
# input that takes longer than a second, or memory beyond what its limits allow, counts as a fault.
# Needs cargo-fuzz (`cargo install cargo-fuzz`).
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH"

command -v cargo-fuzz >/dev/null || {
    echo "fuzz: missing cargo-fuzz: cargo install cargo-fuzz" >&2
    exit 1
}
corpus=$PWD/target/fuzz-corpus
mkdir -p "$corpus"
cp crates/preprocess/tests/fixtures/images/* "$corpus"
find crates/preprocess/tests/fixtures/broken -type f -exec cp {} "$corpus" \;
# Coverage is an unstable flag of the stable compiler.
export RUSTC_BOOTSTRAP=1
cd crates/preprocess
cargo fuzz run --fuzz-dir fuzz --target-dir ../../target/fuzz prepare "$corpus" -- \
    -max_total_time="${1:-600}" -timeout=1 -rss_limit_mb=512 -max_len=65536 -print_final_stats=1

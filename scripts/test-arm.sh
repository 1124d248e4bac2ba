#!/usr/bin/env bash
# Runs the tests of preprocessing as a 64-bit ARM processor would, under qemu: the same bytes are
# expected. Needs the Rust target, a cross compiler and qemu.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH"

target=aarch64-unknown-linux-gnu
need() {
    command -v "$1" >/dev/null || {
        echo "test-arm: missing $1: $2" >&2
        exit 1
    }
}
need aarch64-linux-gnu-gcc "apt-get install gcc-aarch64-linux-gnu"
need qemu-aarch64 "apt-get install qemu-user"
rustup target list --installed | grep -q "$target" || {
    echo "test-arm: missing Rust's library: rustup target add $target" >&2
    exit 1
}
export CC_aarch64_unknown_linux_gnu=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
cargo test --release --target "$target" --target-dir target/arm -p trommel-preprocess

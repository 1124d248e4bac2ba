#!/usr/bin/env bash
# Runs the tests of preprocessing with every kind of image that can be read, those built in that need
# C libraries too. Builds libheif from the crate's copy; its decoders come from the system.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH"

need() {
    pkg-config --exists "$1" || {
        echo "test-formats: missing $1: apt-get install pkg-config $2" >&2
        exit 1
    }
}
need libde265 libde265-dev
need dav1d libdav1d-dev
cargo test --release --target-dir target/formats -p trommel-preprocess \
    --features jxl,heif,libheif-rs/embedded-libheif "$@"

#!/usr/bin/env bash
# Counts the instructions that pieces of the work on an image take (tests/examples/instructions), and fails if one
# takes more than bench/instructions.json says. `scripts/guard.sh --record` rewrites that file, after a
# change that is worth its cost. PROFILE is dev, which CI builds, or release. Needs an x86-64 processor with AVX2.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.tools/bin:$PATH"

profile=${PROFILE:-dev}
folder=${profile/dev/debug}
if [[ $(uname -m) != x86_64 ]] || ! grep -qw avx2 /proc/cpuinfo; then
    echo "guard: the recorded counts are for x86-64 with AVX2; run this on such a machine" >&2
    exit 1
fi
command -v valgrind >/dev/null || {
    echo "guard: missing valgrind: run scripts/setup.sh" >&2
    exit 1
}
cargo build --quiet --profile "$profile" --workspace --all-targets
# Without debug symbols, which valgrind would read each time.
counted=$(mktemp -d)
trap 'rm -rf "$counted"' EXIT
objcopy --strip-all "target/$folder/examples/instructions" "$counted/instructions"
python3 scripts/guard.py "$counted/instructions" "$profile" "$@"

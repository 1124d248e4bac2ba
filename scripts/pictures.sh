#!/usr/bin/env bash
# Draws docs/pictures again. Needs chromium (apt-get install chromium) besides what `make setup` brings.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v chromium >/dev/null || {
    echo "pictures: chromium is missing: apt-get install chromium" >&2
    exit 1
}
scripts/setup.sh build
export PATH="$PWD/.tools/bin:$PATH"
cargo build
venv=$PWD/.tools/pictures-venv
if ! "$venv/bin/python" -c 'import pyte, rich' 2>/dev/null; then
    python3 -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check pyte==0.8.2 rich==14.1.0
fi
"$venv/bin/python" scripts/pictures.py

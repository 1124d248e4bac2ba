#!/usr/bin/env bash
# Looks for what a review found in 0bc2f68, in two binaries: `scripts/findings.sh OLD NEW [R4 …]`, where OLD is a
# trommel built in a checkout of that commit. Prints a table, whose OLD column stands in tests/FAILURES.md.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONDONTWRITEBYTECODE=1 exec .tools/wire-venv/bin/python tests/findings "$@"

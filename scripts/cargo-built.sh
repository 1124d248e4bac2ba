#!/usr/bin/env bash
# Stands in for cargo where maturin packs a binary that scripts/dist.sh has built: by itself maturin
# builds the package alone, whose dependencies have other features than those of the workspace and
# would be compiled again. TROMMEL_BUILT names the command that has built it, TROMMEL_BINARY the
# file that is packed.
set -euo pipefail
[[ ${1:-} == rustc || ${1:-} == build ]] || exec cargo "$@"
read -ra build <<<"$TROMMEL_BUILT"
# Of the programs it passes on only this one: the unit tests of `trommel` are a program of a binary target too,
# and maturin packs the one that is named last.
"${build[@]}" --message-format json-render-diagnostics | sed -E \
    -e 's|"([^"]*/)?target/(debug\|release)/trommel"|"'"$TROMMEL_BINARY"'"|g' \
    -e '\|"executable":"| { \|"executable":"'"$TROMMEL_BINARY"'"|! d }'

#!/usr/bin/env bash
# Tries the packages of target/package as a user's machine has them: no compiler on PATH, no ONNX
# Runtime but the package's own, and an empty home.
set -euo pipefail
cd "$(dirname "$0")/.."
package=$PWD/target/package
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# bare COMMAND...: runs it with nothing of this machine's but the basic programs.
mkdir "$work/path"
for program in cat env ls; do ln -s "$(command -v $program)" "$work/path/"; done
bare() { (cd "$work" && env -i "HOME=$work/home" "PATH=$work/path" "$@"); }
! bare cc --version 2>/dev/null && ! bare cargo --version 2>/dev/null

# demo NAME BINARY: the demo with this binary, and what its table is worth.
demo() {
    local start=$SECONDS
    bare "$2" demo "$1"
    bare "$2" evaluate "$1/results.parquet" --labels-from folders --min-accuracy 0.95
    [[ -s $work/$1/report.html ]]
    echo "check-dist: $1: demo and evaluate in $((SECONDS - start)) s"
}

echo "check-dist: the wheel, in a fresh virtual environment"
start=$SECONDS
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet --disable-pip-version-check "$package"/trommel_images-*.whl
echo "check-dist: installed in $((SECONDS - start)) s"
demo wheel "$work/venv/bin/trommel"

echo "check-dist: the tarball"
tar --extract --gzip --directory "$work" --file "$package"/trommel-*.tar.gz
demo tarball "$(echo "$work"/trommel-*/bin/trommel)"

echo "check-dist: the Debian package"
dpkg-deb --extract "$package"/trommel_*.deb "$work/root"
demo deb "$work/root/usr/bin/trommel"
for file in share/man/man1/trommel-classify.1.gz share/bash-completion/completions/trommel \
    share/zsh/vendor-completions/_trommel share/fish/vendor_completions.d/trommel.fish \
    share/doc/trommel/copyright; do
    [[ -s $work/root/usr/$file ]] || {
        echo "check-dist: the Debian package lacks $file" >&2
        exit 1
    }
done
bash -n "$work/root/usr/share/bash-completion/completions/trommel"

echo "check-dist: a binary alone"
mkdir -p "$work/alone/bin"
ln "$package/stage/bin/trommel" "$work/alone/bin/trommel" 2>/dev/null ||
    cp "$package/stage/bin/trommel" "$work/alone/bin/trommel"
if bare "$work/alone/bin/trommel" demo lone 2>"$work/said"; then
    echo "check-dist: it found an ONNX Runtime that is not its own" >&2
    exit 1
fi
remedy=$(sed -n 's/.*`\(.* pip install .*\)`.*/\1/p' "$work/said")
echo "check-dist: \$ $remedy"
bash -c "$remedy --quiet --disable-pip-version-check"
demo lone "$work/alone/bin/trommel"

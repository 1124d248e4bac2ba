#!/usr/bin/env bash
# Makes what users install, in target/package: a Python wheel, a tarball and a Debian package.
#
#   scripts/dist.sh                  from the release profile
#   PROFILE=dev scripts/dist.sh      from what `make test` has built, to try the packages out
#
# The system's C library decides how old a system the binary runs on: build releases on an old one.
set -euo pipefail
cd "$(dirname "$0")/.."

onnxruntime_version=$(sed -n 's/^onnxruntime_version=//p' scripts/setup.sh)
maturin_version=1.16.0
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
package=$PWD/target/package
case ${PROFILE:=release} in
release)
    build=(cargo build --release --locked --package trommel --features gs,az)
    built=target/release/trommel
    ;;
dev)
    # With the features that the tests have requested, so that nothing is compiled twice.
    build=(cargo build --workspace --bins --tests)
    built=target/debug/trommel
    ;;
*)
    echo "dist: PROFILE=$PROFILE is invalid; give release or dev" >&2
    exit 1
    ;;
esac

echo "dist: building the binary ($PROFILE)"
"${build[@]}"
rm -rf "$package"
mkdir -p "$package/stage/bin"
binary=$package/stage/bin/trommel
strip --strip-debug -o "$binary" "$built"
scripts/licences.py "$package/THIRD-PARTY.txt"

# --- the wheel -------------------------------------------------------------------------------------
echo "dist: packing the wheel"
venv=$PWD/.tools/dist-venv
if ! "$venv/bin/maturin" --version 2>/dev/null | grep -qF " $maturin_version"; then
    python3 -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "maturin==$maturin_version"
fi
CARGO=$PWD/scripts/cargo-built.sh TROMMEL_BUILT="${build[*]}" TROMMEL_BINARY=$binary \
    "$venv/bin/maturin" build --quiet --profile "$PROFILE" --out "$package"

# --- manual pages and completions -------------------------------------------------------------------
share=$package/stage/share
mkdir -p "$share/man/man1" "$share/doc/trommel" "$share/bash-completion/completions" \
    "$share/zsh/vendor-completions" "$share/fish/vendor_completions.d"
"$binary" man "$share/man/man1"
"$binary" completions bash >"$share/bash-completion/completions/trommel"
"$binary" completions zsh >"$share/zsh/vendor-completions/_trommel"
"$binary" completions fish >"$share/fish/vendor_completions.d/trommel.fish"
gzip --best --no-name "$share"/man/man1/*.1

# --- ONNX Runtime and the licences ------------------------------------------------------------------
libraries=$package/stage/lib/trommel
mkdir -p "$libraries"
cp --no-dereference .tools/onnxruntime/*.so* "$libraries/"
cp LICENSE-APACHE LICENSE-MIT "$package/THIRD-PARTY.txt" README.md CHANGELOG.md "$share/doc/trommel/"
cp .tools/onnxruntime/LICENSE "$share/doc/trommel/LICENSE-onnxruntime"
cp .tools/onnxruntime/ThirdPartyNotices.txt "$share/doc/trommel/THIRD-PARTY-onnxruntime.txt"

# --- the tarball ------------------------------------------------------------------------------------
name=trommel-$version-linux-$(uname -m)
echo "dist: packing $name.tar.gz"
tar --create --gzip --owner=0 --group=0 --sort=name --transform "s|^stage|$name|" \
    --file "$package/$name.tar.gz" --directory "$package" stage

# --- the Debian package -----------------------------------------------------------------------------
architecture=$(dpkg --print-architecture)
deb=$package/deb
mkdir -p "$deb/DEBIAN" "$deb/usr"
cp -a "$package/stage/." "$deb/usr/"
cat LICENSE-MIT LICENSE-APACHE >"$deb/usr/share/doc/trommel/copyright"
# The newest version of the C library that one of the programs asks for.
libc=$(objdump --dynamic-syms "$binary" "$libraries"/libonnxruntime.so.* |
    grep -oE 'GLIBC_[0-9.]+' | sort --unique --version-sort | tail -n 1)
cat >"$deb/DEBIAN/control" <<CONTROL
Package: trommel
Version: $version
Architecture: $architecture
Maintainer: The Trommel authors <trommel@localhost>
Section: science
Priority: optional
Installed-Size: $(du --summarize --block-size=1K "$deb/usr" | cut -f 1)
Depends: libc6 (>= ${libc#GLIBC_}), libgcc-s1, libstdc++6
Description: bulk image classification
 Classifies images with an ONNX model and writes a table with exactly one row for each image, on one
 machine or on many. Holds ONNX Runtime $onnxruntime_version.
CONTROL
echo "dist: packing trommel_${version}_$architecture.deb"
dpkg-deb --root-owner-group --build "$deb" "$package/trommel_${version}_$architecture.deb" >/dev/null
rm -rf "$deb"
ls -sh "$package"/*.whl "$package"/*.tar.gz "$package"/*.deb

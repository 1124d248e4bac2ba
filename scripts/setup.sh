#!/usr/bin/env bash
# Puts the native parts into .tools: ONNX Runtime, and cmake and nasm where the machine has none.
# Needs cargo, a C compiler, Python 3 and pip. Safe to repeat: what is there is not fetched again.
set -euo pipefail
cd "$(dirname "$0")/.."

onnxruntime_version=1.31.1
tools=$PWD/.tools
mkdir -p "$tools/bin" "$tools/onnxruntime"

missing=()
need() { command -v "$1" >/dev/null 2>&1 || missing+=("$1: $2"); }
need cargo "install Rust from https://rustup.rs"
need cc "apt-get install build-essential (or your system's C toolchain)"
need c++ "apt-get install build-essential (or your system's C++ toolchain)"
need make "apt-get install make"
need python3 "apt-get install python3"
python3 -m pip --version >/dev/null 2>&1 || missing+=("pip: apt-get install python3-pip")
if ((${#missing[@]})); then
    printf 'setup: missing %s\n' "${missing[@]}" >&2
    exit 1
fi

# pip_download PACKAGE==VERSION WHEEL_PATTERN: fetches a binary wheel into .tools/wheels.
pip_download() {
    python3 -m pip download --quiet --disable-pip-version-check --no-deps \
        --only-binary=:all: --dest "$tools/wheels" "${@:2}" "$1"
}

# --- ONNX Runtime: the shared library inside the PyPI wheel, version and hash pinned -------------
library=$tools/onnxruntime/libonnxruntime.so.$onnxruntime_version
if [[ ! -f $library ]]; then
    case "$(uname -s)-$(uname -m)" in
    Linux-x86_64)
        platform=manylinux_2_28_x86_64
        sha256=1f3dea47f2f0e5117c2404cea7d21fd253ae7836a3bf167a501cdfbb2600d536
        ;;
    Linux-aarch64)
        platform=manylinux_2_28_aarch64
        sha256=0b9a492176886992e0e875f06bc0367e333f5fff11711a2d642e18b02f3009cc
        ;;
    *)
        echo "setup: no pinned ONNX Runtime for $(uname -sm); put libonnxruntime $onnxruntime_version" \
            "into .tools/onnxruntime or name it by ORT_DYLIB_PATH" >&2
        exit 1
        ;;
    esac
    echo "setup: fetching ONNX Runtime $onnxruntime_version"
    pip_download "onnxruntime==$onnxruntime_version" \
        --python-version 3.12 --implementation cp --platform "$platform"
    wheel=$tools/wheels/onnxruntime-$onnxruntime_version-cp312-cp312-$platform.whl
    echo "$sha256  $wheel" | sha256sum --check --quiet
    # Unpacked under another name first: an interrupted setup leaves no half library.
    python3 - "$wheel" "$library" <<'PYTHON'
import os, shutil, sys, zipfile
wheel, library = sys.argv[1:]
member = "onnxruntime/capi/" + os.path.basename(library)
with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, open(library + ".new", "wb") as new:
    shutil.copyfileobj(packed, new)
os.replace(library + ".new", library)
PYTHON
    rm -f "$wheel"
fi
ln -sf "$(basename "$library")" "$tools/onnxruntime/libonnxruntime.so"

# --- cmake and nasm build libjpeg-turbo with its SIMD code ----------------------------------------
if ! command -v cmake >/dev/null && [[ ! -x $tools/bin/cmake ]]; then
    echo "setup: fetching cmake"
    python3 -m venv "$tools/cmake-venv" 2>/dev/null &&
        "$tools/cmake-venv/bin/pip" install --quiet --disable-pip-version-check cmake==3.31.6 &&
        ln -sf ../cmake-venv/bin/cmake "$tools/bin/cmake" || {
        echo "setup: missing cmake: apt-get install cmake" >&2
        exit 1
    }
fi
if [[ $(uname -m) == x86_64 ]] && ! command -v nasm >/dev/null && [[ ! -x $tools/bin/nasm ]]; then
    if ! command -v apt-get >/dev/null; then
        echo "setup: missing nasm: install it with your system's package manager" >&2
        exit 1
    fi
    echo "setup: fetching nasm"
    # apt with folders of its own, so that neither root nor the machine's package lists are needed.
    apt=$tools/apt
    mkdir -p "$apt/lists/partial" "$apt/archives/partial"
    options=(-qq -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt" -o Debug::NoLocking=1
        -o APT::Sandbox::User=)
    (
        cd "$apt/archives" &&
            apt-get "${options[@]}" update &&
            apt-get "${options[@]}" download nasm &&
            dpkg -x nasm_*.deb "$apt/root"
    ) && ln -sf ../apt/root/usr/bin/nasm "$tools/bin/nasm" || {
        echo "setup: missing nasm: apt-get install nasm" >&2
        exit 1
    }
fi

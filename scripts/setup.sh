#!/usr/bin/env bash
# Puts the native parts into .tools: ONNX Runtime, and cmake, nasm, valgrind and nats-server where the machine
# has none, or none that is new enough.
# Needs cargo, a C compiler, Python 3 and pip. Safe to repeat: what is there is not fetched again.
# `setup.sh build` fetches only what building and running take, `setup.sh bench` a load generator for
# scripts/bench-serve.sh. With ONNXRUNTIME=gpu it is ONNX Runtime's build for CUDA, with its providers next to it.
set -euo pipefail
cd "$(dirname "$0")/.."

onnxruntime_version=1.31.1
case ${ONNXRUNTIME:=cpu} in
cpu) package=onnxruntime ;;
gpu) package=onnxruntime-gpu ;;
*)
    echo "setup: ONNXRUNTIME=$ONNXRUNTIME is invalid; give cpu or gpu" >&2
    exit 1
    ;;
esac
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

# debian_unpack PACKAGE [SUITE]: unpacks a Debian package into .tools/apt/root, with apt folders of its
# own, so that neither root nor the machine's package lists are needed. With SUITE it comes from that
# suite of the Debian mirror this machine uses, without touching the machine's own sources.
debian_unpack() {
    local package=$1 suite=${2:-} home=$tools/apt${2:+/$2}
    command -v apt-get >/dev/null || return 1
    mkdir -p "$home/lists/partial" "$home/archives/partial"
    # A mirror that is some weeks behind will do: packages are signed, and what needs a version checks it.
    local options=(-qq -o "Dir::State::lists=$home/lists" -o "Dir::Cache=$home" -o Debug::NoLocking=1
        -o APT::Sandbox::User= -o Acquire::Check-Valid-Until=false)
    if [[ -n $suite ]]; then
        local keyring=/usr/share/keyrings/debian-archive-keyring.gpg mirror
        # The archive itself, not its security or backports archives.
        mirror=$(apt-get indextargets --format '$(CREATED_BY) $(LABEL) $(REPO_URI)' |
            awk '$1 == "Packages" && $2 == "Debian" { print $3; exit }')
        [[ -n $mirror && -r $keyring ]] || return 1
        echo "deb [signed-by=$keyring] $mirror $suite main" >"$home/sources.list"
        options+=(-o "Dir::Etc::sourcelist=$home/sources.list" -o Dir::Etc::sourceparts=-)
    fi
    (
        cd "$home/archives" && rm -f "${package}"_*.deb &&
            apt-get "${options[@]}" update &&
            apt-get "${options[@]}" download "$package" &&
            dpkg -x "${package}"_*.deb "$tools/apt/root"
    )
}

# --- hey, a load generator for `setup.sh bench`, which fetches nothing else ----------------------------
if [[ ${1:-} == bench ]]; then
    command -v hey >/dev/null || [[ -x $tools/bin/hey ]] || {
        echo "setup: fetching hey"
        debian_unpack hey && ln -sf ../apt/root/usr/bin/hey "$tools/bin/hey"
    } || {
        echo "setup: missing hey: install it from https://github.com/rakyll/hey" >&2
        exit 1
    }
    exit 0
fi

# --- ONNX Runtime: the shared library inside the PyPI wheel, version and hash pinned -------------
library=$tools/onnxruntime/libonnxruntime.so.$onnxruntime_version
if [[ ! -f $library || ! -f $tools/onnxruntime/ThirdPartyNotices.txt ]]; then
    case "$(uname -s)-$(uname -m)-$ONNXRUNTIME" in
    Linux-x86_64-gpu)
        platform=manylinux_2_28_x86_64
        sha256=05d548956197b9d01f59b625de740e0d6be3593f874e241a12dc0362650ecdf7
        ;;
    Linux-x86_64-cpu)
        platform=manylinux_2_28_x86_64
        sha256=1f3dea47f2f0e5117c2404cea7d21fd253ae7836a3bf167a501cdfbb2600d536
        ;;
    Linux-aarch64-cpu)
        platform=manylinux_2_28_aarch64
        sha256=0b9a492176886992e0e875f06bc0367e333f5fff11711a2d642e18b02f3009cc
        ;;
    *)
        echo "setup: no pinned $package for $(uname -sm); put libonnxruntime $onnxruntime_version" \
            "into .tools/onnxruntime or name it by ORT_DYLIB_PATH" >&2
        exit 1
        ;;
    esac
    echo "setup: fetching $package $onnxruntime_version"
    pip_download "$package==$onnxruntime_version" \
        --python-version 3.12 --implementation cp --platform "$platform"
    wheel=$tools/wheels/${package/-/_}-$onnxruntime_version-cp312-cp312-$platform.whl
    echo "$sha256  $wheel" | sha256sum --check --quiet
    # Unpacked under another name first: an interrupted setup leaves no half library.
    python3 - "$wheel" "$library" <<'PYTHON'
import os, shutil, sys, zipfile
wheel, library = sys.argv[1:]
folder, name = os.path.split(library)
with zipfile.ZipFile(wheel) as archive:
    providers = [m for m in archive.namelist() if "/capi/libonnxruntime_providers" in m]
    texts = ["onnxruntime/LICENSE", "onnxruntime/ThirdPartyNotices.txt"]
    # The library itself comes last: where it is, all is.
    for member in [*providers, *texts, "onnxruntime/capi/" + name]:
        path = os.path.join(folder, os.path.basename(member))
        with archive.open(member) as packed, open(path + ".new", "wb") as new:
            shutil.copyfileobj(packed, new)
        os.replace(path + ".new", path)
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
    echo "setup: fetching nasm"
    debian_unpack nasm && ln -sf ../apt/root/usr/bin/nasm "$tools/bin/nasm" || {
        echo "setup: missing nasm: install it with your system's package manager" >&2
        exit 1
    }
fi

[[ ${1:-} != build ]] || exit 0

# --- valgrind counts instructions (scripts/guard.sh) --------------------------------------------------
if [[ $(uname -m) == x86_64 ]] && ! command -v valgrind >/dev/null && [[ ! -x $tools/bin/valgrind ]]; then
    echo "setup: fetching valgrind"
    debian_unpack valgrind || {
        echo "setup: missing valgrind: install it with your system's package manager" >&2
        exit 1
    }
    # Its own start script looks for its tools where a package manager puts them.
    cat >"$tools/bin/valgrind" <<'WRAPPER'
#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/../apt/root/usr
VALGRIND_LIB=$root/libexec/valgrind exec "$root/bin/valgrind.bin" "$@"
WRAPPER
    chmod +x "$tools/bin/valgrind"
fi

# --- nats-server, 2.12 or newer: the broker of distributed runs, and of their tests ----------------
# nats_is_new PROGRAM: whether it runs and is new enough.
nats_is_new() {
    local version
    version=$("$1" --version 2>/dev/null | grep -oE '[0-9]+\.[0-9]+' | head -n 1) || return 1
    printf '2.12\n%s\n' "$version" | sort --check=quiet --version-sort
}
if ! nats_is_new nats-server && ! nats_is_new "$tools/bin/nats-server"; then
    echo "setup: fetching nats-server"
    debian_unpack nats-server sid && nats_is_new "$tools/apt/root/usr/sbin/nats-server" &&
        ln -sf ../apt/root/usr/sbin/nats-server "$tools/bin/nats-server" || {
        echo "setup: missing nats-server 2.12 or newer: install it from https://nats.io/download" >&2
        exit 1
    }
fi

# --- nats-py and msgpack run the program in docs/wire.md -------------------------------------------
wire=$tools/wire-venv
if ! "$wire/bin/python" -c 'import msgpack, nats' 2>/dev/null; then
    echo "setup: fetching nats-py and msgpack"
    python3 -m venv --clear "$wire" &&
        "$wire/bin/pip" install --quiet --disable-pip-version-check nats-py==2.16.0 msgpack==1.2.4 || {
        echo "setup: missing nats-py or msgpack: check that python3 -m venv works (apt-get install python3-venv) and PyPI is reachable" >&2
        exit 1
    }
fi

# --- Clients of `trommel serve`: Triton's own, and schemathesis, which tries an OpenAPI description ----
serve=$tools/serve-venv
if ! "$serve/bin/python" -c 'import schemathesis, tritonclient.http' 2>/dev/null; then
    echo "setup: fetching tritonclient and schemathesis"
    python3 -m venv --clear "$serve" &&
        "$serve/bin/pip" install --quiet --disable-pip-version-check \
            'tritonclient[http]==2.73.0' schemathesis==4.32.5 || {
        echo "setup: missing tritonclient or schemathesis: check that python3 -m venv works (apt-get install python3-venv) and PyPI is reachable" >&2
        exit 1
    }
fi

# --- ffmpeg makes the tests' videos and decodes them: the machine's own, or the one in a PyPI wheel ----
if ! command -v ffmpeg >/dev/null && [[ ! -x $tools/bin/ffmpeg ]]; then
    echo "setup: fetching ffmpeg"
    rm -f "$tools"/wheels/imageio_ffmpeg-*.whl
    pip_download imageio-ffmpeg==0.8.1 || {
        echo "setup: missing ffmpeg: apt-get install ffmpeg" >&2
        exit 1
    }
    python3 - "$tools"/wheels/imageio_ffmpeg-0.8.1-*.whl "$tools/bin/ffmpeg" <<'PYTHON'
import os, shutil, sys, zipfile
wheel, program = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    member, = [name for name in archive.namelist() if "/binaries/ffmpeg-" in name]
    with archive.open(member) as packed, open(program + ".new", "wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
os.chmod(program + ".new", 0o755)
os.rename(program + ".new", program)
PYTHON
    rm -f "$tools"/wheels/imageio_ffmpeg-*.whl
fi

# --- PostgreSQL: the tests' database, from the machine or out of a PyPI wheel ----------------------
postgresql_bin() {
    dirname "$(ls -d "$tools"/postgresql/bin/initdb /usr/lib/postgresql/*/bin/initdb \
        "$(command -v initdb || true)" 2>/dev/null | head -n 1)" 2>/dev/null
}
if [[ ! -x $(postgresql_bin)/initdb ]]; then
    echo "setup: fetching PostgreSQL"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
        --python-version 3.12 --implementation cp --platform "manylinux2014_$(uname -m)" \
        --dest "$tools/wheels" pgserver==0.1.4 || {
        echo "setup: missing PostgreSQL: apt-get install postgresql" >&2
        exit 1
    }
    rm -rf "$tools/postgresql" "$tools/postgresql.new"
    python3 - "$tools"/wheels/pgserver-0.1.4-*.whl "$tools/postgresql.new" <<'PYTHON'
import os, sys, zipfile
wheel, folder = sys.argv[1:]
root = "pgserver/pginstall/"
with zipfile.ZipFile(wheel) as archive:
    # The wheel's libraries are found relative to the package.
    for member in archive.infolist():
        if member.filename.startswith((root, "pgserver.libs/")) and not member.is_dir():
            archive.extract(member, folder)
            if "/bin/" in member.filename:
                os.chmod(os.path.join(folder, member.filename), 0o755)
PYTHON
    mv "$tools/postgresql.new" "$tools/postgresql"
    ln -s pgserver/pginstall/bin "$tools/postgresql/bin"
    rm -f "$tools"/wheels/pgserver-*.whl
fi

# --- moto: the tests' second make of S3 server -----------------------------------------------------
moto=$tools/moto-venv
if ! "$moto/bin/python" -c 'import moto.server, flask' 2>/dev/null; then
    echo "setup: fetching moto"
    python3 -m venv --clear "$moto" &&
        "$moto/bin/pip" install --quiet --disable-pip-version-check 'moto[server,s3]==5.2.5' || {
        echo "setup: missing moto: check that python3 -m venv works (apt-get install python3-venv) and PyPI is reachable" >&2
        exit 1
    }
fi

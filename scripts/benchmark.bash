# Sourced first by every benchmark: stands in the root of the repository, with its tools on the PATH.

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.tools/bin:$PATH"
# What benchmarks make once and use again: photos, models, the programs that export them.
export BENCH=${BENCH:-$PWD/.tools/bench}
work=$BENCH
python=$PWD/.tools/venv-models/bin/python
trommel=$PWD/target/release/trommel
# ONNX Runtime in Python and in the examples would report its use to its makers.
export ORT_DISABLE_TELEMETRY=1

# build: all release programs at once, as other sets of them unify features differently.
build() {
    cargo build --release --quiet --workspace --bins --examples
}

# scratch: a temporary folder "$run" next to what is built, so on a disk; gone at the end.
scratch() {
    mkdir -p target
    run=$(mktemp -d -p "$PWD/target")
    trap 'rm -rf "$run"' EXIT
}

# need_bench: what scripts/bench.sh leaves behind.
need_bench() {
    [[ -x $python && -d $work/photos && -d $work/mobilenet ]] || {
        echo "$(basename "$0"): run scripts/bench.sh first, which makes the model and the photos" >&2
        exit 1
    }
}

# made NAME SCRIPT ARGUMENT...: the folder "$work/NAME", which a script of bench/ writes once.
made() {
    [[ -d $work/$1 ]] && return
    if [[ ! -d $work/venv ]]; then
        python3 -m venv "$work/venv"
        "$work/venv/bin/pip" install --quiet --disable-pip-version-check numpy pillow onnx
    fi
    "$work/venv/bin/python" "bench/$2" "$work/$1" "${@:3}"
}

# large_photos: 120 JPEGs of 4000 x 3000 in "$work/large", made once.
large_photos() {
    [[ -d $work/large ]] || "$python" bench/make_photos.py "$work/large" 120 4000 3000
}

# model NAME EXPORT FLAG...: a model directory "$work/NAME", exported once with random weights.
model() {
    [[ -d $work/$1 ]] ||
        "$python" models/export.py "$2" --random "${@:3}" --output "$work/$1" >/dev/null 2>&1 || {
        echo "$(basename "$0"): $2 could not be exported; try: $python models/export.py $2 --random ${*:3} --output $work/$1" >&2
        exit 1
    }
}

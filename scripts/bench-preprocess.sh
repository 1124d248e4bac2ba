#!/usr/bin/env bash
# Decoding and resizing to 224 x 224 on one core, images a second: Trommel and other libraries, on
# photos of three sizes, in one sitting. scripts/bench.sh has to have run before.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
for peer in opencv-python-headless==5.0.0.93 'pyvips[binary]==3.2.0' simplejpeg==1.9.0 \
    nvidia-dali-cuda120==2.4.0; do
    "$python" -m pip install --quiet --disable-pip-version-check "$peer" ||
        echo "bench-preprocess: $peer is not installed here" >&2
done
build
for size in 500x375 1920x1080 4000x3000; do
    photos=$work/photos-$size
    [[ -d $photos ]] || "$python" bench/make_photos.py "$photos" 40 "${size%x*}" "${size#*x}"
    # One core for all of them.
    taskset --cpu-list 1 target/release/examples/prepare "$photos" >"$work/rates-$size.json"
    taskset --cpu-list 1 "$python" bench/preprocess_peers.py "$photos" >"$work/peers-$size.json"
done
"$python" - "$work" <<'PYTHON'
import json, pathlib, sys
work, sizes = pathlib.Path(sys.argv[1]), ["500x375", "1920x1080", "4000x3000"]
rates = [json.loads((work / f"rates-{size}.json").read_text()) for size in sizes]
peers = [json.loads((work / f"peers-{size}.json").read_text()) for size in sizes]
print("| |", " | ".join(sizes), "|\n| --- | --- | --- | --- |")
row = lambda name, values: print(f"| {name} |", " | ".join(f"{value:.4g}" for value in values), "|")
for name in peers[0]["rates"]:
    row(name, [peer["rates"][name] for peer in peers])
for name, what in [("decode", "Trommel, decode alone"), ("exact", "Trommel, exact"), ("fast", "Trommel, fast")]:
    row(what, [rate[name] for rate in rates])
row("exact, of decode alone", [rate["exact"] / rate["decode"] for rate in rates])
row("Trommel, 256 cropped to 224, whole image decoded", [rate["whole"] for rate in rates])
row("Trommel, 256 cropped to 224", [rate["cropped"] for rate in rates])
row("that, of decode alone", [rate["cropped"] / rate["decode"] for rate in rates])
for missing in peers[0]["missing"]:
    print("not installed:", missing)
PYTHON

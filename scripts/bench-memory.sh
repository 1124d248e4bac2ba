#!/usr/bin/env bash
# Peak memory of `trommel classify` over 10,000, 100,000 and 300,000 images: hard links of the
# shipped digits, 1,000 a folder, into a folder of parts. Then that of a worker and of `classify` under
# `--memory-budget 512` with logits of 21,841 classes in each of 100,000 rows.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

build
# Links need the file system of what they link to.
scratch
for count in 10000 100000 300000; do
    python3 - "$run/$count" "$count" <<'PYTHON'
import os, pathlib, sys
folder, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
digits = sorted(path for path in pathlib.Path("models/digits/examples").rglob("*") if path.is_file())
for number in range(count):
    digit = digits[number % len(digits)]
    link = folder / f"{number // 1000:03}" / f"{number:06}{digit.suffix}"
    link.parent.mkdir(parents=True, exist_ok=True)
    os.link(digit, link)
PYTHON
    python3 - "$run" "$count" <<'PYTHON'
import json, resource, subprocess, sys
run, count = sys.argv[1:]
command = ["target/release/trommel", "classify", f"{run}/{count}", "--model", "models/digits",
           "--output", f"{run}/rows-{count}/", "--json"]
summary = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
print(f"{count:>7} images  {summary['images']} rows  {peak:.0f} MB at most")
PYTHON
done

[[ -x $work/memory-venv/bin/python ]] || {
    python3 -m venv "$work/memory-venv"
    "$work/memory-venv/bin/pip" install --quiet --disable-pip-version-check numpy onnx nats-py msgpack
}
"$work/memory-venv/bin/python" bench/memory.py "$trommel"

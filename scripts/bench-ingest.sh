#!/usr/bin/env bash
# Images a second that one ingest process lists from a manifest of 1,000,000 lines and publishes as
# tasks, and its memory on the way. No other role runs, so all tasks stay in the stream.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

build
. scripts/workers.bash
python3 - "$run/photos.txt" <<'PYTHON'
import sys
with open(sys.argv[1], "w") as manifest:
    manifest.writelines(f"/data/photos/{number // 1000:04}/{number:07}.jpg\n" for number in range(1_000_000))
PYTHON
# Room for all of them: a job gets a part of what is free in each stream.
export TROMMEL_BROKER__TASKS_MAX_MESSAGES=8000000 TROMMEL_BROKER__TENSORS_MAX_BYTES=16000000000 \
    TROMMEL_BROKER__RESULTS_MAX_BYTES=6000000000

for number in 1 2 3; do
    broker
    worker ingest
    "$trommel" submit "$run/photos.txt" --model digits --output "$run/rows-$number/" --id manifest --quiet >/dev/null
    python3 - "$trommel" "${pids[-1]}" <<'PYTHON'
import json, pathlib, subprocess, sys, time
trommel, pid = sys.argv[1:]

def memory(name):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) // 1024

early = None
while True:
    job = json.loads(subprocess.run([trommel, "jobs", "show", "manifest", "--json"], check=True, capture_output=True).stdout)
    if early is None and job["listed"] >= 100_000:
        early = memory("VmHWM")
    if job.get("total"):
        break
    time.sleep(0.2)
seconds = time.time() - job["started_at"] / 1e6
print(f"{job['total']} images in {seconds:.1f} s: {job['total'] / seconds:.0f} images/s;"
      f" {early} MB at most after 100,000, {memory('VmHWM')} MB in the end")
PYTHON
    stop
done

#!/usr/bin/env bash
# How long `jobs list`, `jobs list --running`, `jobs show` and `top --once` take with 20,000 jobs in the store,
# and what the workers' memory is before and after. TROMMEL=PATH measures another binary than the release.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

[[ -n ${TROMMEL:-} ]] && trommel=$TROMMEL || build
. scripts/workers.bash
broker
for role in ingest preprocess infer sink; do worker "$role"; done
memory() {
    for pid in "${pids[@]:1}"; do awk '/^VmRSS/ { printf "%d ", $2 / 1024 }' "/proc/$pid/status"; done
    echo "MB (ingest, preprocess, infer, sink)"
}
echo "before: $(memory)"
"$PWD/.tools/wire-venv/bin/python" - "$TROMMEL_BROKER__URL" 20000 <<'PYTHON'
import asyncio, json, sys, time
import nats

async def main(url, jobs):
    client = await nats.connect(url)
    stream, now = client.jetstream(), int(time.time() * 1e6)
    async def put(number):
        at = now - 1000 * (jobs - number)
        request = {"id": f"ended-{number}", "sources": ["s3://photos/"], "models": ["digits"], "output": f"s3://rows/{number}/"}
        record = {"spec": {"request": request}, "state": "complete", "submitted_at": at, "finished_at": at}
        await stream.publish(f"$KV.trommel-jobs.job.ended-{number}", json.dumps(record).encode())
    for start in range(0, jobs, 500):
        await asyncio.gather(*map(put, range(start, start + 500)))
    await client.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
PYTHON
sleep 10
timed() {
    python3 - "$@" <<'PYTHON'
import statistics, subprocess, sys, time
took = []
for _ in range(5):
    start = time.monotonic()
    subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
    took.append(time.monotonic() - start)
print(f"{statistics.median(took):.2f} s  trommel {' '.join(sys.argv[2:])}")
PYTHON
}
timed "$trommel" jobs list
timed "$trommel" jobs list --running
timed "$trommel" jobs list --limit 0
timed "$trommel" jobs show ended-10000
echo "top measures rates over 5 s before it prints:"
timed "$trommel" top --once
echo "after:  $(memory)"

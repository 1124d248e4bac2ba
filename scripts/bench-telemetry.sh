#!/usr/bin/env bash
# What metrics and traces cost: `trommel classify` on the same photos without either, with metrics
# scraped every second, and with traces at the default share too, one after the other. scripts/bench.sh
# has to have run before.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

need_bench
build
photos=$work/photos
model=$work/mobilenet
port=19464
# Takes traces and answers nothing wrong: a collector that costs next to nothing.
"$python" - <<'PYTHON' &
import http.server
class Taker(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 14318), Taker).serve_forever()
PYTHON
collector=$!
scrape() { while sleep 1; do curl --silent "http://127.0.0.1:$port/metrics" >/dev/null || true; done; }
scrape &
scraper=$!
trap 'kill $collector $scraper 2>/dev/null' EXIT

rate() {
    "$trommel" classify "$photos" --model "$model" --output "$work/telemetry.parquet" \
        --overwrite --quiet --json "$@" | "$python" -c 'import json, sys; print(json.load(sys.stdin)["run"]["images_per_second"])'
}
export TROMMEL_TELEMETRY__OTLP_PROTOCOL=http
rate >/dev/null
for round in 1 2 3 4 5; do
    echo "none $(rate)"
    echo "metrics $(rate --listen 127.0.0.1:$port)"
    echo "traces $(rate --listen 127.0.0.1:$port --otlp-endpoint http://127.0.0.1:14318)"
done | tee "$work/telemetry.txt"
"$python" - "$work/telemetry.txt" <<'PYTHON'
import statistics, sys
rates = {}
for line in open(sys.argv[1]):
    name, rate = line.split()
    rates.setdefault(name, []).append(float(rate))
median = {name: statistics.median(found) for name, found in rates.items()}
print("| | images/s | of none |\n| --- | --- | --- |")
for name in ("none", "metrics", "traces"):
    print(f"| {name} | {median[name]:.0f} | {median[name] / median['none']:.3f} |")
PYTHON

#!/usr/bin/env bash
# Prompts against a real server: `transformers serve` with a tiny vision-language model of random weights
# (bench/tiny_vlm.py). Whether the answers are those of Transformers in Python, and images per minute by lever:
# one request at a time, several, text before the image, images within a budget of tokens; at the end next to the
# best rate that a client in Python reaches with the same requests. All share the machine.
#
# PHOTOS is how many photos of 640 x 480 are asked about (default 60). This server has no logprobs and no
# constrained choices, so neither is requested here.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

photos=${PHOTOS:-60}
port=${PORT:-18100}
venv=${VENV:-$PWD/target/venv-prompt}
[[ -x $venv/bin/transformers ]] || {
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet 'transformers[serving]==5.23.0' torch==2.15.0 torchvision==0.29.2 pillow numpy
}
python=$venv/bin/python
[[ -n ${TROMMEL:-} ]] || build
trommel=${TROMMEL:-$trommel}
scratch
export HF_HUB_OFFLINE=1
"$python" bench/tiny_vlm.py "$run/tiny" 2>/dev/null
"$python" bench/make_photos.py "$run/photos" "$photos" 640 480 >/dev/null
"$venv/bin/transformers" serve "$run/tiny" --device cpu --host 127.0.0.1 --port "$port" >"$run/log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null; rm -rf "$run"' EXIT
for _ in $(seq 600); do
    curl --silent --max-time 2 "http://127.0.0.1:$port/v1/models" >/dev/null && break
    kill -0 $server || { cat "$run/log" >&2; exit 1; }
    sleep 0.2
done
url=http://127.0.0.1:$port/v1

# prompt NAME KEY...: a folder of a prompt with these keys besides.
prompt() {
    mkdir -p "$run/$1"
    {
        echo "[prompt]"
        echo "url = \"$url\""
        echo "model = \"$run/tiny\""
        echo 'text = "What is in this picture? Answer in a few words."'
        echo 'max-tokens = 8'
        echo 'logprobs = false'
        echo 'encoding = "png"'
        printf '%s\n' "${@:2}"
    } >"$run/$1/trommel.toml"
}

# ask NAME: classifies all photos by a prompt; prints images per minute.
ask() {
    "$trommel" classify "$run/photos" --model "$run/$1" --output "$run/$1.jsonl" --quiet --json >"$run/$1.json"
    "$python" -c 'import json, sys
summary = json.load(open(sys.argv[1]))
assert summary["failed"] == 0, summary["failures"]
run = summary["run"]
stats = summary["prompt"]
print("%.1f images a minute, %d tokens read an image, at most %d requests at once"
      % (60 * run["images_per_second"], stats["prompt_tokens"] / stats["answers"], stats["peak"]))' "$run/$1.json"
}

client() { "$python" bench/prompt_client.py rate "$url" "$run/tiny" "$run/photos" "$@"; }

prompt one 'image-first = true' 'max-concurrency = 1'
prompt many 'image-first = true'
prompt first
prompt budget 'family = "qwen2-vl"' 'image-tokens = 64'
client >/dev/null # the model is loaded by the first request
echo "loop in Python:           $(client --image-first) images a minute"
echo "one request at a time:    $(ask one)"
echo "several at once:          $(ask many)"
echo "and text first:           $(ask first)"
echo "and 64 tokens an image:   $(ask budget)"
for concurrency in 2 4 8 16; do
    echo "Python, $concurrency at once, the same small images: $(client --concurrency $concurrency --max-pixels $((64 * 28 * 28)))"
done
echo "answers compared with Transformers in Python, text first, whole images:"
"$python" bench/prompt_client.py compare "$run/tiny" "$run/first.jsonl"

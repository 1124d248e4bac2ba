#!/usr/bin/env bash
# Cascades of the two digit models (tests/models/digits-small and models/digits) on digits that neither has
# seen: the share of labels that are the large model's, and the share of images that it was asked about,
# for SEEDS orders of COUNT images, each of which has another sample.
set -euo pipefail
. "$(dirname "$0")/benchmark.bash"

count=${COUNT:-24000}
seeds=${SEEDS:-20}
python=${PYTHON:-$python}
[[ -n ${TROMMEL:-} ]] || build
trommel=${TROMMEL:-$trommel}
scratch
"$python" bench/cascade_digits.py make "$run/digits" "$count"
"$trommel" classify "$run/digits" --model models/digits -o "$run/large.jsonl" --quiet
for seed in $(seq "$seeds"); do
    "$python" bench/cascade_digits.py list "$run/digits" "$seed" >"$run/list.txt"
    "$trommel" classify "$run/list.txt" --model tests/models/digits-small --model models/digits --agree 0.99 \
        -o "$run/$seed.jsonl" --quiet 2>/dev/null
    "$python" bench/cascade_digits.py share "$run/large.jsonl" "$run/$seed.jsonl"
done | tee "$run/shares"
awk '{ kept += $1 >= 0.99; cost += $2; if ($2 > most) most = $2 }
    END { printf "%d of %d keep 0.99; the large model is asked about %.3f of images on average, %.3f at most\n", kept, NR, cost / NR, most }' "$run/shares"

#!/usr/bin/env bash
# Trommel, in parts of 500 rows as the peers: in one process (embedded), in four with a broker (broker), or in two
# that hand tensors over in memory (local). Broker and workers are started and ended by each run. What the broker
# holds stays next to the output, for a second run.
set -euo pipefail
way=$1 model=$(realpath "$2") images=$(realpath "$3") output=$4
export TROMMEL_SINK__PART_ROWS=500

if [[ $way == embedded ]]; then
    exec "$TROMMEL" classify "$images" --model "$model" --output "$output/" --quiet
fi
state=$output.broker
rm -rf "$state/log" "$state"/*.ports
mkdir -p "$state/models"
ln -sfn "$model" "$state/models/$(basename "$model")"
pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true; wait' EXIT
nats-server --jetstream --store_dir "$state/store" --port -1 --ports_file_dir "$state" >/dev/null 2>&1 &
pids+=($!)
until ports=$(ls "$state"/*.ports 2>/dev/null) && [[ -s $ports ]]; do sleep 0.02; done
TROMMEL_BROKER__URL=$(grep -o 'nats://[^"]*' "$ports" | head -n 1)
export TROMMEL_BROKER__URL

worker() {
    TROMMEL_LOG=trommel_worker=info "$TROMMEL" worker --role "$1" --model-repository "$state/models" \
        --allow-source / --allow-output / "${@:2}" 2>>"$state/log" &
    pids+=($!)
}
case $way in
broker) for role in ingest preprocess infer sink; do worker $role; done ;;
local)
    worker ingest,sink
    worker preprocess,infer --tensor-hop local
    ;;
*)
    echo "trommel.sh: there is no way $way; give embedded, broker or local" >&2
    exit 1
    ;;
esac
workers=$((${#pids[@]} - 1))
until [[ $(grep -c "working as" "$state/log") == "$workers" ]]; do
    kill -0 "${pids[@]}" || { cat "$state/log" >&2; exit 1; }
    sleep 0.02
done
"$TROMMEL" submit "$images" --model "$(basename "$model")" --id compare --output "$output/" --wait --quiet

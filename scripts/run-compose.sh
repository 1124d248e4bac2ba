#!/usr/bin/env bash
# Runs docker-compose.yml for real: builds the images, brings everything up, runs a job, scales during a
# second one, takes everything down in the middle of a third and up again, and counts the rows.
#
#   scripts/run-compose.sh                 with the base images of the registries
#   scripts/run-compose.sh --local-bases   with base images made here, from Debian packages and this
#                                          machine's Rust, under the names that the files expect
#   scripts/run-compose.sh --as-built      with the images trommel and trommel-store that are there
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "run-compose: $*"; }
die() { say "$*" >&2 && exit 1; }
work=$(mktemp -d)
chmod 755 "$work" # what unpacks packages there is another user
if docker compose version >/dev/null 2>&1; then compose=(docker compose); else compose=(docker-compose); fi
compose+=(--project-name trommel-check)

# image NAME FOLDER CHANGE…: an image of a folder's files.
image() {
    local name=$1 folder=$2 changes=()
    shift 2
    for change in "$@"; do changes+=(--change "$change"); done
    tar --numeric-owner -C "$folder" -c . | docker import "${changes[@]}" - "$name" >/dev/null
    say "made $name"
}

# unpacked FOLDER PACKAGE…: the files of Debian packages, without what runs at their installation.
unpacked() {
    local folder=$1
    shift
    mkdir -p "$work/debs" "$folder"
    (cd "$work/debs" && rm -f ./*.deb && apt-get download -qq "$@")
    for package in "$work"/debs/*.deb; do dpkg-deb --extract "$package" "$folder"; done
}

local_bases() {
    docker image inspect gcr.io/distroless/cc-debian12:nonroot >/dev/null 2>&1 || {
        unpacked "$work/cc" base-files netbase tzdata libc6 libgcc-s1 libstdc++6 zlib1g ca-certificates
        mkdir -p "$work/cc/etc/ssl/certs" "$work/cc/tmp"
        cp /etc/ssl/certs/ca-certificates.crt "$work/cc/etc/ssl/certs/"
        echo 'nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin' >"$work/cc/etc/passwd"
        echo 'nonroot:x:65532:' >"$work/cc/etc/group"
        image gcr.io/distroless/cc-debian12:nonroot "$work/cc" 'USER 65532:65532'
    }
    docker image inspect nats:2.14-alpine >/dev/null 2>&1 || {
        unpacked "$work/nats" libc6
        mkdir -p "$work/nats/usr/bin" "$work/nats/tmp" "$work/nats/data"
        cp -L "$(PATH=$PWD/.tools/bin:$PATH command -v nats-server)" "$work/nats/usr/bin/nats-server"
        image nats:2.14-alpine "$work/nats" 'ENTRYPOINT ["/usr/bin/nats-server"]'
    }
    docker image inspect amazon/aws-cli:2.31.0 >/dev/null 2>&1 || {
        debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip bookworm "$work/aws" >/dev/null
        cp /etc/ssl/certs/ca-certificates.crt "$work/aws/etc/ssl/certs/"
        python3 -m pip download --quiet --disable-pip-version-check --python-version 3.11 --only-binary=:all: \
            --dest "$work/aws/wheels" awscli
        chroot "$work/aws" python3 -m pip install --quiet --break-system-packages --no-index --find-links /wheels awscli
        rm -r "$work/aws/wheels"
        image amazon/aws-cli:2.31.0 "$work/aws" 'ENTRYPOINT ["/usr/local/bin/aws"]'
    }
    docker image inspect rust:1.95-bookworm >/dev/null 2>&1 || {
        debootstrap --variant=minbase --include=ca-certificates,gcc,g++,libc6-dev,make,cmake,nasm,python3,python3-pip,python3-venv \
            bookworm "$work/rust" >/dev/null
        mkdir -p "$work/rust/usr/local/cargo/bin"
        cp -a "$(rustc --print sysroot)" "$work/rust/usr/local/rust"
        cp /etc/ssl/certs/ca-certificates.crt "$work/rust/etc/ssl/certs/"
        image rust:1.95-bookworm "$work/rust" 'ENV PATH=/usr/local/rust/bin:/usr/local/cargo/bin:/usr/sbin:/usr/bin:/sbin:/bin' \
            'ENV CARGO_HOME=/usr/local/cargo' 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt'
    }
}

container() { "${compose[@]}" ps -q "$1" | head -n 1; }
address() { docker inspect --format '{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}' "$1"; }
# scraped CONTAINER METRIC: the sum of a metric's values.
scraped() {
    curl --silent --max-time 5 "http://$(address "$1"):9464/metrics" |
        awk -v name="$2" '$1 ~ "^"name"({|$)" { sum += $2 } END { print sum + 0 }'
}
submit() { "${compose[@]}" run --rm -T demo submit "$@"; }

# count_rows JOB EXPECTED: each index once in what the store holds.
count_rows() {
    rm -rf "$work/rows" && docker cp --quiet "$(container store):/data/results/$1" "$work/rows" 2>/dev/null ||
        docker cp "$(container store):/data/results/$1" "$work/rows"
    python3 - "$work/rows" "$2" <<'PYTHON'
import collections, json, pathlib, sys
folder, expected = pathlib.Path(sys.argv[1]), int(sys.argv[2])
counts, status = collections.Counter(), collections.Counter()
for part in folder.rglob("part-*.jsonl"):
    for line in part.read_text().splitlines():
        row = json.loads(line)
        counts[row["index"]] += 1
        status[row["status"]] += 1
assert sorted(counts) == list(range(expected)), f"{len(counts)} indices, not {expected}"
assert set(counts.values()) == {1}, "an index has more than one row"
assert (folder / "_SUCCESS").exists()
print(f"run-compose: {expected} rows, each index once: {dict(status)}")
PYTHON
}

clean_up() {
    "${compose[@]}" --profile demo down --volumes --timeout 40 >/dev/null 2>&1 || true
    rm -rf "$work"
}
trap clean_up EXIT

network=()
if [[ ${1:-} == --local-bases ]]; then
    local_bases
    network=(--network host)
fi
if [[ ${1:-} != --as-built ]]; then
    say "building"
    docker build --quiet "${network[@]}" --file deploy/docker/Dockerfile --tag trommel:latest . >/dev/null
    docker build --quiet "${network[@]}" --file deploy/docker/store.Dockerfile --tag trommel-store:latest . >/dev/null
fi
docker images --format 'run-compose: {{.Repository}}:{{.Tag}} {{.Size}}' | grep -E 'trommel(-store)?:latest'

say "up"
"${compose[@]}" up --detach 2>/dev/null
for role in ingest preprocess infer sink; do
    for _ in $(seq 60); do
        curl --silent --fail --max-time 2 "http://$(address "$(container $role)"):9464/readyz" >/dev/null && continue 2
        sleep 1
    done
    die "$role is not ready: $("${compose[@]}" logs --tail 5 "$role")"
done
say "all roles are ready; user $(docker inspect --format '{{.Config.User}}, read-only root {{.HostConfig.ReadonlyRootfs}}' "$(container sink)")"

say "the demo job"
"${compose[@]}" run --rm -T demo

images=${RUN_COMPOSE_IMAGES:-60000}
find models/digits/examples -type f | sort >"$work/files"
for _ in $(seq $((images / $(wc -l <"$work/files") + 1))); do cat "$work/files"; done | head -n "$images" |
    sed 's|^models/digits/examples|s3://photos/digits|' >"$work/list.txt"
docker cp "$work/list.txt" "$(container store):/data/photos/list.txt"

say "a job of $images images, and --scale preprocess=3 while it runs"
submit s3://photos/list.txt --model digits --output s3://results/scaled/ --format jsonl --id scaled
sleep 3
"${compose[@]}" up --detach --no-recreate --scale preprocess=3 2>/dev/null
"${compose[@]}" run --rm -T demo jobs watch scaled >/dev/null
for replica in $("${compose[@]}" ps -q preprocess); do
    prepared=$(scraped "$replica" trommel_decode_seconds_count)
    say "preprocess $(docker inspect --format '{{.Name}}' "$replica") prepared $prepared images"
    ((prepared > 0)) || die "a replica got no work"
done
count_rows scaled "$images"

say "a job of $images images, everything stopped by SIGTERM in its middle and started again"
submit s3://photos/list.txt --model digits --output s3://results/stopped/ --format jsonl --id stopped
sleep 5
"${compose[@]}" stop --timeout 40 ingest preprocess infer sink 2>/dev/null
for role in ingest preprocess infer sink; do
    for replica in $("${compose[@]}" ps -q -a $role 2>/dev/null || "${compose[@]}" ps -q $role); do
        code=$(docker inspect --format '{{.State.ExitCode}}' "$replica")
        ((code == 0)) || die "$role ended with $code: $("${compose[@]}" logs --tail 5 $role)"
    done
done
say "all roles drained and ended with 0"
"${compose[@]}" up --detach --no-recreate --scale preprocess=3 2>/dev/null
"${compose[@]}" run --rm -T demo jobs watch stopped >/dev/null
count_rows stopped "$images"
say "done"

#!/usr/bin/env python3
"""Plays cameras to a broker and follows what becomes of their frames: the age of frames at their result,
and each source's share. Needs nats-py (.tools/wire-venv). Frames leave by the clock, whatever happened to
those before (an open loop): RATE a second from each source, and three times as many in every tenth second
of one source after the other."""

import argparse
import asyncio
import json
import pathlib
import statistics
import time

import nats


async def play(client, source, images, args, sent):
    started, number = time.time(), 0
    due = started
    while due < started + args.seconds:
        await asyncio.sleep(max(0.0, due - time.time()))
        headers = {"Trommel-Frame": str(number), "Trommel-Frame-Time": str(int(due * 1000))}
        image = images[number % len(images)]
        await client.publish(f"trommel.live.{source}", image, headers=headers)
        sent[source] = number = number + 1
        second = int(due - started)
        is_burst = args.bursts and second % 10 == 5 and (second // 10) % args.sources == int(source[3:])
        due += 1.0 / (args.rate * (3 if is_burst else 1))


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=pathlib.Path)
    parser.add_argument("--nats", default="nats://127.0.0.1:4222")
    parser.add_argument("--sources", type=int, default=6)
    parser.add_argument("--rate", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--no-bursts", dest="bursts", action="store_false")
    args = parser.parse_args()
    files = sorted(path for path in args.images.rglob("*") if path.suffix in (".jpg", ".png"))[:64]
    images = [path.read_bytes() for path in files]
    sent, ages, failed = {}, {f"cam{number}": [] for number in range(args.sources)}, 0

    async def take(message):
        nonlocal failed
        source = message.subject.rsplit(".", 1)[1]
        taken = int(message.headers["Trommel-Frame-Time"]) / 1000
        ages[source].append(time.time() - taken)
        failed += json.loads(message.data)["status"] != "ok"

    client = await nats.connect(args.nats)
    await client.subscribe("trommel.live.results.*", cb=take)
    await client.flush()
    await asyncio.gather(*(play(client, source, images, args, sent) for source in ages))
    await client.flush()
    await asyncio.sleep(2)
    everything = [age for of_source in ages.values() for age in of_source]
    # What each would have of what was done, if it is not more than it sent.
    done, wanted = len(everything), dict(sent)
    fair, left, open_sources = {}, float(done), sorted(wanted, key=wanted.get)
    while open_sources:
        share = left / len(open_sources)
        source = open_sources.pop(0)
        fair[source] = min(wanted[source], share)
        left -= fair[source]
    print(json.dumps({
        "sent": sum(sent.values()),
        "classified": done,
        "failed": failed,
        "age_ms": {name: round(1000 * percentile(everything, share), 1) for name, share in
                   (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))},
        "least_share_of_fair": round(min(len(ages[source]) / fair[source] for source in ages), 3),
        "median_per_source": statistics.median(len(of_source) for of_source in ages.values()),
    }))
    await client.close()


asyncio.run(main())

"""Sends images to a server at a fixed mean rate, whatever it answers (open loop), and reports what it took.

Requests come at random times (Poisson), each counted from the moment at which it was due: a server that
falls behind shows it, as no request waits for the answer of another. With --rate 0 as many clients as
--clients ask without a pause (closed loop), which tells the rate at saturation; one that is refused
waits for the seconds that the server says.
"""

import argparse
import asyncio
import contextlib
import json
import random
import selectors
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple


def request(args, image):
    """An HTTP request that carries the image in the way that the server reads."""
    path, fields = f"/v1/models/{args.model}/classify", {"host": "bench"}
    if args.deadline:
        fields["trommel-deadline-ms"] = args.deadline
    match args.form:
        case "raw":
            body = image
        case "multipart":
            fields["content-type"] = "multipart/form-data; boundary=border"
            part = b'--border\r\ncontent-disposition: form-data; name="image"; filename="image.jpg"\r\n\r\n'
            body = part + image + b"\r\n--border--\r\n"
        case "oip":
            path = f"/v2/models/{args.model}/infer"
            tensor = len(image).to_bytes(4, "little") + image
            described = {"name": "image", "datatype": "BYTES", "shape": [1, 1]}
            described["parameters"] = {"binary_data_size": len(tensor)}
            head = json.dumps({"inputs": [described]}).encode()
            fields["inference-header-content-length"] = len(head)
            body = head + tensor
    fields["content-length"] = len(body)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + body


async def ask(free, host, port, request):
    while free and free[-1][0].at_eof():  # the server has closed a connection that was idle for long
        free.pop()[1].close()
    reader, writer = free.pop() if free else await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").lower().split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        if fields.get("transfer-encoding") == "chunked":
            while size := int(await reader.readline(), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        else:
            await reader.readexactly(int(fields["content-length"]))
    except BaseException:
        writer.close()
        raise
    if fields.get("connection") == "close":
        writer.close()
    else:
        free.append((reader, writer))
    return int(lines[0].split(" ")[1]), float(fields.get("retry-after", 0))


def percentile(sorted_times, share):
    return sorted_times[min(int(share * len(sorted_times)), len(sorted_times) - 1)] if sorted_times else None


class Sample(NamedTuple):
    """A request: when it was due (time.perf_counter), how late it was sent, when it was answered, and how."""

    due: float
    late: float
    answered: float
    status: int


async def load(args):
    """Sends requests for the warm-up and the window; gives those of the window and its end."""
    files = sorted(path for path in Path(args.images).rglob("*") if path.is_file())[: args.files]
    requests = [request(args, file.read_bytes()) for file in files]
    free, samples = [], []
    start = time.perf_counter()
    warm = start + args.warm_up
    end = warm + args.seconds

    async def one(due):
        late = time.perf_counter() - due
        try:
            status, retry_after = await ask(free, args.host, args.port, random.choice(requests))
        except (OSError, asyncio.IncompleteReadError):
            status, retry_after = 0, 0.0
        if due >= warm:
            samples.append(Sample(due, late, time.perf_counter(), status))
        return retry_after

    if args.rate == 0:
        async def client():
            while (due := time.perf_counter()) < end:
                await asyncio.sleep(await one(due))

        await asyncio.gather(*(client() for _ in range(args.clients)))
    else:
        open_requests, due = set(), start
        while due < end:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(one(due))
            open_requests.add(task)
            task.add_done_callback(open_requests.discard)
            due += random.expovariate(args.rate)
        await asyncio.gather(*open_requests)
    return samples, end


def report(args, samples, end):
    ok = [sample for sample in samples if sample.status == 200]
    in_window = [sample for sample in ok if sample.answered <= end]
    times = sorted(sample.answered - sample.due for sample in ok)
    late = sorted(sample.late for sample in samples)
    millis = lambda share: round(1000 * percentile(times, share), 2) if times else None
    return {
        "offered": args.rate or None,
        "answered": round(len(in_window) / args.seconds, 1),
        "in_time": round(sum(s.answered - s.due <= args.budget for s in in_window) / args.seconds, 1),
        "refused": round(1 - len(ok) / max(len(samples), 1), 5),
        "p50_ms": millis(0.5),
        "p95_ms": millis(0.95),
        "p99_ms": millis(0.99),
        # Of the sender itself: where it cannot keep up, its times say nothing about the server.
        "sent_late_p95_ms": round(1000 * (percentile(late, 0.95) or 0), 2),
        "statuses": {str(status): count for status, count in sorted(Counter(s.status for s in samples).items())},
    }


def run(work):
    """Runs a coroutine in a loop whose timers are exact.

    By default asyncio waits in whole milliseconds, rounded up: a request would be sent late by half a millisecond,
    which would count as the server's.
    """
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    with contextlib.closing(loop):
        return loop.run_until_complete(work)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", help="folder of images")
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument("--form", choices=["raw", "multipart", "oip"], default="raw", help="how the image is sent")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--rate", type=float, default=0, help="requests a second; 0 for closed loop")
    parser.add_argument("--clients", type=int, default=8, help="clients of the closed loop")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--warm-up", type=float, default=2)
    parser.add_argument("--files", type=int, default=200, help="images that requests are made of")
    parser.add_argument("--deadline", type=int, help="Trommel-Deadline-Ms of each request")
    parser.add_argument("--budget", type=float, default=0.12, help="seconds within which an answer counts as in_time")
    return parser


if __name__ == "__main__":
    given = arguments().parse_args()
    print(json.dumps(report(given, *run(load(given)))))

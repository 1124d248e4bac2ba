"""A client of chat completions in Python, and a comparison with Transformers: for scripts/bench-prompt.sh.

Usage: python bench/prompt_client.py rate URL MODEL IMAGES [--concurrency N] [--image-first] [--max-pixels N]
       python bench/prompt_client.py compare MODEL ROWS.jsonl

`rate` sends each image once, as PNG, with so many requests in flight, and prints images per minute; the
time of preparing and encoding them counts only for one request at a time, as a script does it in a loop.
`compare` asks the same model by Transformers in Python about every image of the rows (greedy decoding), and
prints how many answers are equal.
"""

import argparse
import base64
import http.client
import io
import json
import queue
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlparse

from PIL import Image

TEXT = "What is in this picture? Answer in a few words."
TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    rate_of = commands.add_parser("rate")
    for name in ["url", "model", "images"]:
        rate_of.add_argument(name)
    rate_of.add_argument("--concurrency", type=int, default=1)
    rate_of.add_argument("--image-first", action="store_true")
    rate_of.add_argument("--max-pixels", type=int)
    compare_of = commands.add_parser("compare")
    compare_of.add_argument("model")
    compare_of.add_argument("rows")
    args = parser.parse_args()
    match args.command:
        case "rate":
            print(f"{rate(args):.1f}")
        case "compare":
            compare(args.model, args.rows)


def body(path: Path, args: argparse.Namespace) -> bytes:
    image = Image.open(path).convert("RGB")
    if args.max_pixels and image.width * image.height > args.max_pixels:
        by = (args.max_pixels / (image.width * image.height)) ** 0.5
        image = image.resize((int(image.width * by), int(image.height * by)), Image.Resampling.BICUBIC)
    png = io.BytesIO()
    image.save(png, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
    content = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": url}}]
    if args.image_first:
        content.reverse()
    return json.dumps({
        "model": args.model, "messages": [{"role": "user", "content": content}],
        "max_tokens": TOKENS, "temperature": 0, "stream": False,
    }).encode()


def rate(args: argparse.Namespace) -> float:
    server = urlparse(args.url)
    paths = sorted(path for path in Path(args.images).iterdir())
    waiting: queue.SimpleQueue = queue.SimpleQueue()
    is_naive = args.concurrency == 1
    for path in paths:
        waiting.put(path if is_naive else body(path, args))
    failed = []

    def work() -> None:
        connection = http.client.HTTPConnection(server.netloc, timeout=600)
        while True:
            try:
                item = waiting.get_nowait()
            except queue.Empty:
                return
            data = body(item, args) if is_naive else item
            connection.request("POST", f"{server.path}/chat/completions", data,
                               {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                failed.append(text)

    started = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(args.concurrency)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        sys.exit(f"{len(failed)} requests failed, such as {failed[0][:200]}")
    return 60 * len(paths) / (time.monotonic() - started)


def compare(folder: str, rows: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    equal, others = 0, []
    lines = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    for row in lines:
        image = Image.open(row["uri"]).convert("RGB")
        content = [{"type": "text", "text": TEXT}, {"type": "image", "image": image}]
        inputs = processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=True,
            return_dict=True, return_tensors="pt",
        )
        with torch.no_grad():
            said = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        said = said[0][inputs["input_ids"].shape[1]:]
        expected = processor.decode(said, skip_special_tokens=True).strip()
        read = inputs["input_ids"].shape[1]
        if row["label"] == expected and row["prompt_tokens"] == read:
            equal += 1
        else:
            others.append((row["uri"], row["label"], expected, row["prompt_tokens"], read))
    different = len({row["label"] for row in lines})
    print(f"{equal} of {len(lines)} answers and numbers of tokens equal; {different} different answers")
    for other in others[:5]:
        print("  differs:", *other)
    sys.exit(0 if equal == len(lines) else 1)


if __name__ == "__main__":
    main()

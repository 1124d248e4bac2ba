"""Decoding and resizing to 224 x 224 by other libraries, images a second on one core.

Usage: python bench/preprocess_peers.py FOLDER
Prints one JSON object with medians of five rounds. What is not installed is left out by name.
"""

import importlib
import io
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "VIPS_CONCURRENCY": "1"}
SIDE, ROUNDS, SECONDS = 224, 5, 1.0


def pillow(draft):
    from PIL import Image

    def run(data):
        image = Image.open(io.BytesIO(data))
        if draft:
            image.draft("RGB", (2 * SIDE, 2 * SIDE))
        return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC).tobytes()

    return run


def opencv(flags, interpolation):
    import cv2
    import numpy as np

    cv2.setNumThreads(1)

    def run(data):
        image = cv2.imdecode(np.frombuffer(data, np.uint8), getattr(cv2, flags))
        return cv2.resize(image, (SIDE, SIDE), interpolation=getattr(cv2, interpolation))

    return run


def torchvision():
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional

    torch.set_num_threads(1)

    def run(data):
        image = decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        mode = functional.InterpolationMode.BICUBIC
        return functional.resize(image, [SIDE, SIDE], interpolation=mode, antialias=True)

    return run


def pyvips():
    vips = importlib.import_module("pyvips")
    return lambda data: vips.Image.thumbnail_buffer(data, SIDE, height=SIDE, size="force").write_to_memory()


def simplejpeg():
    decoder = importlib.import_module("simplejpeg")
    return lambda data: decoder.decode_jpeg(data, "RGB")


def dali():
    import numpy as np
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=1, num_threads=1, device_id=None)
    def pipeline():
        encoded = fn.external_source(name="data", dtype=types.UINT8)
        image = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        return fn.resize(image, resize_x=SIDE, resize_y=SIDE, interp_type=types.INTERP_CUBIC, antialias=True)

    made = pipeline(exec_pipelined=False, exec_async=False)
    made.build()

    def run(data):
        made.feed_input("data", [np.frombuffer(data, np.uint8)])
        return made.run()

    return run


PEERS = {
    "Pillow, bicubic": lambda: pillow(False),
    "Pillow with draft (2x margin)": lambda: pillow(True),
    "OpenCV, INTER_CUBIC (not antialiased)": lambda: opencv("IMREAD_COLOR", "INTER_CUBIC"),
    "OpenCV, INTER_AREA": lambda: opencv("IMREAD_COLOR", "INTER_AREA"),
    "OpenCV, reduced decode 1/4 + cubic": lambda: opencv("IMREAD_REDUCED_COLOR_4", "INTER_CUBIC"),
    "torchvision, antialiased bicubic": torchvision,
    "pyvips thumbnail": pyvips,
    "DALI on CPU, antialiased cubic": dali,
    "simplejpeg (libjpeg-turbo), decode alone": simplejpeg,
}


def rate(run, files):
    start, images = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        for data in files:
            run(data)
            images += 1
    return images / (time.perf_counter() - start)


def main():
    files = [path.read_bytes() for path in sorted(Path(sys.argv[1]).iterdir())[:40]]
    runs, missing = {}, []
    for name, make in PEERS.items():
        try:
            runs[name] = make()
        except ImportError as error:
            missing.append(f"{name}: {error}")
    # Round by round, so that all see the same machine.
    rates = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            rates[name].append(rate(run, files))
    rates = {name: statistics.median(found) for name, found in rates.items()}
    print(json.dumps({"rates": rates, "missing": missing}))


if __name__ == "__main__":
    main()

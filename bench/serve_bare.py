"""What one photo takes without a server: decoded, resized and run by ONNX Runtime, one after the other.

Usage: python bench/serve_bare.py MODEL_DIR IMAGES SECONDS RATE

Pillow (bicubic, as the reference does) and, if it is installed, OpenCV decode and resize to the model's input;
ONNX Runtime has one thread or as many as it takes by default. Prints a line of JSON: the median of each way in
milliseconds, without a pause between photos, and then again with RATE photos a second, between
which the processor sleeps and forgets.
"""

import io
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image

try:
    import cv2
except ImportError:
    cv2 = None


def by_pillow(encoded, size):
    image = Image.open(io.BytesIO(encoded)).convert("RGB")
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))


def by_opencv(encoded, size):
    pixels = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    pixels = cv2.resize(pixels, (size, size), interpolation=cv2.INTER_CUBIC)
    return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)


def median_ms(prepare, session, images, size, seconds, gap):
    name, times, number = session.get_inputs()[0].name, [], 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        time.sleep(gap)
        start = time.perf_counter()
        pixels = prepare(images[number % len(images)], size)
        tensor = (pixels.astype(np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]
        session.run(None, {name: np.ascontiguousarray(tensor)})
        times.append(time.perf_counter() - start)
        number += 1
    return round(1000 * statistics.median(times), 2)


def main():
    model, folder, seconds, rate = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    files = sorted(path for path in folder.rglob("*") if path.is_file())[:200]
    images = [file.read_bytes() for file in files]
    found, paused = {}, {}
    for named, threads in (("one thread", 1), ("all threads", len(os.sched_getaffinity(0)))):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(model / "model.onnx", options, providers=["CPUExecutionProvider"])
        size = session.get_inputs()[0].shape[-1]
        if not isinstance(size, int):
            size = 224
        for name, prepare in (("Pillow", by_pillow), ("OpenCV", by_opencv)):
            if name == "Pillow" or cv2:
                way = f"{name}, {named}"
                found[way] = median_ms(prepare, session, images, size, seconds, 0)
                paused[way] = median_ms(prepare, session, images, size, seconds, 1 / rate)
    print(json.dumps({**found, "paused": paused}))


main()

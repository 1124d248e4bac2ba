"""How fast ONNX Runtime alone runs a model from Python, by size of batch, with all cores.

Usage: python bench/bare_onnxruntime.py MODEL_DIR SECONDS   (SECONDS for each size of batch)

Prints one JSON object: images/s by size of batch. The input is ready-made: nothing is decoded,
normalised or scored.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime

BATCHES = [1, 2, 4, 8, 16, 32]
MIN_RUNS = 3


def main() -> None:
    folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    name, shape = session.get_inputs()[0].name, session.get_inputs()[0].shape
    print(json.dumps({batch: rate(session, name, [batch, *shape[1:]], seconds) for batch in BATCHES}))


def rate(session: onnxruntime.InferenceSession, name: str, shape: list[int], seconds: float) -> float:
    images = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    session.run(None, {name: images})
    start, runs = time.perf_counter(), 0
    while runs < MIN_RUNS or time.perf_counter() - start < seconds:
        session.run(None, {name: images})
        runs += 1
    return runs * shape[0] / (time.perf_counter() - start)


if __name__ == "__main__":
    main()

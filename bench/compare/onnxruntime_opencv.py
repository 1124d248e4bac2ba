"""A loop with OpenCV, ONNX Runtime and threads: what an engineer makes of the first one.

A thread for each core takes a batch from the file to the scores, with one thread within OpenCV (`setNumThreads`)
and within ONNX Runtime: both let go of Python's lock, and nothing is handed from thread to thread. INTER_AREA is
what OpenCV's documentation advises for making images smaller.
"""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
from shared import BATCH, Rows, Wanted, arguments, cores, files, session

# Batches that wait for a thread.
AHEAD = 8


def main() -> None:
    args = arguments()
    cv2.setNumThreads(1)
    wanted, model, rows = Wanted(args.model), session(args.model, 1), Rows(args.output)
    paths = files(args.images)
    batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
    with ThreadPoolExecutor(cores()) as threads:
        running = deque()
        for batch in batches:
            running.append((batch, threads.submit(classify, batch, model, wanted)))
            if len(running) > AHEAD:
                done, best = running.popleft()
                rows.add(done, best.result())
        for done, best in running:
            rows.add(done, best.result())
    rows.flush()


def classify(batch: list[str], model, wanted: Wanted) -> list[list[tuple[str, float]]]:
    inputs = {path: image for path in batch if (image := prepare(path, wanted)) is not None}
    best = {path: [] for path in batch}
    if inputs:
        (logits,) = model.run(None, {model.get_inputs()[0].name: np.stack(list(inputs.values()))})
        best |= zip(inputs, wanted.best(logits))
    return [best[path] for path in batch]


def prepare(path: str, wanted: Wanted) -> np.ndarray | None:
    encoded = np.fromfile(path, np.uint8)
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR_RGB) if encoded.size else None
    if image is None:
        return None
    height, width = image.shape[:2]
    return wanted.input(cv2.resize(image, wanted.size(width, height), interpolation=cv2.INTER_AREA))


if __name__ == "__main__":
    main()

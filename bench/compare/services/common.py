"""What the services share: an image to the model's input, scores to an answer, and where they listen."""

import argparse
import sys
from pathlib import Path

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from shared import Wanted, cores, session  # noqa: E402, F401

# Where each service answers, as Trommel does.
PATH = "/v1/models/model/classify"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="model directory of timm")
    parser.add_argument("port", type=int)
    return parser.parse_args()


def prepare(encoded: bytes, wanted: Wanted) -> np.ndarray:
    """An encoded image as `f32[3, side, side]`."""
    image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB)
    if image is None:
        raise ValueError("this is no image that OpenCV reads")
    height, width = image.shape[:2]
    resized = cv2.resize(image, wanted.size(width, height), interpolation=cv2.INTER_AREA)
    return wanted.input(resized).astype(np.float32)


def answer(best: list[tuple[str, float]]) -> dict:
    return {"label": best[0][0], "top": [{"label": label, "score": score} for label, score in best]}


class Classifier:
    """The model with one thread for a run, as others run on the other cores."""

    def __init__(self, model: Path, threads: int = 1) -> None:
        cv2.setNumThreads(1)
        self.wanted, self.session = Wanted(model), session(model, threads)
        self.name = self.session.get_inputs()[0].name

    def scores(self, inputs: list[np.ndarray]) -> list[dict]:
        (logits,) = self.session.run(None, {self.name: np.stack(inputs)})
        return [answer(best) for best in self.wanted.best(logits)]

    def classify(self, encoded: bytes) -> dict:
        return self.scores([prepare(encoded, self.wanted)])[0]

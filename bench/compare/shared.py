"""What the peers share: their arguments, what the model wants, and the rows that they write."""

import argparse
import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow
import pyarrow.parquet

# Images of a batch: the best of 1 to 32 for small models on few cores.
BATCH = 8
# Rows of a file, so that a reader sees some before the end.
PART_ROWS = 500
TOP = 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, help="model directory of timm")
    parser.add_argument("images", type=Path, help="folder of images; of tar files for a WebDataset loop")
    parser.add_argument("output", type=Path, help="folder of Parquet files")
    args = parser.parse_args()
    args.model, args.images, args.output = (path.resolve() for path in (args.model, args.images, args.output))
    args.output.mkdir(parents=True, exist_ok=True)
    return args


def files(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.iterdir())


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def session(model: Path, threads: int) -> onnxruntime.InferenceSession:
    """The model with so many threads for one run. They do not spin, as others want the cores too."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(model / "model.onnx", options, providers=["CPUExecutionProvider"])


class Wanted:
    """How a timm model wants its images: the shorter side scaled, the middle cut out, normalised."""

    def __init__(self, model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        self.labels = config["label_names"]
        settings = config["pretrained_cfg"]
        self.side = settings["input_size"][1]
        self.scaled = int(self.side / settings["crop_pct"])
        mean = np.array(settings["mean"], np.float32)
        std = np.array(settings["std"], np.float32)
        # One multiplication and one addition a value.
        self.factor, self.offset = 1 / (255 * std), -mean / std

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after scaling."""
        shorter = min(width, height)
        return width * self.scaled // shorter, height * self.scaled // shorter

    def input(self, pixels: np.ndarray) -> np.ndarray:
        """Scaled HWC bytes as the model's `f32[3, side, side]`."""
        top, left = (round((length - self.side) / 2) for length in pixels.shape[:2])
        middle = pixels[top : top + self.side, left : left + self.side]
        return (middle * self.factor + self.offset).transpose(2, 0, 1)

    def best(self, logits: np.ndarray) -> list[list[tuple[str, float]]]:
        """The best labels of each image with their scores."""
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
        order = np.argsort(-scores, axis=1)[:, :TOP]
        return [[(self.labels[at], float(row[at])) for at in best] for row, best in zip(scores, order)]


def columns(uris: list[str], best: list[list[tuple[str, float]]]) -> dict[str, list]:
    """Rows as columns. An image without labels has failed."""
    return {
        "uri": uris,
        "label": [labels[0][0] if labels else None for labels in best],
        "score": [labels[0][1] if labels else None for labels in best],
        "top": [[{"label": label, "score": score} for label, score in labels] for labels in best],
    }


SCHEMA = pyarrow.schema(
    [
        ("uri", pyarrow.string()),
        ("label", pyarrow.string()),
        ("score", pyarrow.float32()),
        ("top", pyarrow.list_(pyarrow.struct([("label", pyarrow.string()), ("score", pyarrow.float32())]))),
    ]
)


def write(path: Path, uris: list[str], best: list[list[tuple[str, float]]]) -> None:
    """A file of rows, which appears whole."""
    table = pyarrow.Table.from_pydict(columns(uris, best), schema=SCHEMA)
    unfinished = path.with_name(f".{path.name}")
    pyarrow.parquet.write_table(table, unfinished, compression="zstd")
    unfinished.rename(path)


class Rows:
    """Writes rows in files of `PART_ROWS`."""

    def __init__(self, output: Path) -> None:
        self.output, self.parts = output, 0
        self.uris, self.best = [], []

    def add(self, uris: list[str], best: list[list[tuple[str, float]]]) -> None:
        self.uris += uris
        self.best += best
        while len(self.uris) >= PART_ROWS:
            self.flush()

    def flush(self) -> None:
        """Writes what there is, at most a file."""
        if self.uris:
            write(self.output / f"part-{self.parts:05}.parquet", self.uris[:PART_ROWS], self.best[:PART_ROWS])
            self.uris, self.best = self.uris[PART_ROWS:], self.best[PART_ROWS:]
            self.parts += 1

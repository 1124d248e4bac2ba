"""Trains the small digit classifier that tests use as the first model of a cascade.

A logistic regression over 8 x 8 gray pixels, by scikit-learn, written as ONNX by the onnx package. Trained on
the same digits as the shipped model (models/train_digits.py); its held-out digits are not seen here either.

Usage: python models/train_small_digits.py   (needs models/requirements.txt)
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression

ROOT = Path(__file__).parent.parent / "tests/models/digits-small"
SIDE = 8
STORED_SIDE = 64


def main() -> None:
    digits = load_digits()
    values = np.stack([seen(pixels) for pixels in digits.images])
    held_out = np.arange(len(values)) % 5 == 4
    model = LogisticRegression(C=0.3, max_iter=2000)
    model.fit(values[~held_out], digits.target[~held_out])
    print(f"held-out accuracy: {model.score(values[held_out], digits.target[held_out]):.4f}")
    ROOT.mkdir(parents=True, exist_ok=True)
    onnx.save(graph(model), ROOT / "model.onnx")
    (ROOT / "trommel.toml").write_text(
        "[preprocess]\nresize = [8, 8]\nresample = \"bilinear\"\nreference = \"pillow\"\n"
        "mean = [0, 0, 0]\nstd = [1, 1, 1]\n\n"
        "[model]\nactivation = \"softmax\"\n"
        'labels = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]\n'
    )


def seen(pixels: np.ndarray) -> np.ndarray:
    """What the model sees of a digit that is stored as the shipped ones are: gray, 0 to 1."""
    levels = np.clip(pixels * 255.0 / 16.0, 0, 255).astype(np.uint8)
    picture = Image.fromarray(levels).resize((STORED_SIDE, STORED_SIDE), Image.Resampling.BICUBIC)
    small = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(small, dtype=np.float32).reshape(-1) / 255.0


def graph(model: LogisticRegression) -> onnx.ModelProto:
    """Softmax's logits of the mean of the three channels."""
    weights = np.concatenate([model.coef_.T / 3] * 3).astype(np.float32)
    nodes = [
        helper.make_node("Flatten", ["pixel_values"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", "weights", "bias"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "digits-small",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", len(model.classes_)])],
        [
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(model.intercept_.astype(np.float32), "bias"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made)
    return made


if __name__ == "__main__":
    main()

"""Trains the shipped digit classifier and writes its held-out digits as image files.

Deterministic: the same library versions on the same machine give the same weights. The data are
the handwritten digits that scikit-learn bundles (UCI "Optical Recognition of Handwritten Digits",
1,797 images of 8 x 8 pixels). Every fifth image is held out; nothing of it is seen in training.

Usage: python models/train_digits.py   (needs models/requirements.txt)
"""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

ROOT = Path(__file__).parent / "digits"
SIDE = 32
STORED_SIDE = 64
MEAN = STD = 0.5
EPOCHS = 60
BATCH = 64


def main() -> None:
    torch.manual_seed(7)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    digits = load_digits()
    pictures = [stored_picture(pixels) for pixels in digits.images]
    held_out = np.arange(len(pictures)) % 5 == 4
    train_tensors = torch.stack([tensor(p) for p, held in zip(pictures, held_out) if not held])
    train_labels = torch.tensor(digits.target[~held_out])

    model = network()
    train(model, train_tensors, train_labels)
    export(model)
    write_configs()
    write_examples([(p, int(t)) for p, t, held in zip(pictures, digits.target, held_out) if held])
    print(f"held-out accuracy over the files: {accuracy_over_files():.4f}")


def stored_picture(pixels: np.ndarray) -> Image.Image:
    """An 8 x 8 digit with levels 0..16 as a gray picture with bright strokes on black."""
    levels = np.clip(pixels * 255.0 / 16.0, 0, 255).astype(np.uint8)
    return Image.fromarray(levels).resize((STORED_SIDE, STORED_SIDE), Image.Resampling.BICUBIC)


def tensor(picture: Image.Image) -> torch.Tensor:
    """What `preprocessor_config.json` says: RGB, 32 x 32 bilinear, (x / 255 - 0.5) / 0.5."""
    small = picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    values = np.asarray(small, dtype=np.float32) / 255.0
    return torch.from_numpy((values - MEAN) / STD).permute(2, 0, 1)


def network() -> nn.Module:
    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(
        *block(3, 16), *block(16, 32), *block(32, 48), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(48 * 4 * 4, 48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip


def train(model: nn.Module, tensors: torch.Tensor, labels: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    steps = EPOCHS * (len(labels) // BATCH + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(labels)).split(BATCH):
            loss = nn.functional.cross_entropy(
                model(shifted(tensors[chosen])), labels[chosen], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model.eval()


def shifted(batch: torch.Tensor) -> torch.Tensor:
    """Moves, turns and scales each picture a little, so that the network learns shapes."""
    count = len(batch)
    angle = (torch.rand(count) - 0.5) * 0.35
    scale = 1.0 + (torch.rand(count) - 0.5) * 0.2
    turn = torch.zeros(count, 2, 3)
    turn[:, 0, 0] = turn[:, 1, 1] = torch.cos(angle) * scale
    turn[:, 0, 1] = -torch.sin(angle) * scale
    turn[:, 1, 0] = torch.sin(angle) * scale
    turn[:, :, 2] = (torch.rand(count, 2) - 0.5) * 0.25
    grid = nn.functional.affine_grid(turn, list(batch.shape), align_corners=False)
    return nn.functional.grid_sample(batch, grid, padding_mode="border", align_corners=False)


def export(model: nn.Module) -> None:
    ROOT.mkdir(exist_ok=True)
    torch.onnx.export(
        model, (torch.zeros(1, 3, SIDE, SIDE),), str(ROOT / "model.onnx"), dynamo=False,
        input_names=["pixel_values"], output_names=["logits"], opset_version=17,
        dynamic_axes={"pixel_values": {0: "batch_size"}, "logits": {0: "batch_size"}},
    )  # fmt: skip


def write_configs() -> None:
    names = [str(digit) for digit in range(10)]
    write_json("config.json", {
        "architectures": ["DigitsForImageClassification"],
        "model_type": "digits",
        "num_labels": 10,
        "problem_type": "single_label_classification",
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    })  # fmt: skip
    write_json("preprocessor_config.json", {
        "image_processor_type": "ViTImageProcessor",
        "use_fast": False,  # it was trained with what Pillow scales
        "do_resize": True,
        "size": {"height": SIDE, "width": SIDE},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
    })  # fmt: skip


def write_json(name: str, value: dict) -> None:
    (ROOT / name).write_text(json.dumps(value, indent=2) + "\n")


def write_examples(held_out: list[tuple[Image.Image, int]]) -> None:
    """Writes each digit into the folder of its label, every other one as JPEG."""
    shutil.rmtree(ROOT / "examples", ignore_errors=True)
    for number, (picture, label) in enumerate(held_out):
        folder = ROOT / "examples" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        if number % 2 == 0:
            picture.save(folder / f"{number:04}.png", optimize=True)
        else:
            encoded = io.BytesIO()
            picture.convert("RGB").save(encoded, "JPEG", quality=90)
            (folder / f"{number:04}.jpg").write_bytes(encoded.getvalue())


def accuracy_over_files() -> float:
    session = onnxruntime.InferenceSession(ROOT / "model.onnx", providers=["CPUExecutionProvider"])
    hits = []
    for path in sorted((ROOT / "examples").glob("*/*")):
        (logits,) = session.run(None, {"pixel_values": tensor(Image.open(path))[None].numpy()})
        hits.append(int(path.parent.name) == int(logits[0].argmax()))
    return float(np.mean(hits))


if __name__ == "__main__":
    main()

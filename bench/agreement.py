"""Whether Trommel and the Python reference agree on every image, for three architectures.

Usage: python bench/agreement.py TROMMEL WORK_FOLDER
Models with random weights are exported by models/export.py. The reference is what Transformers'
`AutoImageProcessor` gives for the folder without a hint, or timm's transform, and ONNX Runtime's Python
binding, one image at a time.
Prints one line for each model: images, equal top-1, the largest difference of a logit relative to the
largest logit of its image.
"""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pyarrow.parquet
import timm
import transformers
from make_photos import photo
from PIL import Image, ImageOps

IMAGES = 510
MODELS = ["hf/vit-base", "hf/convnext-tiny", "hf/mobilenet_v2", "timm/resnet18"]
KINDS = [("jpg", {"quality": 85}), ("jpg", {"quality": 92, "progressive": True}), ("png", {}), ("webp", {"quality": 80})]


def make_images(folder):
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(3)
    for number in range(IMAGES):
        width, height = (int(side) for side in random.integers(120, 700, 2))
        suffix, options = KINDS[number % len(KINDS)]
        image = photo(random, width, height)
        if number % 9 == 0:
            turned = Image.Exif()
            turned[274] = int(random.integers(1, 9))
            options = options | {"exif": turned.tobytes()}
        image.save(folder / f"{number:04}.{suffix}", **options)


def reference(model):
    session = onnxruntime.InferenceSession(model / "model.onnx")
    name = session.get_inputs()[0].name
    if (model / "preprocessor_config.json").exists():
        processor = transformers.AutoImageProcessor.from_pretrained(model)
        prepare = lambda image: np.asarray(processor(image)["pixel_values"][0])[None]
    else:
        cfg = json.loads((model / "config.json").read_text())["pretrained_cfg"]
        transform = timm.data.create_transform(
            input_size=tuple(cfg["input_size"]), crop_pct=cfg["crop_pct"], interpolation=cfg["interpolation"],
            mean=cfg["mean"], std=cfg["std"],
        )
        prepare = lambda image: transform(image).numpy()[None]

    def run(path):
        image = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
        image = Image.fromarray(np.asarray(image))
        return session.run(None, {name: prepare(image).astype(np.float32)})[0][0]

    return run


def main():
    trommel, work = sys.argv[1], Path(sys.argv[2])
    photos = work / "agreement"
    if not photos.exists():
        make_images(photos)
    for name in MODELS:
        model = work / name.replace("/", "-")
        if not model.exists():
            export = [sys.executable, "models/export.py", name, "--random", "--output", model]
            subprocess.run(export, check=True, capture_output=True)
        rows = work / "agreement.parquet"
        command = [trommel, "classify", photos, "--model", model, "--logits", "--output", rows, "--overwrite"]
        subprocess.run([*command, "--quiet"], check=True)
        table = pyarrow.parquet.read_table(rows).to_pylist()
        run, equal, worst = reference(model), 0, 0.0
        for row in table:
            expected = run(row["uri"].removeprefix("file://"))
            found = np.array(row["logits"])
            equal += int(expected.argmax() == found.argmax())
            worst = max(worst, float(np.abs(found - expected).max() / np.abs(expected).max()))
        print(f"{name}: {len(table)} images, {equal} equal top-1, logits within {worst:.1e}", flush=True)


if __name__ == "__main__":
    main()

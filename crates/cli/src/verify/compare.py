"""Compares the tensors next to this file with what the image processor of your own Transformers gives."""
import json
from pathlib import Path

import numpy as np
import transformers
from transformers.image_utils import load_image

here = Path(__file__).parent
task = json.loads((here / "task.json").read_text())
processor = transformers.AutoImageProcessor.from_pretrained(task["model"])
mean, std = (np.array(task[key], np.float64).reshape(3, 1, 1) for key in ("mean", "std"))
images = []
for case in task["images"]:
    ours = np.load(here / case["tensor"]).transpose(2, 0, 1).astype(np.float64)
    values = processor(load_image(case["image"]))["pixel_values"][0]
    theirs = (np.asarray(values, np.float64) * std + mean) / task["scale"]  # as grey levels again
    fits = theirs.shape == ours.shape
    levels = float(np.abs(theirs - ours).max()) if fits else None
    images.append({"image": case["image"], "levels": levels, "shape": list(theirs.shape)})
verdict = {"processor": type(processor).__name__, "transformers": transformers.__version__, "images": images}
(here / "verdict.json").write_text(json.dumps(verdict, indent=1))
different = [image for image in images if image["levels"] is None or image["levels"] > task["tolerance"]]
print(f"{len(images)} images, {len(different)} differ")

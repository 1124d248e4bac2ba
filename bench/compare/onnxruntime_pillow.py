"""A loop with Pillow and ONNX Runtime: the first that most people write.

ONNX Runtime's guide to threads: one for each core within a run. Pillow's: `draft` would decode smaller, but
not to the pixels that the model was trained with, so it is not used.
"""

import numpy as np
import PIL.Image
from shared import BATCH, Rows, Wanted, arguments, cores, files, session


def main() -> None:
    args = arguments()
    wanted, model, rows = Wanted(args.model), session(args.model, cores()), Rows(args.output)
    paths = files(args.images)
    for start in range(0, len(paths), BATCH):
        batch = paths[start : start + BATCH]
        inputs = {path: image for path in batch if (image := prepare(path, wanted)) is not None}
        best = {path: [] for path in batch}
        if inputs:
            (logits,) = model.run(None, {model.get_inputs()[0].name: np.stack(list(inputs.values()))})
            best |= zip(inputs, wanted.best(logits))
        rows.add(batch, [best[path] for path in batch])
    rows.flush()


def prepare(path: str, wanted: Wanted) -> np.ndarray | None:
    try:
        with PIL.Image.open(path) as image:
            scaled = image.convert("RGB").resize(wanted.size(*image.size), PIL.Image.Resampling.BICUBIC)
    except OSError:
        return None
    return wanted.input(np.asarray(scaled))


if __name__ == "__main__":
    main()

"""Daft, as its guide to images has it: paths, `download`, `decode_image`, and a class with a batch method.

Its documentation: `on_error="null"` so that a broken image is an empty one; `max_concurrency` for as many copies of the
model as there are cores. Scaling is in the class, by OpenCV: Daft's own `resize` takes one size for all images.
"""

import cv2
import daft
import numpy as np
from daft.functions import decode_image, download
from shared import BATCH, SCHEMA, Wanted, arguments, cores, session

TOP_LABELS = daft.DataType.from_arrow_type(SCHEMA.field("top").type)


@daft.cls(max_concurrency=cores())
class Classify:
    def __init__(self, model) -> None:
        cv2.setNumThreads(1)
        self.wanted, self.session = Wanted(model), session(model, 1)

    @daft.method.batch(return_dtype=TOP_LABELS, batch_size=BATCH)
    def best(self, images: daft.Series) -> list[list[dict]]:
        pixels = images.to_pylist()
        inputs = {at: self.prepare(np.asarray(image)) for at, image in enumerate(pixels) if image is not None}
        best = [[] for _ in pixels]
        if inputs:
            (logits,) = self.session.run(None, {self.session.get_inputs()[0].name: np.stack(list(inputs.values()))})
            for at, labels in zip(inputs, self.wanted.best(logits)):
                best[at] = [{"label": label, "score": score} for label, score in labels]
        return best

    def prepare(self, image: np.ndarray) -> np.ndarray:
        size = self.wanted.size(image.shape[1], image.shape[0])
        return self.wanted.input(cv2.resize(image, size, interpolation=cv2.INTER_AREA))


def main() -> None:
    args = arguments()
    classify = Classify(args.model)
    rows = daft.from_glob_path(f"{args.images}/*").select(daft.col("path").alias("uri"))
    encoded = download(rows["uri"], on_error="null")
    rows = rows.with_column("image", decode_image(encoded, on_error="null"))
    rows = rows.with_column("top", classify.best(rows["image"])).exclude("image")
    first = rows["top"][0]
    rows = rows.with_columns({"label": first["label"], "score": first["score"]})
    rows.write_parquet(str(args.output), compression="zstd")


if __name__ == "__main__":
    main()

"""PyTorch's DataLoader in front of ONNX Runtime.

PyTorch's tuning guide: worker processes for decoding, each with one thread, and torchvision's own JPEG decoder and
antialiased resizing instead of Pillow's. A worker for each core; ONNX Runtime has one thread for each too, as
the workers wait while their queues are full. A broken image is a `None`, which `collate` sorts out.
"""

import numpy as np
import torch
from shared import BATCH, Rows, Wanted, arguments, cores, files, session
from torchvision.io import ImageReadMode, decode_image, read_file
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import resize


class Images(torch.utils.data.Dataset):
    def __init__(self, paths: list[str], wanted: Wanted) -> None:
        self.paths, self.wanted = paths, wanted

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, at: int) -> tuple[str, np.ndarray | None]:
        path = self.paths[at]
        try:
            image = decode_image(read_file(path), ImageReadMode.RGB)
        except RuntimeError:
            return path, None
        width, height = self.wanted.size(image.shape[2], image.shape[1])
        scaled = resize(image, [height, width], InterpolationMode.BICUBIC, antialias=True)
        return path, self.wanted.input(scaled.permute(1, 2, 0).numpy())


def collate(samples: list) -> tuple[list[str], list[bool], torch.Tensor | None]:
    images = [image for _, image in samples if image is not None]
    # A tensor travels through shared memory, an array through a pipe.
    batch = torch.from_numpy(np.stack(images)) if images else None
    return [path for path, _ in samples], [image is not None for _, image in samples], batch


def main() -> None:
    args = arguments()
    wanted, rows = Wanted(args.model), Rows(args.output)
    images = Images(files(args.images), wanted)
    loader = torch.utils.data.DataLoader(
        images, batch_size=BATCH, num_workers=cores(), collate_fn=collate, prefetch_factor=4
    )
    batches = iter(loader)  # starts the workers before ONNX Runtime has threads
    model = session(args.model, cores())
    for paths, is_whole, batch in batches:
        best = []
        if batch is not None:
            (logits,) = model.run(None, {model.get_inputs()[0].name: batch.numpy()})
            best = wanted.best(logits)
        scored = iter(best)
        rows.add(paths, [next(scored) if whole else [] for whole in is_whole])
    rows.flush()


if __name__ == "__main__":
    main()

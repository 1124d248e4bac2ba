"""Ray Data, as its guide to batch inference has it: `read_binary_files`, then `map_batches` with a class, whose actors
load the model once. Its guide to fault tolerance: a checkpoint by path, so that a second run continues.

`read_images` is what its guide to images has, but a broken image is an error there, and `max_errored_blocks` drops all
images that are in a block with one. So the class decodes, by OpenCV, and bytes travel instead of pixels.
"""

import cv2
import numpy as np
import ray
from ray.data.checkpoint import CheckpointConfig
from shared import BATCH, PART_ROWS, Wanted, arguments, columns, cores, session


class Classify:
    def __init__(self, model) -> None:
        cv2.setNumThreads(1)
        self.wanted, self.session = Wanted(model), session(model, 1)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, list]:
        inputs = {at: self.prepare(encoded) for at, encoded in enumerate(batch["bytes"])}
        whole = {at: image for at, image in inputs.items() if image is not None}
        best = [[] for _ in inputs]
        if whole:
            (logits,) = self.session.run(None, {self.session.get_inputs()[0].name: np.stack(list(whole.values()))})
            for at, labels in zip(whole, self.wanted.best(logits)):
                best[at] = labels
        return columns(list(batch["path"]), best) | {"path": batch["path"]}

    def prepare(self, encoded: bytes) -> np.ndarray | None:
        image = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR_RGB) if encoded else None
        if image is None:
            return None
        size = self.wanted.size(image.shape[1], image.shape[0])
        return self.wanted.input(cv2.resize(image, size, interpolation=cv2.INTER_AREA))


def main() -> None:
    args = arguments()
    ray.init(num_cpus=cores(), include_dashboard=False, configure_logging=False)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="path", checkpoint_path=f"{args.output}.checkpoint", delete_checkpoint_on_success=False
    )
    # Half a core for each actor and as much for the tasks that read, so that both have both cores.
    images = ray.data.read_binary_files(str(args.images), include_paths=True, num_cpus=0.5)
    rows = images.map_batches(
        Classify,
        fn_constructor_args=(args.model,),
        batch_size=BATCH,
        num_cpus=0.5,
        compute=ray.data.ActorPoolStrategy(size=cores()),
    )
    rows.write_parquet(str(args.output), min_rows_per_file=PART_ROWS)


if __name__ == "__main__":
    main()

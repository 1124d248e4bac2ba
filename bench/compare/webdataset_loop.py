"""A WebDataset loop as img2dataset and clip-retrieval do it: the images in tar files, a process for each core, which
takes one tar file after the other and writes the rows of each to a file of its own.

WebDataset's documentation: `warn_and_continue` passes broken samples over. img2dataset's: what has its output is not
done again. The tar files are made before the clock runs.
"""

import multiprocessing
from pathlib import Path

import cv2
import numpy as np
import webdataset
from shared import BATCH, Wanted, arguments, cores, files, session, write


def main() -> None:
    args = arguments()
    done = {path.stem for path in args.output.glob("*.parquet")}
    shards = [shard for shard in files(args.images) if Path(shard).stem not in done]
    with multiprocessing.get_context("spawn").Pool(cores(), start, (args.model, args.output)) as processes:
        for _ in processes.imap_unordered(classify, shards):
            pass


def start(model: Path, folder: Path) -> None:
    global wanted, session_of, output
    cv2.setNumThreads(1)
    wanted, session_of, output = Wanted(model), session(model, 1), folder


def classify(shard: str) -> None:
    samples = webdataset.WebDataset(shard, shardshuffle=False, handler=webdataset.warn_and_continue)
    samples = samples.map(prepare, handler=webdataset.warn_and_continue)
    uris, best = [], []
    for keys, images in samples.batched(BATCH, collation_fn=lambda batch: tuple(zip(*batch))):
        (logits,) = session_of.run(None, {session_of.get_inputs()[0].name: np.stack(images)})
        uris += keys
        best += wanted.best(logits)
    write(output / f"{Path(shard).stem}.parquet", uris, best)


def prepare(sample: dict) -> tuple[str, np.ndarray]:
    image = cv2.imdecode(np.frombuffer(sample["jpg"], np.uint8), cv2.IMREAD_COLOR_RGB)
    height, width = image.shape[:2]
    scaled = cv2.resize(image, wanted.size(width, height), interpolation=cv2.INTER_AREA)
    return f"{sample['__key__']}.jpg", wanted.input(scaled)


if __name__ == "__main__":
    main()

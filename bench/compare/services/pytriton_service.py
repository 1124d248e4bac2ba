"""PyTriton: NVIDIA's Triton with a Python function behind it, dynamic batching, a process a core.

Its documentation: `DynamicBatcher` with a short delay, and several `infer_func` as instances. It speaks the Open
Inference Protocol, so the image comes as BYTES. Each process decodes what its batch holds, by OpenCV.
"""

import json

import numpy as np
from common import Classifier, arguments, cores, prepare
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

MAX_BATCH = 8
DELAY_MICROSECONDS = 5_000


def instance(classifier: Classifier):
    @batch
    def infer(image: np.ndarray) -> dict[str, np.ndarray]:
        answers = classifier.scores([prepare(one, classifier.wanted) for one in image[:, 0]])
        return {"answer": np.array([[json.dumps(one).encode()] for one in answers], dtype=object)}

    return infer


def main() -> None:
    args = arguments()
    config = TritonConfig(http_address="127.0.0.1", http_port=args.port, allow_grpc=False, allow_metrics=False)
    with Triton(config=config) as triton:
        triton.bind(
            model_name="model",
            infer_func=[instance(Classifier(args.model)) for _ in range(cores())],
            inputs=[Tensor(name="image", dtype=bytes, shape=(1,))],
            outputs=[Tensor(name="answer", dtype=bytes, shape=(1,))],
            config=ModelConfig(
                max_batch_size=MAX_BATCH,
                batcher=DynamicBatcher(max_queue_delay_microseconds=DELAY_MICROSECONDS),
            ),
        )
        triton.serve()


if __name__ == "__main__":
    main()

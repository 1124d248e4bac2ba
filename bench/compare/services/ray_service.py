"""Ray Serve with `serve.batch`: a replica a core, each with a thread of ONNX Runtime.

Its documentation: batches by `max_batch_size` and `batch_wait_timeout_s`, replicas with `num_cpus`, and a limit of
ongoing requests that is above the batch.
"""

import signal

import ray
from common import PATH, Classifier, arguments, cores
from ray import serve
from starlette.requests import Request

MAX_BATCH = 8
BATCH_TIMEOUT = 0.005


@serve.deployment(max_ongoing_requests=4 * MAX_BATCH, ray_actor_options={"num_cpus": 1})
class Model:
    def __init__(self, folder: str) -> None:
        from pathlib import Path

        from common import prepare

        self.classifier, self.prepare = Classifier(Path(folder)), prepare

    @serve.batch(max_batch_size=MAX_BATCH, batch_wait_timeout_s=BATCH_TIMEOUT)
    async def classify(self, images: list[bytes]) -> list[dict]:
        return self.classifier.scores([self.prepare(image, self.classifier.wanted) for image in images])

    async def __call__(self, request: Request) -> dict:
        return await self.classify(await request.body())


def main() -> None:
    args = arguments()
    ray.init(num_cpus=cores(), include_dashboard=False, logging_level="error", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(Model.options(num_replicas=cores()).bind(str(args.model.resolve())), route_prefix=PATH)
    signal.pause()


if __name__ == "__main__":
    main()

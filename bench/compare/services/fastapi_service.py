"""FastAPI, ONNX Runtime and OpenCV, as an engineer tunes them.

FastAPI's documentation: blocking work in the thread pool, Uvicorn with uvloop and httptools. A thread a core, as OpenCV and
ONNX Runtime let go of Python's lock; one thread within each.
"""

import anyio
import uvicorn
from common import PATH, Classifier, arguments, cores
from fastapi import FastAPI, Request


def main() -> None:
    args = arguments()
    classifier, app, limit = Classifier(args.model), FastAPI(), anyio.CapacityLimiter(cores())

    @app.post(PATH)
    async def classify(request: Request) -> dict:
        return await anyio.to_thread.run_sync(classifier.classify, await request.body(), limiter=limit)

    uvicorn.run(app, host="127.0.0.1", port=args.port, loop="uvloop", http="httptools", log_level="error")


if __name__ == "__main__":
    main()

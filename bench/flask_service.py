"""The service that teams begin with: Flask around the Transformers pipeline (PyTorch, Pillow), one image
a request, ViT-B/16 with random weights. And its client, which keeps two requests going.

Usage: python bench/flask_service.py FOLDER IMAGES

Starts the service, sends it the first IMAGES files of FOLDER as raw bytes, and prints one JSON
object: images/s from the first request to the last answer.
"""

import io
import json
import logging
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flask
import PIL.Image
import torch
import transformers
from werkzeug.serving import make_server

CLIENTS = 2
WARM_UP = 3


def service() -> flask.Flask:
    torch.manual_seed(0)
    network = transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)).eval()
    processor = transformers.ViTImageProcessor()
    classify = transformers.pipeline("image-classification", model=network, image_processor=processor, device="cpu")
    app = flask.Flask(__name__)

    @app.post("/classify")
    def answer() -> flask.Response:
        image = PIL.Image.open(io.BytesIO(flask.request.get_data())).convert("RGB")
        return flask.jsonify(classify(image, top_k=5))

    return app


def main() -> None:
    files = sorted(Path(sys.argv[1]).iterdir())[: int(sys.argv[2])]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, service(), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/classify"

    def classify(path: Path) -> str:
        with urllib.request.urlopen(urllib.request.Request(url, data=path.read_bytes())) as answer:
            return json.load(answer)[0]["label"]

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(classify, files[:WARM_UP]))
        start = time.perf_counter()
        labels = list(clients.map(classify, files))
        print(json.dumps({"images_per_second": len(labels) / (time.perf_counter() - start)}))


if __name__ == "__main__":
    main()

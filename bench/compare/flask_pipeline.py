"""A Flask service around the Transformers pipeline (PyTorch, Pillow), and a client that sends it the images.

Flask's documentation: not its own server but a production one, here waitress. Transformers':
one thread of PyTorch for each core, `inference_mode` (the pipeline's own), no batches while requests come one by one.
The client keeps two requests a core going.
"""

import io
import json
import multiprocessing
import socket
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared import TOP, Rows, arguments, cores, files

# As Trommel's.
PATH = "/v1/models/model/classify"


def serve(model: Path, port: int) -> None:
    import flask
    import PIL.Image
    import timm
    import torch
    import transformers
    import waitress

    config = json.loads((model / "config.json").read_text())
    torch.set_num_threads(cores())
    torch.manual_seed(0)  # as models/export.py does, so the weights are the same
    network = timm.create_model(config["architecture"], num_classes=len(config["label_names"]))
    settings = transformers.TimmWrapperConfig.from_dict(config)
    wrapped = transformers.TimmWrapperForImageClassification(settings).eval()
    wrapped.timm_model.load_state_dict(network.state_dict())
    processor = transformers.TimmWrapperImageProcessor(settings.pretrained_cfg, settings.architecture)
    classify = transformers.pipeline("image-classification", model=wrapped, image_processor=processor, device="cpu")
    app = flask.Flask(__name__)

    @app.post(PATH)
    def answer() -> flask.Response:
        image = PIL.Image.open(io.BytesIO(flask.request.get_data())).convert("RGB")
        return flask.jsonify(classify(image, top_k=TOP))

    waitress.serve(app, host="127.0.0.1", port=port, threads=4 * cores())


def main() -> None:
    args = arguments()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    service = multiprocessing.get_context("spawn").Process(target=serve, args=(args.model, port), daemon=True)
    service.start()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            if not service.is_alive():
                raise SystemExit("flask_pipeline: the service has ended before it listened") from None
            time.sleep(0.02)
    url, rows = f"http://127.0.0.1:{port}{PATH}", Rows(args.output)
    paths = files(args.images)
    with ThreadPoolExecutor(2 * cores()) as clients:
        for path, best in zip(paths, clients.map(lambda path: ask(url, path), paths)):
            rows.add([path], [best])
    rows.flush()


def ask(url: str, path: str) -> list[tuple[str, float]]:
    """The labels of an image; none where the service answers with an error."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=Path(path).read_bytes())) as answer:
            return [(one["label"], one["score"]) for one in json.load(answer)]
    except urllib.error.HTTPError:
        return []


if __name__ == "__main__":
    main()

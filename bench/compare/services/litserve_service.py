"""LitServe with dynamic batching: a worker a core, each with a thread of ONNX Runtime.

Its documentation: `max_batch_size` and `batch_timeout`, decoding in `decode_request`, several workers where a device
is not full. It reads JSON or forms, so the image comes as a form's file.
"""

import litserve
from common import PATH, Classifier, arguments, cores, prepare

MAX_BATCH = 8
BATCH_TIMEOUT = 0.005


class Api(litserve.LitAPI):
    def __init__(self, model, **options) -> None:
        super().__init__(**options)
        self.folder = model

    def setup(self, device) -> None:
        self.classifier = Classifier(self.folder)

    def decode_request(self, request):
        return prepare(request["image"].file.read(), self.classifier.wanted)

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        return self.classifier.scores(inputs)

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return output


def main() -> None:
    args = arguments()
    api = Api(args.model, max_batch_size=MAX_BATCH, batch_timeout=BATCH_TIMEOUT, api_path=PATH)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=cores())
    server.run(host="127.0.0.1", port=args.port, log_level="error", generate_client_file=False)


if __name__ == "__main__":
    main()

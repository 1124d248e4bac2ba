"""Exports an image classifier of timm or Transformers as a model directory for Trommel.

The directory holds `model.onnx` (one file, dynamic batch unless --batch is given), and the
configuration as its library writes it: timm's `config.json` with `pretrained_cfg`, or `config.json`
with `id2label` and `preprocessor_config.json` of Transformers. The export is run once and compared
with the original before anything is written to its place.

Examples:
  python models/export.py timm/mobilenetv3_small_100 --random --output models/mobilenet
  python models/export.py hf/google/vit-base-patch16-224 --int8 dynamic --output models/vit-int8
  python models/export.py hf/openai/clip-vit-base-patch32 --labels animals.txt --output models/animals
"""

import argparse
import difflib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

TOLERANCE = 1e-3

# Architectures that --random can build without a download: class names in Transformers.
RANDOM_CONFIGS = {
    "vit-base": "ViT",
    "deit-base": "DeiT",
    "beit-base": "Beit",
    "swin-tiny": "Swin",
    "convnext-tiny": "ConvNext",
    "resnet-50": "ResNet",
    "mobilenet_v2": "MobileNetV2",
    "dinov2-base": "Dinov2",
}
PROCESSORS = {"Swin": "ViT", "ResNet": "ConvNext", "Dinov2": "Bit"}


@dataclass
class Classifier:
    """A network from normalised pixels `[N, 3, H, W]` to logits, and its files of configuration."""

    network: nn.Module
    height: int
    width: int
    files: dict[str, dict]


class ExportError(Exception):
    """What the user can mend."""


def main() -> None:
    args = parse()
    torch.manual_seed(0)
    try:
        classifier = load(args)
        write(classifier, args)
    except ExportError as error:
        sys.exit(f"export: {error}")
    print(f"wrote {args.output}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="timm/NAME or hf/NAME")
    parser.add_argument("--output", type=Path, required=True, help="model directory to write")
    parser.add_argument("--random", action="store_true", help="random weights, no download")
    parser.add_argument("--opset", type=int, default=17, help="operator set (default: 17)")
    parser.add_argument("--batch", type=int, help="fixed batch size (default: any)")
    parser.add_argument("--fp16", action="store_true", help="16-bit weights, input and output")
    parser.add_argument("--int8", choices=["dynamic", "static"], help="8-bit weights")
    parser.add_argument("--calibration", type=Path, help="folder of images for --int8 static")
    parser.add_argument("--labels", type=Path, help="file of labels, one a line: zero-shot")
    parser.add_argument("--prompt", default="a photo of a {}.", help="sentence for --labels")
    args = parser.parse_args()
    if args.fp16 and args.int8:
        parser.error("--fp16 and --int8 exclude each other")
    if args.int8 == "static" and not args.calibration and not args.random:
        parser.error("--int8 static needs --calibration FOLDER (random weights do without)")
    return args


def load(args: argparse.Namespace) -> Classifier:
    library, _, name = args.model.partition("/")
    loaders: dict[str, Callable[[str, argparse.Namespace], Classifier]] = {
        "timm": load_timm,
        "hf": load_zero_shot if args.labels else load_transformers,
    }
    if library not in loaders or not name:
        raise ExportError(f"{args.model}: expected timm/NAME or hf/NAME")
    return loaders[library](name, args)


def load_timm(name: str, args: argparse.Namespace) -> Classifier:
    import timm

    if args.labels:
        raise ExportError("--labels needs a CLIP or SigLIP model of Transformers (hf/NAME)")
    if not timm.is_model(name.split(".")[0]):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.4)
        raise ExportError(f"timm has no model {name}; near it: {', '.join(near) or 'none'}")
    network = timm.create_model(name, pretrained=not args.random, exportable=True).eval()
    known = network.pretrained_cfg
    transform = timm.data.resolve_data_config({}, model=network)
    keys = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
    config = {
        "architecture": name,
        "num_classes": network.num_classes,
        "label_names": known.get("label_names") or [f"class_{n}" for n in range(network.num_classes)],
        "pretrained_cfg": {key: transform[key] for key in keys},
    }
    _, height, width = transform["input_size"]
    return Classifier(network, height, width, {"config.json": config})


def load_transformers(name: str, args: argparse.Namespace) -> Classifier:
    import transformers

    if args.random:
        family = RANDOM_CONFIGS.get(name.split("/")[-1])
        if family is None:
            known = ", ".join(sorted(RANDOM_CONFIGS))
            raise ExportError(f"--random knows no configuration of {name}; it knows {known}")
        config = getattr(transformers, f"{family}Config")(num_labels=1000)
        network = getattr(transformers, f"{family}ForImageClassification")(config)
        processor = getattr(transformers, f"{PROCESSORS.get(family, family)}ImageProcessor")
        preprocessing = processor().to_dict()
    else:
        try:
            network = transformers.AutoModelForImageClassification.from_pretrained(name)
            preprocessing = transformers.AutoImageProcessor.from_pretrained(name).to_dict()
        except OSError as error:
            raise ExportError(f"failed to load {name}: {error}") from error
    files = {
        "config.json": network.config.to_dict(),
        "preprocessor_config.json": preprocessing,
    }
    height, width = tensor_size(preprocessing)
    return Classifier(Logits(network).eval(), height, width, files)


class Logits(nn.Module):
    """The logits of a Transformers classifier alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.network(pixel_values=pixel_values).logits


class ZeroShot(nn.Module):
    """Image features against fixed text features: the last matrix product of a classifier."""

    def __init__(self, vision: nn.Module, text: torch.Tensor, scale: float, bias: float) -> None:
        super().__init__()
        self.vision = vision
        self.register_buffer("text", text * scale)
        self.bias = bias

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        features = self.vision(pixel_values)
        features = features / features.norm(dim=-1, keepdim=True)
        return features @ self.text.T + self.bias


class VisionFeatures(nn.Module):
    """The image tower with its projection."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.tower = model.vision_model
        self.projection = getattr(model, "visual_projection", nn.Identity())

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(self.tower(pixel_values=pixel_values).pooler_output)


def load_zero_shot(name: str, args: argparse.Namespace) -> Classifier:
    """Folds the embeddings of the labels into a classifier.

    CLIP: softmax over scale x cosine. SigLIP: sigmoid of scale x cosine + bias for each label.
    """
    import transformers

    labels = [line.strip() for line in args.labels.read_text().splitlines() if line.strip()]
    if len(labels) < 2:
        raise ExportError(f"{args.labels} names {len(labels)} labels; two are the least")
    siglip = "siglip" in name.lower()
    if args.random:
        print("random weights and hashed words: the scores mean nothing")
        model, tokens, preprocessing = random_zero_shot(labels, siglip)
    else:
        try:
            model = transformers.AutoModel.from_pretrained(name)
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
            preprocessing = transformers.AutoImageProcessor.from_pretrained(name).to_dict()
        except OSError as error:
            raise ExportError(f"failed to load {name}: {error}") from error
        sentences = [args.prompt.format(label) for label in labels]
        padding = "max_length" if siglip else True
        tokens = tokenizer(sentences, padding=padding, return_tensors="pt")
    if not hasattr(model, "logit_scale"):
        raise ExportError(f"{name} is no CLIP or SigLIP model, so it has no text to compare with")
    model.eval()
    with torch.no_grad():
        text = model.text_model(**tokens).pooler_output
        text = getattr(model, "text_projection", nn.Identity())(text)
        text = text / text.norm(dim=-1, keepdim=True)
    bias = float(model.logit_bias) if hasattr(model, "logit_bias") else 0.0
    network = ZeroShot(VisionFeatures(model), text, float(model.logit_scale.exp()), bias)
    problem = "multi_label_classification" if siglip else "single_label_classification"
    config = {
        "model_type": model.config.model_type,
        "problem_type": problem,
        "id2label": {str(number): label for number, label in enumerate(labels)},
    }
    height, width = tensor_size(preprocessing)
    files = {"config.json": config, "preprocessor_config.json": preprocessing}
    return Classifier(network.eval(), height, width, files)


def random_zero_shot(labels: list[str], siglip: bool) -> tuple[nn.Module, dict, dict]:
    """A small CLIP or SigLIP model with random weights, and words as hashed numbers."""
    import zlib

    import transformers

    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    text = {**small, "vocab_size": 1000, "max_position_embeddings": 16}
    vision = {**small, "image_size": 32, "patch_size": 8}
    family = "Siglip" if siglip else "CLIP"
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision)
    model = getattr(transformers, f"{family}Model")(config)
    words = [[zlib.crc32(word.encode()) % 900 + 1 for word in label.split()[:14]] for label in labels]
    length = max(map(len, words)) + 1
    end = [999] if not siglip else [0]
    ids = [number + end * (length - len(number)) for number in words]
    size = {"height": 32, "width": 32} if siglip else {"shortest_edge": 32}
    crop = {"height": 32, "width": 32}
    preprocessing = getattr(transformers, f"{family}ImageProcessor")(size=size, crop_size=crop).to_dict()
    return model, {"input_ids": torch.tensor(ids)}, preprocessing


def tensor_size(preprocessing: dict) -> tuple[int, int]:
    """Height and width of the tensor that a Transformers configuration gives."""
    size = preprocessing["size"]
    if preprocessing.get("do_center_crop") and preprocessing.get("crop_size"):
        size = preprocessing["crop_size"]
    edge = size.get("shortest_edge")
    return size.get("height", edge), size.get("width", edge)


def write(classifier: Classifier, args: argparse.Namespace) -> None:
    """Exports into a temporary directory, checks, and moves the result to its place."""
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output.parent) as temporary:
        folder = Path(temporary) / "model"
        folder.mkdir()
        plain = folder / "model.onnx"
        export_onnx(classifier, plain, args)
        difference = compare(classifier, plain, args.batch or 2)
        print(f"largest difference from the original: {difference:.2e}")
        if not difference <= TOLERANCE:
            raise ExportError(f"the export differs by {difference:.2e}, more than {TOLERANCE}")
        if args.fp16:
            to_fp16(plain)
        if args.int8:
            quantize(plain, classifier, args)
        for name, content in classifier.files.items():
            text = json.dumps(content, indent=2, default=str)
            (folder / name).write_text(text + "\n")
        shutil.rmtree(args.output, ignore_errors=True)
        shutil.move(folder, args.output)


def export_onnx(classifier: Classifier, path: Path, args: argparse.Namespace) -> None:
    example = torch.rand(args.batch or 2, 3, classifier.height, classifier.width)
    axes = {"pixel_values": {0: "batch_size"}, "logits": {0: "batch_size"}}
    torch.onnx.export(
        classifier.network, (example,), str(path), dynamo=False, opset_version=args.opset,
        input_names=["pixel_values"], output_names=["logits"],
        dynamic_axes=None if args.batch else axes,
    )  # fmt: skip
    onnx.checker.check_model(str(path))


def compare(classifier: Classifier, path: Path, batch: int) -> float:
    """Largest difference from the original, relative to the largest logit."""
    pixels = torch.randn(batch, 3, classifier.height, classifier.width)
    with torch.no_grad():
        expected = classifier.network(pixels).numpy()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"pixel_values": pixels.numpy()})
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))


def to_fp16(path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = convert_float_to_float16(onnx.load(path), keep_io_types=False)
    onnx.save(model, path)


def quantize(path: Path, classifier: Classifier, args: argparse.Namespace) -> None:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = path.with_name("prepared.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    if args.int8 == "dynamic":
        # Convolutions have no fast dynamic kernel, so only matrix products are quantised.
        quantize_dynamic(prepared, path, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
    else:
        quantize_static(
            prepared, path, Calibration(classifier, args.calibration, args.batch or 1),
            quant_format=QuantFormat.QDQ, per_channel=True,
        )  # fmt: skip
    prepared.unlink()


class Calibration:
    """Batches that static quantisation learns the ranges of values from."""

    def __init__(self, classifier: Classifier, folder: Path | None, batch: int) -> None:
        self.batches = iter(list(self.tensors(classifier, folder, batch)))

    def get_next(self) -> dict | None:
        return next(self.batches, None)

    @staticmethod
    def tensors(classifier: Classifier, folder: Path | None, batch: int) -> list[dict]:
        shape = (batch, 3, classifier.height, classifier.width)
        if folder is None:
            noise = np.random.default_rng(0)
            return [{"pixel_values": noise.standard_normal(shape, np.float32)} for _ in range(8)]
        from PIL import Image

        suffixes = {".jpg", ".jpeg", ".png", ".webp"}
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in suffixes)[:200]
        if len(paths) < batch:
            raise ExportError(f"{folder} holds {len(paths)} images to calibrate with")
        mean, std = mean_and_std(classifier.files)
        pixels = []
        for path in paths:
            small = Image.open(path).convert("RGB").resize((classifier.width, classifier.height))
            values = (np.asarray(small, np.float32) / 255.0 - mean) / std
            pixels.append(values.transpose(2, 0, 1).astype(np.float32))
        whole = len(pixels) // batch * batch
        stacked = np.stack(pixels[:whole]).reshape(-1, *shape)
        return [{"pixel_values": part} for part in stacked]


def mean_and_std(files: dict[str, dict]) -> tuple[np.ndarray, np.ndarray]:
    found = files.get("preprocessor_config.json")
    if found is not None:
        return np.array(found.get("image_mean", 0.0)), np.array(found.get("image_std", 1.0))
    known = files["config.json"]["pretrained_cfg"]
    return np.array(known["mean"]), np.array(known["std"])


if __name__ == "__main__":
    main()

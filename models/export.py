"""Exports an image classifier of timm or Transformers as a model directory for Trommel.

The directory holds `model.onnx` (one file, dynamic batch unless --batch is given), and the
configuration as its library writes it: timm's `config.json` with `pretrained_cfg`, or `config.json`
with `id2label` and `preprocessor_config.json` of Transformers. The export is run once and compared
with the original before anything is written to its place.

Examples:
  python models/export.py google/vit-base-patch16-224 --output models/vit
  python models/export.py ./finetuned --output models/mine
  python models/export.py timm/mobilenetv3_small_100 --random --output models/mobilenet
  python models/export.py hf_hub:timm/resnet50.a1_in1k --output models/resnet
  python models/export.py timm/resnet50 --checkpoint best.pth --labels names.txt --output models/mine
  python models/export.py openai/clip-vit-base-patch32 --labels animals.txt --output models/animals
  python models/export.py openai/clip-vit-base-patch32 --embedding --output models/clip
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

try:
    import numpy as np
    import onnx
    import onnxruntime
    import torch
    from torch import nn
except ImportError as error:
    sys.exit(f"export: {error}; pip install -r models/requirements.txt")

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
    files: dict[str, dict | str]
    output: str = "logits"
    text: TextTower | None = None


@dataclass
class TextTower:
    """A network from tokens and their mask `[N, L]` to embeddings, and where its tokenizer is."""

    network: nn.Module
    tokenizer: object


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
    except ImportError as error:
        sys.exit(f"export: {error}; pip install -r models/requirements.txt")
    print(f"wrote {args.output}")


def one_line(error: BaseException) -> str:
    """The first line of an error that says something, without a web address's query."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else text[:300] + "…"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "model",
        help="ORGANISATION/NAME of the Hugging Face Hub, a folder that Transformers saved, timm/NAME, "
        "or hf_hub:ORGANISATION/NAME for one of timm's on the hub",
    )
    parser.add_argument("--output", type=Path, required=True, help="model directory to write")
    parser.add_argument("--random", action="store_true", help="random weights, no download")
    parser.add_argument("--opset", type=int, default=17, help="operator set (default: 17)")
    parser.add_argument("--batch", type=int, help="fixed batch size (default: any)")
    parser.add_argument("--fp16", action="store_true", help="16-bit weights, input and output")
    parser.add_argument("--int8", choices=["dynamic", "static"], help="8-bit weights")
    parser.add_argument("--calibration", type=Path, help="folder of images for --int8 static")
    parser.add_argument("--checkpoint", type=Path, help="fine-tuned weights of a timm model (.pth, .safetensors)")
    parser.add_argument(
        "--labels", type=Path,
        help="file of labels, one a line: the classes of a timm model; of CLIP and SigLIP, what to tell apart",
    )
    parser.add_argument(
        "--embedding", action="store_true",
        help="embeddings instead of classes; of CLIP and SigLIP with the tower for texts and its tokenizer",
    )
    parser.add_argument("--prompt", default="a photo of a {}.", help="sentence for --labels")
    args = parser.parse_args()
    if args.fp16 and args.int8:
        parser.error("--fp16 and --int8 exclude each other")
    if args.checkpoint and args.random:
        parser.error("--checkpoint and --random exclude each other")
    if args.embedding and (args.labels or args.int8 or args.fp16 or args.checkpoint):
        parser.error("--embedding goes without --labels, --int8, --fp16 and --checkpoint")
    if args.int8 == "static" and not args.calibration and not args.random:
        parser.error("--int8 static needs --calibration FOLDER (random weights do without)")
    return args


def load(args: argparse.Namespace) -> Classifier:
    library, name = source(args.model)
    if args.embedding:
        return embedding_of_timm(name, args) if library == "timm" else embedding_of_transformers(name, args)
    if library == "timm":
        return load_timm(name, args)
    if args.checkpoint:
        raise ExportError("--checkpoint is for models of timm; give the folder that Transformers saved instead")
    return load_zero_shot(name, args) if args.labels else load_transformers(name, args)


def source(model: str) -> tuple[str, str]:
    """The library that a model is of, and its name there."""
    if Path(model).is_dir():
        config = Path(model) / "config.json"
        if not config.is_file():
            raise ExportError(f"{model} holds no config.json; give a folder that save_pretrained wrote")
        of_timm = "pretrained_cfg" in json.loads(config.read_text())
        return ("timm", f"local-dir:{model}") if of_timm else ("transformers", model)
    if model.startswith((".", "/", "~")):
        raise ExportError(f"{model}: there is no such folder")
    if re.match(r"hf[-_]hub:", model):
        return "timm", "hf-hub:" + model.split(":", 1)[1]
    library, _, name = model.partition("/")
    if library in ("timm", "hf") and name:
        return {"timm": "timm", "hf": "transformers"}[library], name
    if name and "/" not in name:
        return "transformers", model
    raise ExportError(f"{model}: expected ORGANISATION/NAME, timm/NAME, hf_hub:ORGANISATION/NAME or a folder")


def read_labels(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ExportError(f"--labels {path}: {error.strerror}") from error


def load_timm(name: str, args: argparse.Namespace) -> Classifier:
    import timm

    is_bundled = ":" not in name
    if is_bundled and not timm.is_model(name.split(".")[0]):
        near = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.4)
        raise ExportError(f"timm has no model {name}; near it: {', '.join(near) or 'none'}")
    labels = read_labels(args.labels) if args.labels else None
    options = {"exportable": True}
    if args.checkpoint:
        options |= {"checkpoint_path": str(args.checkpoint), "num_classes": classes_of(args.checkpoint)}
    try:
        pretrained = not args.random and not args.checkpoint
        network = timm.create_model(name, pretrained=pretrained, **options).eval()
    except (OSError, RuntimeError, ValueError) as error:
        what = f"{args.checkpoint} into {name}" if args.checkpoint else name
        raise ExportError(f"failed to load {what}: {one_line(error)}") from error
    known = network.pretrained_cfg
    names = labels or known.get("label_names")
    if names and len(names) != network.num_classes:
        raise ExportError(f"{args.labels} names {len(names)} classes, and the model has {network.num_classes}")
    transform = timm.data.resolve_data_config({}, model=network)
    keys = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
    config = {
        "architecture": name.rsplit("/", 1)[-1],
        "num_classes": network.num_classes,
        "label_names": names or [f"class_{n}" for n in range(network.num_classes)],
        "pretrained_cfg": {key: transform[key] for key in keys},
    }
    _, height, width = transform["input_size"]
    return Classifier(network, height, width, {"config.json": config})


def classes_of(checkpoint: Path) -> int:
    """The number of classes that fine-tuned weights tell apart: the bias of their last layer."""
    from timm.models import load_state_dict

    if not checkpoint.is_file():
        raise ExportError(f"--checkpoint {checkpoint}: there is no such file")
    try:
        weights = load_state_dict(str(checkpoint), weights_only=True)
    except Exception as error:  # of any kind, by what the file is not
        raise ExportError(f"--checkpoint {checkpoint} holds no weights: {one_line(error)}") from error
    heads = [name for name, values in weights.items() if values.ndim == 2 and name.endswith(".weight")]
    biases = [name for name in heads if name.removesuffix("weight") + "bias" in weights]
    if not biases:
        raise ExportError(f"--checkpoint {checkpoint} has no last layer with a bias, so the number of classes is unknown")
    return int(weights[biases[-1]].shape[0])


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
        network = pretrained(transformers.AutoModelForImageClassification, name)
        preprocessing = pretrained(transformers.AutoImageProcessor, name).to_dict()
    # Says whose processor it is: Pillow's before Transformers 5, torchvision's since.
    config = network.config.to_dict() | {"transformers_version": transformers.__version__}
    files = {"config.json": config, "preprocessor_config.json": preprocessing}
    height, width = tensor_size(preprocessing)
    return Classifier(Logits(network).eval(), height, width, files)


def pretrained(kind: type, name: str):
    """What a class of Transformers loads, or why it cannot, in one line."""
    try:
        return kind.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ExportError(f"failed to load {name}: {one_line(error)}") from error


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

    labels = read_labels(args.labels)
    if len(labels) < 2:
        raise ExportError(f"{args.labels} names {len(labels)} labels; two are the least")
    siglip = "siglip" in name.lower()
    if args.random:
        print("random weights and hashed words: the scores mean nothing")
        model, tokens, preprocessing = random_zero_shot(labels, siglip)
    else:
        model = pretrained(transformers.AutoModel, name)
        tokenizer = pretrained(transformers.AutoTokenizer, name)
        preprocessing = pretrained(transformers.AutoImageProcessor, name).to_dict()
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
        "transformers_version": transformers.__version__,
    }
    height, width = tensor_size(preprocessing)
    files = {"config.json": config, "preprocessor_config.json": preprocessing}
    return Classifier(network.eval(), height, width, files)


class TextFeatures(nn.Module):
    """The text tower with its projection."""

    def __init__(self, model: nn.Module, masked: bool) -> None:
        super().__init__()
        self.tower = model.text_model
        self.projection = getattr(model, "text_projection", nn.Identity())
        self.masked = masked

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        mask = {"attention_mask": attention_mask} if self.masked else {}
        return self.projection(self.tower(input_ids=input_ids, **mask).pooler_output)


class Pooled(nn.Module):
    """The pooled output of a network without a tower for texts."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.network(pixel_values=pixel_values).pooler_output


def embedding_of_transformers(name: str, args: argparse.Namespace) -> Classifier:
    """Image features; of CLIP and SigLIP also the tower for texts, and how both are compared."""
    import transformers

    if args.random:
        raise ExportError("--embedding --random: save a model of random weights with save_pretrained and name its folder")
    model = pretrained(transformers.AutoModel, name).eval()
    preprocessing = pretrained(transformers.AutoImageProcessor, name).to_dict()
    config = model.config.to_dict() | {"transformers_version": transformers.__version__}
    config.pop("id2label", None)
    files = {"config.json": config, "preprocessor_config.json": preprocessing}
    height, width = tensor_size(preprocessing)
    if not hasattr(model, "text_model"):
        return Classifier(Pooled(model), height, width, files, "image_embeds")
    tokenizer = pretrained(transformers.AutoTokenizer, name)
    bias = float(model.logit_bias) if hasattr(model, "logit_bias") else 0.0
    scale = float(model.logit_scale.exp())
    files["trommel.toml"] = f"[text]\nlogit-scale = {scale!r}\nlogit-bias = {bias!r}\n"
    text = TextTower(TextFeatures(model, "siglip" not in model.config.model_type).eval(), tokenizer)
    return Classifier(VisionFeatures(model).eval(), height, width, files, "image_embeds", text)


def embedding_of_timm(name: str, args: argparse.Namespace) -> Classifier:
    import timm

    try:
        network = timm.create_model(name, pretrained=not args.random, num_classes=0, exportable=True).eval()
    except (OSError, RuntimeError, ValueError) as error:
        raise ExportError(f"failed to load {name}: {one_line(error)}") from error
    transform = timm.data.resolve_data_config({}, model=network)
    keys = ("input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std")
    config = {
        "architecture": name.rsplit("/", 1)[-1],
        "num_classes": 0,
        "pretrained_cfg": {key: transform[key] for key in keys},
    }
    _, height, width = transform["input_size"]
    return Classifier(network, height, width, {"config.json": config}, "image_embeds")


def export_text(text: TextTower, folder: Path, args: argparse.Namespace) -> None:
    """Exports the tower for texts and its tokenizer, and compares the tower with the original."""
    ids = torch.ones(2, 7, dtype=torch.int64)
    if not text.network.masked:
        ids = torch.ones(2, text.network.tower.config.max_position_embeddings, dtype=torch.int64)
    names = ["input_ids", "attention_mask"] if text.network.masked else ["input_ids"]
    inputs = (ids, torch.ones_like(ids))[: len(names)]
    path = folder / "text_model.onnx"
    dimensions = {0: "texts", 1: "length"} if text.network.masked else {0: "texts"}
    try:
        with silence():
            torch.onnx.export(
                text.network, inputs, str(path), dynamo=False, opset_version=args.opset, input_names=names,
                output_names=["text_embeds"], dynamic_axes={name: dimensions for name in names} | {"text_embeds": {0: "texts"}},
            )  # fmt: skip
    except Exception as error:  # of any kind, by what the network does
        raise ExportError(f"the tower for texts cannot be exported to ONNX: {one_line(error)}") from error
    with torch.no_grad():
        expected = text.network(*inputs).numpy()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, dict(zip(names, (value.numpy() for value in inputs))))
    difference = float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))
    if not difference <= TOLERANCE:
        raise ExportError(f"the export of the tower for texts differs by {difference:.2e}, more than {TOLERANCE}")
    text.tokenizer.save_pretrained(folder)


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
        plain = folder / ("vision_model.onnx" if classifier.text else "model.onnx")
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
            text = content if isinstance(content, str) else json.dumps(content, indent=2, default=str) + "\n"
            (folder / name).write_text(text)
        if classifier.text:
            export_text(classifier.text, folder, args)
        shutil.rmtree(args.output, ignore_errors=True)
        shutil.move(folder, args.output)


@contextlib.contextmanager
def silence():
    """Keeps what native code prints off the screen: the tracer prints the whole graph when it fails."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 1)
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def export_onnx(classifier: Classifier, path: Path, args: argparse.Namespace) -> None:
    """Exports by tracing, and what cannot be traced with PyTorch's newer exporter."""
    example = torch.rand(args.batch or 2, 3, classifier.height, classifier.width)
    names = {"input_names": ["pixel_values"], "output_names": [classifier.output]}
    axes = {"pixel_values": {0: "batch_size"}, classifier.output: {0: "batch_size"}}
    try:
        with silence():
            torch.onnx.export(
                classifier.network, (example,), str(path), dynamo=False, opset_version=args.opset,
                dynamic_axes=None if args.batch else axes, **names,
            )  # fmt: skip
        onnx.checker.check_model(str(path))
        return
    except Exception as error:  # of any kind, by what the network does
        print(f"tracing failed ({one_line(error)}); trying the newer exporter", file=sys.stderr)
    batch = None if args.batch else ({0: torch.export.Dim("batch_size")},)
    try:
        torch.onnx.export(
            classifier.network, (example,), str(path), dynamo=True, opset_version=max(args.opset, 18),
            dynamic_shapes=batch, external_data=False, verbose=False, **names,
        )  # fmt: skip
        onnx.checker.check_model(str(path))
    except Exception as error:
        raise ExportError(f"this network cannot be exported to ONNX: {one_line(error)}") from error


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

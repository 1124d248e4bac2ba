"""Trommel's tensors compared with those of the reference processors, family by family and format by format.

Usage: python bench/exactness.py TENSOR_PROGRAM > table.md
TENSOR_PROGRAM is the example `tensor` of crates/preprocess. References: what `AutoImageProcessor` of the
installed Transformers gives for the folder, without a hint whether it is to use Pillow or torchvision (run
it with 4.57 and with 5: each writes its own folders), timm's evaluation transform, and the transform that
comes with torchvision's weights, each with its defaults. Every cell is the largest difference in grey
levels and the share of identical values over images of five sizes.
"""

import io
import json
import struct
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import timm
import torch
import transformers
from make_photos import photo
from PIL import Image, ImageOps
from torchvision.transforms import functional, v2
from torchvision.transforms._presets import ImageClassification

SIZES = [(500, 375), (375, 500), (1920, 1080), (331, 257), (150, 190)]
FAMILIES = [
    "ViT", "DeiT", "Beit", "ConvNext", "CLIP", "Siglip", "EfficientNet", "MobileNetV1", "MobileNetV2",
    "MobileViT", "Levit", "PoolFormer", "Bit", "Blip", "ChineseCLIP", "Pvt", "Segformer",
]
# As published: Swin uses ViT's processor, DINOv2 BiT's, ResNet ConvNeXT's, MetaCLIP CLIP's.
PUBLISHED = {
    "Swin": ("ViT", {"size": {"height": 224, "width": 224}, "resample": 3}),
    "DINOv2": ("Bit", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}),
    "ConvNeXT 224": ("ConvNext", {"size": {"shortest_edge": 224}}),
    "ResNet": ("ConvNext", {"size": {"shortest_edge": 224}, "resample": 2}),
    "CLIP 336": ("CLIP", {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}),
    "ViT lanczos": ("ViT", {"resample": 1}),
    "MiT-B0": ("Segformer", {"size": {"height": 224, "width": 224}}),
    "MobileViT 256": ("MobileViT", {"size": {"shortest_edge": 288}}),
}


def encoders():
    def save(kind, convert="RGB", **options):
        def encode(image):
            out = io.BytesIO()
            image.convert(convert).save(out, kind, **options)
            return out.getvalue()

        return encode

    turned = Image.Exif()
    turned[274] = 6
    return {
        "JPEG 4:2:0": save("JPEG", quality=88),
        "JPEG 4:4:4": save("JPEG", quality=90, subsampling=0),
        "JPEG progressive": save("JPEG", quality=80, progressive=True),
        "JPEG gray": save("JPEG", "L", quality=85),
        "JPEG CMYK": save("JPEG", "CMYK", quality=85),
        "JPEG turned": save("JPEG", quality=85, exif=turned.tobytes()),
        "PNG": save("PNG"),
        "PNG palette": save("PNG", "P"),
        "PNG alpha": save("PNG", "RGBA"),
        "WebP": save("WEBP", quality=80),
        "WebP lossless": save("WEBP", lossless=True),
        "GIF": save("GIF", "P"),
        "BMP": save("BMP"),
        "TIFF LZW": save("TIFF", compression="tiff_lzw"),
    }


def processors():
    """Name, files of a model directory, and what makes, given that directory, the reference from an RGB
    image to HWC u8."""
    version = transformers.__version__

    def transformer(kind, keys, folder):
        getattr(transformers, f"{kind}ImageProcessor")(**keys).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps({"transformers_version": version}))
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        plain = {"do_rescale": False}
        if kind != "MobileViT":
            plain["do_normalize"] = False
        if kind == "EfficientNet":
            plain["include_top"] = False
        return lambda image: np.asarray(processor(image, **plain)["pixel_values"][0]).transpose(1, 2, 0)

    plain = {kind: (kind, {}) for kind in FAMILIES}
    for name, (kind, keys) in (plain | PUBLISHED).items():
        yield name, {}, partial(transformer, kind, keys)

    for crop in [0.875, 0.95, 1.0]:
        cfg = {"input_size": [3, 224, 224], "crop_pct": crop, "interpolation": "bicubic", "crop_mode": "center"}
        transform = timm.data.create_transform(
            input_size=(3, 224, 224), crop_pct=crop, interpolation="bicubic", normalize=False
        )
        to_bytes = lambda image, transform=transform: np.asarray(transform(image)).transpose(1, 2, 0)
        config = {"config.json": {"architecture": "x", "pretrained_cfg": cfg}}
        yield f"timm {crop}", config, lambda _, to_bytes=to_bytes: to_bytes

    preset = ImageClassification(crop_size=224, resize_size=232)

    def weights(image):
        image = functional.resize(image, preset.resize_size, interpolation=preset.interpolation)
        return np.asarray(functional.center_crop(image, preset.crop_size))

    toml = (
        '[preprocess]\nshortest-edge = 232\ncrop = [224, 224]\nresample = "bilinear"\n'
        'rounding = "torchvision"\nmean = [0.485, 0.456, 0.406]\nstd = [0.229, 0.224, 0.225]\n'
    )
    yield "torchvision weights", {"trommel.toml": toml}, lambda _: weights


def main():
    program = sys.argv[1]
    random = np.random.default_rng(5)
    photos = [photo(random, *size) for size in SIZES]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        files, images = {}, {}
        for name, encode in encoders().items():
            for number, image in enumerate(photos):
                path = folder / f"{name} {number}".replace(" ", "_").replace(":", "")
                path.write_bytes(encode(image))
                files.setdefault(name, []).append(path)
                opened = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
                # Without `info`, by whose transparency Transformers would blend with white.
                images[path] = Image.fromarray(np.asarray(opened))
        print("| |", " | ".join(files), "|")
        print("| --- |", " | ".join("---" for _ in files), "|")
        for name, config, made in processors():
            model = folder / name.replace(" ", "_")
            model.mkdir()
            for file, content in config.items():
                text = content if isinstance(content, str) else json.dumps(content)
                (model / file).write_text(text)
            reference = made(model)
            try:
                cells = [compare(program, model, paths, images, reference) for paths in files.values()]
            except KeyError as error:  # ChineseCLIP's own of Transformers 4.57, with its own defaults
                cells = [f"no reference ({error})"]
            print(f"| {name} |", " | ".join(cells), "|", flush=True)


def compare(program, model, paths, images, reference):
    out = io.BytesIO(subprocess.run([program, model, *paths], check=True, capture_output=True).stdout)
    largest, equal, values = 0, 0, 0
    for path in paths:
        height, width = struct.unpack("<II", out.read(8))
        found = np.frombuffer(out.read(3 * height * width), np.uint8).reshape(height, width, 3)
        expected = reference(images[path])
        assert expected.dtype == np.uint8 and expected.shape == found.shape, (path, expected.shape, found.shape)
        difference = np.abs(found.astype(int) - expected)
        largest = max(largest, difference.max())
        equal, values = equal + (difference == 0).sum(), values + difference.size
    return f"{largest}, {100 * equal / values:.2f} %" if largest else "0"


if __name__ == "__main__":
    main()

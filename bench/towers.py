"""Whether Trommel's labels and embeddings of models with two towers are those of Transformers.

Usage: python bench/towers.py TROMMEL WORK_FOLDER
CLIP, SigLIP and SigLIP2 of fixed resolution (SigLIP's class with a tokenizer of its own, which fills up on the left and
lowers texts) with random weights and a tokenizer that is trained here, in both layouts: a file for each tower, as
models/export.py --embedding writes them, and one graph with both. The reference is Transformers on the folder: its
zero-shot pipeline's scores, its image features, and its logits for 1,000 odd labels.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import torch
import transformers
from agreement import make_images
from PIL import Image, ImageOps
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = SMALL | {"image_size": 64, "patch_size": 16}
LABELS = ["cat", "a dog on grass", "night sky", "bicycle", "red square", "forest", "portrait of a woman", "text on paper"]
TEMPLATE = "This is a photo of {}."


def train_tokenizer(folder, kind, length):
    """Bytes and merges, with an end and a token that fills up."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<start>", "<end>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    text = Path(__file__).read_text() + " ".join(LABELS) * 20
    tokenizer.train_from_iterator(text.splitlines(), trainer)
    end = tokenizer.token_to_id("<end>")
    start = tokenizer.token_to_id("<start>")
    single = "<start> $A <end>" if kind == "CLIP" else "$A <end>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[("<start>", start), ("<end>", end)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<start>", eos_token="<end>", model_max_length=length,
        pad_token="<end>" if kind == "CLIP" else "<pad>", model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    fast.save_pretrained(folder)
    return fast


def train_siglip2_tokenizer(folder, length):
    """Gemma's pieces, which spaces and unknown bytes are part of, in the class of SigLIP2."""
    pieces = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    pieces.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Replace(" ", "▁")])
    pieces.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special + [f"<0x{byte:02X}>" for byte in range(256)], show_progress=False
    )
    pieces.train_from_iterator((Path(__file__).read_text() + " ".join(LABELS) * 20).splitlines(), trainer)
    model = json.loads(pieces.to_str())["model"]
    tokenizer = transformers.Siglip2Tokenizer(
        vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]], model_max_length=length
    )
    tokenizer.save_pretrained(folder)
    # Checkpoints leave the lowering to the class.
    path = Path(folder) / "tokenizer.json"
    stored = json.loads(path.read_text())
    stored["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    path.write_text(json.dumps(stored))
    return transformers.AutoTokenizer.from_pretrained(folder)


def make_model(folder, kind):
    torch.manual_seed(1)
    length = 77 if kind == "CLIP" else 64
    if kind == "SigLIP2":
        tokenizer = train_siglip2_tokenizer(folder, length)
    else:
        tokenizer = train_tokenizer(folder, kind, length)
    text = SMALL | {
        "vocab_size": len(tokenizer), "max_position_embeddings": length, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    family = "CLIP" if kind == "CLIP" else "Siglip"
    config = {"text_config": text, "vision_config": VISION}
    if family == "CLIP":
        config |= {"projection_dim": 48}
    else:
        text |= {"projection_size": 64}
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**config)).eval()
    with torch.no_grad():
        # As far apart as those that were trained.
        model.logit_scale.fill_(np.log(100.0))
        if hasattr(model, "logit_bias"):
            model.logit_bias.fill_(-12.5)
    model.save_pretrained(folder)
    size = {"shortest_edge": 64} if family == "CLIP" else {"height": 64, "width": 64}
    processor = getattr(transformers, f"{family}ImageProcessor")
    processor(size=size, crop_size={"height": 64, "width": 64}).save_pretrained(folder)
    return model, tokenizer


class Both(torch.nn.Module):
    """What Optimum exports."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, pixel_values, attention_mask=None):
        mask = {} if attention_mask is None else {"attention_mask": attention_mask}
        out = self.model(input_ids=input_ids, pixel_values=pixel_values, **mask)
        return out.logits_per_image, out.logits_per_text, out.text_embeds, out.image_embeds


def export(folder, model, kind, work):
    towers = work / f"{kind}-towers"
    program = Path(__file__).parent.parent / "models/export.py"
    subprocess.run([sys.executable, program, folder, "--embedding", "--output", towers], check=True, capture_output=True)
    both = work / f"{kind}-both"
    both.mkdir(exist_ok=True)
    for name in ["tokenizer.json", "tokenizer_config.json", "config.json", "preprocessor_config.json"]:
        (both / name).write_bytes((towers / name).read_bytes())
    length = 9 if kind == "CLIP" else 64
    inputs = (torch.ones(3, length, dtype=torch.int64), torch.rand(2, 3, 64, 64), torch.ones(3, length, dtype=torch.int64))
    names = ["input_ids", "pixel_values", "attention_mask"]
    if kind != "CLIP":
        inputs, names = inputs[:2], names[:2]
    texts = {0: "text_batch_size", 1: "sequence_length"} if kind == "CLIP" else {0: "text_batch_size"}
    axes = {"input_ids": texts, "attention_mask": texts, "pixel_values": {0: "image_batch_size"}}
    outputs = ["logits_per_image", "logits_per_text", "text_embeds", "image_embeds"]
    axes |= {"logits_per_image": {0: "i", 1: "t"}, "logits_per_text": {0: "t", 1: "i"}, "text_embeds": {0: "t"}, "image_embeds": {0: "i"}}
    torch.onnx.export(
        Both(model), inputs, both / "model.onnx", dynamo=False, opset_version=17, input_names=names, output_names=outputs,
        dynamic_axes={name: value for name, value in axes.items() if name in names + outputs},
    )  # fmt: skip
    return towers, both


def odd_labels(tokenizer, limit, count=1000):
    """Emoji, Chinese, signs, case, accents and long ones; none is empty or longer than the model reads."""
    random = np.random.default_rng(2)
    parts = ["🙂", "🏳️‍🌈", "红色的猫", "Ünïcödé", "naïve", "日本語", "x" * 20, "  two  spaces", "UPPER", "don't", "a,b;c", "№ 5", "½", "\u00a0", "ﬁ"]
    labels = set()
    while len(labels) < count:
        label = " ".join(random.choice(parts, int(random.integers(1, 5)))) + f" {random.integers(1000)}"
        label = label.rstrip()
        if len(tokenizer(TEMPLATE.replace("{}", label))["input_ids"]) <= limit:
            labels.add(label)
    return sorted(labels)


def logits_of(model, tokenizer, kind, pixels, sentences):
    padding = True if kind == "CLIP" else "max_length"
    tokens = tokenizer(sentences, padding=padding, truncation=True, return_tensors="pt")
    keys = ["input_ids", "attention_mask"] if kind == "CLIP" else ["input_ids"]
    with torch.no_grad():
        out = model(pixel_values=pixels, **{key: tokens[key] for key in keys})
    return out.logits_per_image.numpy(), out.image_embeds.numpy()


def rows(trommel, images, folder, output, *flags):
    command = [trommel, "classify", images, "--model", folder, "--output", output, "--quiet", "--overwrite", *flags]
    subprocess.run(list(map(str, command)), check=True)
    return pyarrow.parquet.read_table(output).sort_by("uri").to_pydict()


def check(trommel, work, kind, images):
    source = work / f"{kind}-source"
    source.mkdir(parents=True, exist_ok=True)
    model, tokenizer = make_model(source, kind)
    folders = export(source, model, kind, work)
    files = sorted(images.iterdir())
    processor = transformers.AutoImageProcessor.from_pretrained(folders[0])
    opened = [Image.fromarray(np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))) for path in files]
    pixels = torch.cat([processor(image, return_tensors="pt")["pixel_values"] for image in opened])
    (work / "labels.txt").write_text("\n".join(LABELS) + "\n")
    odd = odd_labels(tokenizer, 77 if kind == "CLIP" else 64)
    (work / "odd.txt").write_text("\n".join(odd) + "\n")
    expected, embeddings = logits_of(model, tokenizer, kind, pixels, [TEMPLATE.replace("{}", label) for label in LABELS])
    odd_expected, _ = logits_of(model, tokenizer, kind, pixels[:4], [TEMPLATE.replace("{}", label) for label in odd])
    few = work / "few"
    few.mkdir(exist_ok=True)
    for path in files[:4]:
        (few / path.name).write_bytes(path.read_bytes())
    for layout, folder in zip(["towers", "both"], folders):
        output = work / f"{kind}-{layout}.parquet"
        found = rows(trommel, images, folder, output, "--labels", work / "labels.txt", "--template", TEMPLATE, "--embedding", "--normalize", "--logits")
        logits, vectors = np.array(found["logits"]), np.array(found["embedding"])
        equal = sum(label == LABELS[place] for label, place in zip(found["label"], expected.argmax(1)))
        cosines = (vectors * embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)).sum(1)
        of_odd = rows(trommel, few, folder, work / "odd.parquet", "--labels", work / "odd.txt", "--template", TEMPLATE, "--logits")
        worst = np.abs(np.array(of_odd["logits"]) - odd_expected).max()
        scores = 1 / (1 + np.exp(-expected)) if kind != "CLIP" else np.exp(expected - expected.max(1, keepdims=True))
        scores = scores if kind != "CLIP" else scores / scores.sum(1, keepdims=True)
        score = np.abs(np.array(found["score"]) - scores.max(1)).max()
        print(
            f"{kind}, {layout}: top-1 equal {equal} of {len(files)}, least cosine {cosines.min():.7f}, logits differ by "
            f"{np.abs(logits - expected).max():.5f} of {np.abs(expected).max():.1f}, scores by {score:.6f}; "
            f"{len(odd)} odd labels: logits differ by {worst:.5f}",
            flush=True,
        )


def main():
    trommel, work = sys.argv[1], Path(sys.argv[2]) / "towers"
    images = Path(sys.argv[2]) / "towers-images"
    if not images.exists():
        make_images(images)
    for kind in ["CLIP", "SigLIP", "SigLIP2"]:
        check(trommel, work, kind, images)


if __name__ == "__main__":
    main()

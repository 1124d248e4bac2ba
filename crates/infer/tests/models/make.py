"""Writes the models that the tests of this crate run, each in a folder with its config.json.

Needs `pip install onnx numpy`. The result is the same every time; README.md says what each computes.
"""

import json
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HEIGHT, WIDTH = 4, 5
LABELS = ["red", "green", "blue"]
F32, F16, U8, I64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8, TensorProto.INT64
HERE = Path(__file__).parent


class Graph:
    """A model in the making."""

    def __init__(self):
        self.nodes, self.inputs, self.outputs, self.weights = [], [], [], []

    def input(self, name, element, shape):
        self.inputs.append(helper.make_tensor_value_info(name, element, shape))
        return name

    def output(self, name, element, shape):
        self.outputs.append(helper.make_tensor_value_info(name, element, shape))

    def weight(self, name, values):
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def node(self, op, inputs, output, **attributes):
        self.nodes.append(helper.make_node(op, inputs, [output], **attributes))
        return output

    def save(self, folder, external=False, labels=LABELS, file="model.onnx", config=None):
        model = helper.make_model(
            helper.make_graph(self.nodes, folder, self.inputs, self.outputs, self.weights),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
            producer_name="make.py",
        )
        onnx.checker.check_model(model)
        path = HERE / folder
        path.mkdir(exist_ok=True)
        options = (
            {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
            if external
            else {}
        )
        (path / "weights.bin").unlink(missing_ok=True)
        onnx.save(model, path / file, **options)
        config = config or {"id2label": {str(i): label for i, label in enumerate(labels)}}
        (path / "config.json").write_text(json.dumps(config) + "\n")


def weighted_means(graph, pixels, layout, element, output="logits"):
    """One logit a channel: the mean over all pixels of value times place, places from 1."""
    places = np.arange(1, HEIGHT * WIDTH + 1).reshape(HEIGHT, WIDTH)
    places = places[None, None] if layout == "nchw" else places[None, :, :, None]
    numpy_type = np.float16 if element == F16 else np.float32
    weighted = graph.node("Mul", [pixels, graph.weight("places", places.astype(numpy_type))], "w")
    axes = [2, 3] if layout == "nchw" else [1, 2]
    return graph.node("ReduceMean", [weighted], output, axes=axes, keepdims=0)


def shape(layout, batch="N", channels=3):
    return (
        [batch, channels, HEIGHT, WIDTH] if layout == "nchw" else [batch, HEIGHT, WIDTH, channels]
    )


def plain(folder, layout, element, batch="N", external=False):
    graph = Graph()
    pixels = graph.input("pixels", element, shape(layout, batch))
    if element == U8:
        pixels = graph.node("Cast", [pixels], "floats", to=F32)
    floats = F32 if element == U8 else element
    weighted_means(graph, pixels, layout, floats)
    graph.output("logits", floats, [batch, 3])
    graph.save(folder, external)


def optimum():
    graph = Graph()
    names = ["batch_size", "num_channels", "height", "width"]
    pixels = graph.input("pixel_values", F32, names)
    graph.node("ReduceMean", [pixels], "last_hidden_state", axes=[3], keepdims=0)
    graph.node("ReduceMean", [pixels], "pooler_output", axes=[2, 3], keepdims=0)
    weighted_means(graph, pixels, "nchw", F32)
    graph.output("last_hidden_state", F32, ["batch_size", "num_channels", "height"])
    graph.output("pooler_output", F32, ["batch_size", 3])
    graph.output("logits", F32, ["batch_size", 3])
    graph.save("optimum")


def poison(folder, batch):
    graph = Graph()
    pixels = graph.node("Cast", [graph.input("pixels", U8, shape("nhwc", batch))], "floats", to=F32)
    means = weighted_means(graph, pixels, "nhwc", F32, output="means")
    largest = graph.node("ReduceMax", [pixels], "largest", keepdims=0)
    limit = graph.weight("limit", np.float32(254.5).reshape(()))
    too_large = graph.node("Greater", [largest, limit], "too_large")
    index = graph.node("Cast", [too_large], "index", to=I64)
    # Out of the table's bounds, and so a failure of the whole run, if any value is 255.
    nothing = graph.node("Gather", [graph.weight("table", np.zeros(1, np.float32)), index], "nothing")
    graph.node("Add", [means, nothing], "logits")
    graph.output("logits", F32, [batch, 3])
    graph.save(folder)


def not_finite():
    graph = Graph()
    pixels = graph.node("Cast", [graph.input("pixels", U8, shape("nhwc"))], "floats", to=F32)
    means = weighted_means(graph, pixels, "nhwc", F32, output="means")
    flat = graph.node("ReduceMax", [pixels], "flat", axes=[1, 2], keepdims=0)
    largest = graph.node("ReduceMax", [flat], "largest", axes=[1], keepdims=1)
    limit = graph.weight("limit", np.float32(254.5).reshape(()))
    fine = graph.node("Cast", [graph.node("Less", [largest, limit], "less")], "fine", to=F32)
    graph.node("Div", [means, fine], "logits")
    graph.output("logits", F32, ["N", 3])
    graph.save("not_finite")


def traced_for_one():
    graph = Graph()
    means = weighted_means(
        graph, graph.input("pixels", F32, shape("nchw")), "nchw", F32, output="means"
    )
    graph.node("Reshape", [means, graph.weight("one", np.array([1, 3], np.int64))], "logits")
    graph.output("logits", F32, ["N", 3])
    graph.save("traced_for_one")


def scores(folder, operator, **attributes):
    """Scores instead of logits, as Keras and YOLO's classifiers export them."""
    graph = Graph()
    pixels = graph.input("pixels", F32, shape("nchw"))
    means = weighted_means(graph, pixels, "nchw", F32, output="means")
    graph.node(operator, [means], "scores", name="last", **attributes)
    graph.output("scores", F32, ["N", 3])
    graph.save(folder)


def one_logit():
    graph = Graph()
    means = weighted_means(
        graph, graph.input("pixels", F32, shape("nchw")), "nchw", F32, output="means"
    )
    graph.node("ReduceMean", [means], "logits", axes=[1], keepdims=1)
    graph.output("logits", F32, ["N", 1])
    graph.save("one_logit", labels=["cat"])


def hidden_classes():
    """Which columns are kept depends on the values, so that nothing can tell before a run."""
    graph = Graph()
    means = weighted_means(
        graph, graph.input("pixels", F32, shape("nchw")), "nchw", F32, output="means"
    )
    twice = graph.node("Concat", [means, means], "twice", axis=1)
    largest = graph.node("ReduceMax", [twice], "largest", axes=[0], keepdims=0)
    limit = graph.weight("limit", np.float32(1e30).reshape(()))
    kept = graph.node("Less", [largest, limit], "kept")
    graph.node("Compress", [twice, kept], "logits", axis=1)
    graph.output("logits", F32, ["N", "classes"])
    graph.save("hidden_classes")


def no_classifiers():
    graph = Graph()
    for name in ["input_ids", "attention_mask"]:
        graph.input(name, I64, ["N", "length"])
    ids = graph.node("Mul", ["input_ids", "attention_mask"], "masked")
    graph.node("Cast", [ids], "logits", to=F32)
    graph.output("logits", F32, ["N", "length"])
    graph.save("text")

    graph = Graph()
    graph.input("pixels", F32, shape("nchw"))
    graph.node("ReduceMean", ["pixels"], "boxes", axes=[3], keepdims=0)
    graph.output("boxes", F32, ["N", 3, HEIGHT])
    graph.save("detector")

    graph = Graph()
    graph.input("pixels", F32, shape("nchw", channels=1))
    graph.node("ReduceMean", ["pixels"], "logits", axes=[2, 3], keepdims=0)
    graph.output("logits", F32, ["N", 1])
    graph.save("gray", labels=LABELS[:1])


VOCABULARY = ["<pad>", "<end>", "red", "green", "blue", "a", "photo", "of", "<other>"]
# What a token adds to the embedding of its text.
TABLE = [[4, 4, 4], [0.5, 0, 0.25], [3, 0, 0], [0, 3, 0], [0, 0, 3], [0.5, 0.5, 0], [0, 0.25, 0.5], [0.25, 0, 0], [1, 1, -1]]


def text_tower(graph, masked, width=3, output="text_embeds"):
    """The sum of what the tokens add; of all of them, where nothing says which fill up."""
    ids = graph.input("input_ids", I64, ["texts", "length"])
    table = np.array(TABLE, np.float32)[:, :width]
    vectors = graph.node("Gather", [graph.weight("table", table), ids], "token_vectors")
    if masked:
        mask = graph.node("Cast", [graph.input("attention_mask", I64, ["texts", "length"])], "mask", to=F32)
        axis = graph.weight("axis", np.array([2], np.int64))
        mask = graph.node("Unsqueeze", [mask, axis], "wide_mask")
        vectors = graph.node("Mul", [vectors, mask], "masked_vectors")
    length = graph.weight("length_axis", np.array([1], np.int64))
    graph.node("ReduceSum", [vectors, length], output, keepdims=0)
    graph.output(output, F32, ["texts", width])
    return output


def image_tower(graph, output="image_embeds"):
    pixels = graph.input("pixel_values", F32, shape("nchw", "images"))
    weighted_means(graph, pixels, "nchw", F32, output=output)
    graph.output(output, F32, ["images", 3])
    return output


def compared(graph, scale, bias):
    """As Optimum exports both towers: what each image is for each text."""
    sides = []
    for name in ["image_embeds", "text_embeds"]:
        length = graph.node("ReduceL2", [name], f"{name}_length", axes=[1], keepdims=1)
        sides.append(graph.node("Div", [name, length], f"{name}_direction"))
    turned = graph.node("Transpose", [sides[1]], "turned", perm=[1, 0])
    cosines = graph.node("MatMul", [sides[0], turned], "cosines")
    scaled = graph.node("Mul", [cosines, graph.weight("scale", np.float32(scale))], "scaled")
    graph.node("Add", [scaled, graph.weight("bias", np.float32(bias))], "logits_per_image")
    graph.output("logits_per_image", F32, ["images", "texts"])


def tokenizer(folder):
    """Words of the vocabulary, in lower case, and an end."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    end = {"SpecialToken": {"id": "<end>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": VOCABULARY[i], **special} for i in (0, 1)],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [text, end],
            "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}, end],
            "special_tokens": {"<end>": {"id": "<end>", "ids": [1], "tokens": ["<end>"]}},
        },
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {word: number for number, word in enumerate(VOCABULARY)},
            "unk_token": "<other>",
        },
    }
    path = HERE / folder
    (path / "tokenizer.json").write_text(json.dumps(content) + "\n")
    settings = {"model_max_length": 8, "pad_token": "<pad>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "use_fast": False,
        "size": {"height": HEIGHT, "width": WIDTH},
        "resample": 2,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }
    (path / "preprocessor_config.json").write_text(json.dumps(processor) + "\n")


def two_towers(folder, kind, width=3):
    """As transformers.js has them: a file for each tower."""
    for name, tower in [("vision_model", image_tower), ("text_model", None)]:
        graph = Graph()
        tower(graph) if tower else text_tower(graph, masked=True, width=width)
        graph.save(folder, file=f"{name}.onnx", config={"model_type": kind})
    tokenizer(folder)


def both_towers(folder, kind, scale, bias, masked):
    graph = Graph()
    text_tower(graph, masked)
    image_tower(graph)
    compared(graph, scale, bias)
    graph.save(folder, config={"model_type": kind})
    tokenizer(folder)


def tokens_of_image():
    """A vector for each row of the image, of which the first one stands for all, as DINOv2 has it."""
    graph = Graph()
    pixels = graph.input("pixel_values", F32, shape("nchw"))
    means = graph.node("ReduceMean", [pixels], "means", axes=[3], keepdims=0)
    graph.node("Transpose", [means], "last_hidden_state", perm=[0, 2, 1])
    graph.output("last_hidden_state", F32, ["N", HEIGHT, 3])
    graph.save("dinov2", config={"model_type": "dinov2"})


two_towers("clip", "clip")
two_towers("narrow_text", "clip", width=2)
both_towers("clip_both", "clip", scale=20.0, bias=0.0, masked=True)
both_towers("siglip_both", "siglip", scale=12.5, bias=-3.0, masked=False)
(HERE / "clip" / "trommel.toml").write_text("[text]\nlogit-scale = 20.0\n")
(HERE / "narrow_text" / "trommel.toml").write_text("[text]\nlogit-scale = 20.0\n")
tokens_of_image()
for layout in ["nchw", "nhwc"]:
    for element, name in [(F32, "f32"), (F16, "f16"), (U8, "u8")]:
        plain(f"{layout}_{name}", layout, element)
plain("fixed4", "nchw", F32, batch=4)
plain("external", "nchw", F32, external=True)
optimum()
poison("poison", "N")
poison("poison_fixed4", 4)
not_finite()
traced_for_one()
scores("softmax", "Softmax", axis=1)
scores("sigmoid", "Sigmoid")
one_logit()
hidden_classes()
no_classifiers()

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

    def save(self, folder, external=False, labels=LABELS):
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
        onnx.save(model, path / "model.onnx", **options)
        config = {"id2label": {str(i): label for i, label in enumerate(labels)}}
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
hidden_classes()
no_classifiers()

"""Writes a model folder with the work of a MobileNet: depthwise and pointwise convolutions, random weights.

Usage: python bench/depthwise.py FOLDER [WIDTH]. Input 3 x 224 x 224, 1,000 classes, some 200 million
multiplications; WIDTH times as many channels take about its square times as many.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Channels, stride and repetitions of the blocks.
BLOCKS = [(32, 1, 1), (64, 2, 2), (128, 2, 2), (256, 2, 3), (512, 2, 1)]


class Graph:
    """Nodes and weights, one layer after the other."""

    def __init__(self):
        self.random, self.nodes, self.weights = np.random.default_rng(7), [], []

    def layer(self, kind, source, shape=None, **settings):
        name = f"{kind.lower()}{len(self.nodes)}"
        inputs = [source]
        if shape:
            scale = np.sqrt(2 / np.prod(shape[1:]))
            weight = (self.random.standard_normal(shape) * scale).astype(np.float32)
            self.weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
            inputs.append(f"{name}.weight")
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **settings))
        return name

    def convolution(self, source, inside, outside, size, stride, groups=1):
        shape = (outside, inside // groups, size, size)
        pads = [size // 2] * 4
        name = self.layer("Conv", source, shape, strides=[stride] * 2, pads=pads, group=groups)
        return self.layer("Relu", name)


def main(folder, width=1):
    graph = Graph()
    inside = 16 * width
    last = graph.convolution("pixel_values", 3, inside, 3, 2)
    for outside, stride, times in ((width * channels, *more) for channels, *more in BLOCKS):
        for number in range(times):
            last = graph.convolution(last, inside, inside, 3, stride if number == 0 else 1, groups=inside)
            last = graph.convolution(last, inside, outside, 1, 1)
            inside = outside
    last = graph.layer("Flatten", graph.layer("GlobalAveragePool", last))
    last = graph.layer("MatMul", last, (inside, 1000))
    graph.nodes.append(helper.make_node("Identity", [last], ["logits"]))
    made = helper.make_graph(
        graph.nodes, "depthwise",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, 224, 224])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 1000])], graph.weights)
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
    labels = {"id2label": {number: f"class {number}" for number in range(1000)}}
    (folder / "config.json").write_text(json.dumps(labels))
    processor = {"do_resize": True, "size": {"height": 224, "width": 224}, "resample": 2, "do_rescale": True,
                 "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                 "image_processor_type": "ViTImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))

"""Peak memory of a worker under a budget, where every row is large: logits of 21,841 classes.

Usage: python bench/memory.py TROMMEL [IMAGES] [BUDGET_MB]. One worker of all roles, a broker of its own, Parquet
parts. Then the same job by `trommel classify`. Needs the onnx package, to make the model.
"""

import json
import pathlib
import subprocess
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/findings"))
from lab import ALL, Lab  # noqa: E402

CLASSES, SIDE = 21_841, 32
HOUR = 3600


def wide_model(folder):
    """A model folder with one matrix: every eighth pixel to all classes."""
    pooled = 3 * (SIDE // 8) ** 2
    weights = np.random.default_rng(7).standard_normal((pooled, CLASSES)).astype(np.float32)
    nodes = [
        helper.make_node("AveragePool", ["pixel_values"], ["pooled"], kernel_shape=[8, 8], strides=[8, 8]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weights"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes, "wide",
        [helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(weights, "weights")])
    folder.mkdir()
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "model.onnx")
    (folder / "config.json").write_text(json.dumps({"id2label": {number: f"class {number}" for number in range(CLASSES)}}))
    processor = {"do_resize": True, "size": {"height": SIDE, "width": SIDE}, "resample": 2, "do_rescale": True,
                 "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
                 "image_processor_type": "ViTImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def peak(pid):
    """The most memory that a process has had, in MB."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) // 1024


def main(trommel, images=100_000, budget=512):
    images, budget = int(images), ("--memory-budget", str(budget))
    with Lab(trommel) as lab:
        for name in ("TENSORS", "RESULTS"):
            lab.env[f"TROMMEL_BROKER__{name}_MAX_BYTES"] = "4000000000"
        lab.env["TROMMEL_SINK__PART_INTERVAL"] = "60s"
        wide_model(lab.models / "wide")
        photos = lab.images(images)

        lab.broker()
        worker = lab.worker(ALL, *budget)
        submitted = lab.run("submit", photos, "--model", "wide", "--logits", "--output", f"{lab.folder}/rows/", "--id", "wide")
        assert submitted.returncode == 0, submitted.stderr
        lab.until("it is complete", lambda: lab.state("wide") in ("complete", "failed"), HOUR)
        shown = lab.show("wide")
        seconds = (shown["finished_at"] - shown["started_at"]) / 1e6
        print(f"worker, {' '.join(budget)}: {shown['state']}, {lab.committed('wide')} rows in {seconds:.0f} s, "
              f"{peak(worker.pid)} MB at most", flush=True)
        worker.terminate()
        worker.wait()

        command = [lab.binary, "classify", photos, "--model", lab.models / "wide", "--logits", *budget, "--quiet",
                   "--output", f"{lab.folder}/alone/", "--json"]
        with subprocess.Popen(command, env=lab.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as classify:
            most = 0
            while classify.poll() is None:
                try:
                    most = max(most, peak(classify.pid))
                    classify.wait(0.5)
                except (subprocess.TimeoutExpired, IndexError, FileNotFoundError):
                    pass
            summary = json.load(classify.stdout)
        print(f"classify, {' '.join(budget)}: {summary['images']} rows, {most} MB at most", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

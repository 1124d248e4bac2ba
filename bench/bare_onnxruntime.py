"""How fast ONNX Runtime alone runs a model from Python, by size of batch.

Usage: python bench/bare_onnxruntime.py MODEL_DIR SECONDS [--device cpu] [--batches 1,2,4,8,16,32]
       (SECONDS for each size of batch)

Prints one JSON object: images/s by size of batch. The input is ready-made: nothing is decoded,
normalised or scored. On `cuda:N` and `tensorrt:N` it lies on the GPU and the output stays there: no
copies, and no CUDA graphs either. TensorRT's engines are kept in MODEL_DIR/bare-engines.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

MIN_RUNS = 3
TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--fp16", action="store_true", help="let TensorRT compute in 16 bits")
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    session = onnxruntime.InferenceSession(args.model / "model.onnx", providers=providers(args))
    check(session, args.device)
    print(json.dumps({batch: rate(runner(session, batch, args.device), batch, args.seconds) for batch in batches}))


def providers(args: argparse.Namespace) -> list:
    kind, _, number = args.device.partition(":")
    if kind == "cpu":
        return ["CPUExecutionProvider"]
    cuda = ("CUDAExecutionProvider", {"device_id": number or "0"})
    if kind == "cuda":
        return [cuda]
    cache = args.model / "bare-engines"
    cache.mkdir(exist_ok=True)
    options = {
        "device_id": number or "0",
        "trt_fp16_enable": args.fp16,
        "trt_engine_cache_enable": True,
        "trt_engine_cache_path": str(cache),
    }
    return [("TensorrtExecutionProvider", options), cuda]


def check(session: onnxruntime.InferenceSession, device: str) -> None:
    """ONNX Runtime for Python continues with the CPU where a provider does not load."""
    wanted = {"cpu": "CPU", "cuda": "CUDA", "tensorrt": "Tensorrt"}[device.partition(":")[0]]
    if not session.get_providers()[0].startswith(wanted):
        raise SystemExit(f"bare_onnxruntime: {device} is not available: {session.get_providers()}")


def runner(session: onnxruntime.InferenceSession, batch: int, device: str) -> Callable[[], object]:
    """Runs one batch of noise."""
    model_input = session.get_inputs()[0]
    shape = [batch, *(side if isinstance(side, int) else 224 for side in model_input.shape[1:])]
    if not isinstance(model_input.shape[1], int):
        shape[1] = 3
    noise = np.random.default_rng(0).standard_normal(shape).astype(TYPES[model_input.type])
    if device == "cpu":
        return lambda: session.run(None, {model_input.name: noise})
    number = int(device.partition(":")[2] or 0)
    binding = session.io_binding()
    binding.bind_ortvalue_input(model_input.name, onnxruntime.OrtValue.ortvalue_from_numpy(noise, "cuda", number))
    binding.bind_output(session.get_outputs()[0].name, "cuda", number)
    return lambda: session.run_with_iobinding(binding)


def rate(run: Callable[[], object], batch: int, seconds: float) -> float:
    run()
    start, runs = time.perf_counter(), 0
    while runs < MIN_RUNS or time.perf_counter() - start < seconds:
        run()
        runs += 1
    return runs * batch / (time.perf_counter() - start)


if __name__ == "__main__":
    main()

"""How long ``fastconv.optimize`` takes where nothing is compiled, and what it spends that on.

    PYTHONPATH=src python tests/gpu/optimize_time.py resnet50
    PYTHONPATH=src python tests/gpu/optimize_time.py resnet50 --mode inference --benchmark

For TF32 in NCHW and for bfloat16 in channels-last (autocast), each in a new process with empty
caches, fastconv's and CUDA's: a line of JSON with the seconds of each task and of the first step
afterwards. Then once more with the cache that this has left. ``--benchmark`` sets
``cudnn.benchmark``, whose trying out is then most of "PyTorch's first calls".
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import fastconv
from fastconv import native
from fastconv.bench import models

TYPES = ("tf32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="torchvision's or timm's name: resnet50, say")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--mode", choices=("training", "inference"), default="training")
    parser.add_argument("--benchmark", action="store_true", help="set cudnn.benchmark")
    parser.add_argument("--type", choices=TYPES, help="in this process, with the cache as it is")
    parser.add_argument("--table", action="store_true", help="print the report, too")
    arguments = parser.parse_args()
    if arguments.type:
        print(json.dumps(measure(arguments)), flush=True)
        return
    for dtype in TYPES:
        # Libraries of the native host path may still be under way into it.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            caches = {
                "FASTCONV_CACHE_DIR": folder, "CUDA_CACHE_PATH": str(Path(folder) / "cuda")
            }  # fmt: skip
            command = [sys.executable, __file__, *sys.argv[1:], "--type", dtype]
            for _ in ("cold", "warm"):
                subprocess.run(command, env={**os.environ, **caches}, check=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = arguments.benchmark
    torch.backends.cudnn.allow_tf32 = True
    training, half = arguments.mode == "training", arguments.type == "bfloat16"
    network, size = models.build(arguments.model)
    format = torch.channels_last if half else torch.contiguous_format
    network = network.train(training).to(device="cuda", memory_format=format)
    images = torch.randn(arguments.batch, *size, device="cuda").to(memory_format=format)
    torch.cuda.synchronize()
    with torch.set_grad_enabled(training), torch.autocast("cuda", torch.bfloat16, enabled=half):
        start = time.perf_counter()
        optimized: Any = fastconv.optimize(network, images, progress=sys.stderr.isatty())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        report = optimized.fastconv_optimization
        steps = [_seconds_of_step(optimized, images, training) for _ in range(3)]
    under_way = native.under_way()
    start = time.perf_counter()
    native.settle()
    if arguments.table:
        print(report, file=sys.stderr)
    return {
        **vars(arguments),
        "optimize_s": round(seconds, 2),
        "tasks_s": {name: round(took, 2) for name, took in report.task_seconds.items()},
        "rest_s": round(seconds - sum(report.task_seconds.values()), 2),
        "steps_s": [round(step, 3) for step in steps],
        "native_under_way": under_way,
        "native_more_s": round(time.perf_counter() - start, 2),
        "distinct": len(report.layers),
        "measured": report.measured,
        "exchanged": len(report.exchanged),
        "before_ms": report.before_ms,
        "after_ms": report.after_ms,
        "notes": report.notes,
        "processors": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(),
    }


def _seconds_of_step(network: Any, images: torch.Tensor, training: bool) -> float:
    start = time.perf_counter()
    outputs = tree_leaves(network(images))
    if training:
        sum(output.float().square().mean() for output in outputs).backward()
        network.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

"""How long a network's first training step takes, in new processes; a line of JSON for each.

    PYTHONPATH=src python tests/gpu/cold_start.py resnet50 --batch 64
    PYTHONPATH=src python tests/gpu/cold_start.py convnext_tiny --type bfloat16 --channels-last

The processes run PyTorch's convolutions with ``cudnn.benchmark``; fastconv's with an empty cache;
fastconv's with an empty cache after ``prepare``, whose time counts as part of the step; and
fastconv's with the cache that the second process wrote. ``first_s`` is the time from a network on
the GPU to the end of its first step, and ``more_s`` is how much longer that is than a later step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import fastconv
from fastconv.bench import models
from fastconv.bench.host import with_fastconv

WAYS = ("pytorch", "cold", "prepared", "warm")
LATER_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="torchvision's or timm's name: deeplabv3_resnet50, say")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--type", choices=("tf32", "ieee", "bfloat16"), default="tf32")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--way", choices=WAYS, help="in this process, with the cache as it is")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments)), flush=True)
        return
    # A background build of the native host path may still write into the folder.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for way in WAYS:
            cache = Path(folder) / ("cold" if way == "warm" else way)
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            # CUDA's driver keeps a cache of its own, which would make a later process faster.
            caches = {"FASTCONV_CACHE_DIR": str(cache), "CUDA_CACHE_PATH": str(cache / "cuda")}
            subprocess.run(command, env={**os.environ, **caches}, check=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = arguments.type == "tf32"
    network, size = models.build(arguments.model)
    if arguments.way != "pytorch":
        network = with_fastconv(network)
    format = torch.channels_last if arguments.channels_last else torch.contiguous_format
    network = network.train().to(device="cuda", memory_format=format)
    images = torch.randn(arguments.batch, *size, device="cuda").to(memory_format=format)
    half = arguments.type == "bfloat16"

    def forward(images: torch.Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            return network(images)

    def seconds_of_step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        sum(output.float().square().mean() for output in tree_leaves(forward(images))).backward()
        network.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    start = time.perf_counter()
    if arguments.way == "prepared":
        with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
            fastconv.prepare(network, images)
    prepared = time.perf_counter() - start
    first = prepared + seconds_of_step()
    second = seconds_of_step()
    later = statistics.median(seconds_of_step() for _ in range(LATER_STEPS))
    return {
        **vars(arguments), "first_s": round(first, 3), "second_s": round(second, 3),
        "later_s": round(later, 4), "more_s": round(first - later, 3),
        "prepare_s": round(prepared, 3), "processors": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name(),
    }  # fmt: skip


if __name__ == "__main__":
    main()

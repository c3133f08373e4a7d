"""``fastconv build``: compiles the native host path's library ahead of its first use."""

from __future__ import annotations

import json
import time
from argparse import Namespace

from fastconv import native
from fastconv.bench.console import stopwatch


def run(arguments: Namespace) -> int:
    """Compiles the library unless it exists, and prints where it is."""
    start = time.perf_counter()
    with stopwatch(arguments.quiet) as show:
        path, made = native.make(arguments.again, show)
    seconds = round(time.perf_counter() - start, 1)
    if arguments.json:
        print(json.dumps({"library": str(path), "built": made, "seconds": seconds}))
    else:
        existing = f"{path} exists already; --again compiles it again"
        print(f"built {path} in {seconds} s" if made else existing)
    return 0

"""``fastconv build``: compiles fastconv's libraries ahead of their first use."""

from __future__ import annotations

import json
import shutil
import time
from argparse import Namespace
from pathlib import Path

from fastconv import files, native
from fastconv.bench.console import stopwatch

_DEPLOYED_NAME = "libfastconv.so"


def run(arguments: Namespace) -> int:
    """Compiles a library unless it exists, and prints where it is.

    That is the native host path, or with ``--deploy`` the library for programs without Python,
    which is copied to the folder that the option names.
    """
    if arguments.deploy is not None:
        files.make_folder(arguments.deploy)
    make = native.make if arguments.deploy is None else native.make_deployed
    start = time.perf_counter()
    with stopwatch(arguments.quiet) as show:
        path, made = make(arguments.again, show)
    seconds = round(time.perf_counter() - start, 1)
    given = path if arguments.deploy is None else _copy(path, arguments.deploy)
    if arguments.json:
        print(json.dumps({"library": str(given), "built": made, "seconds": seconds}))
        return 0
    existing = f"{path} exists already; --again compiles it again"
    print(f"built {path} in {seconds} s" if made else existing)
    if given != path:
        print(f"copied it to {given}, with {native.HEADER.name}")
    return 0


def _copy(library: Path, folder: Path) -> Path:
    """Copies the library and its header to a folder; returns the library's path there."""
    target = folder / _DEPLOYED_NAME
    for source, path in ((library, target), (native.HEADER, folder / native.HEADER.name)):
        files.write(path, source.read_bytes())
    shutil.copymode(library, target)
    return target

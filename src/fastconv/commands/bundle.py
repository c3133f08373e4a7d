"""``fastconv bundle``: writes what a package's calls on GPUs need where there is no Python."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from fastconv.commands.common import UsageError
from fastconv.exporter import bundle


def run(arguments: Namespace) -> int:
    """Bundles the package for the examples and GPUs that the arguments name."""
    examples = [_example(path) for path in arguments.inputs]
    path = bundle(arguments.package, *examples, output=arguments.output, gpus=arguments.gpu)
    print(f"wrote {path}, {path.stat().st_size} bytes")
    return 0


def _example(path: Path) -> Any:
    """A tensor or a tuple of arguments, as ``torch.save`` has written it."""
    try:
        value = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(value)
    raise UsageError(
        f"{path} should hold a tensor or a tuple of arguments, but has a {type(value).__name__}"
    )

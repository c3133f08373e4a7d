"""What several subcommands share: selecting test cases and a device, and printing."""

from __future__ import annotations

import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from _fastconv_command.choices import CPU_DIVISOR
from fastconv.bench import models
from fastconv.bench.cases import PASSES, Case, cases
from fastconv.workloads import SUITES, Workload, parse_shape, suite, unique

# Operations of a pass of every case, above which a CPU works for a minute or more.
LONG_FLOPS = 1e12


class UsageError(ValueError):
    """The arguments cannot be honoured; the message says why."""


def select_cases(arguments: Namespace, device: torch.device) -> list[Case]:
    """The test cases that the arguments select, by default those of the suite "founding"."""
    given = [*map(parse_shape, arguments.shape or ()), *_model_layers(arguments)]
    suites = arguments.suite or ([] if given else ["founding"])
    selected = unique([*given, *(workload for name in suites for workload in suite(name))])
    # Without --divisor, suites are scaled down on a CPU; given shapes and models never are.
    divisor = _divisor(arguments, device)
    as_given = () if arguments.divisor else given
    workloads = [one if one in as_given else one.scaled(divisor) for one in selected]
    return cases(
        workloads,
        arguments.passes or PASSES,
        arguments.dtype or ("float32",),
        arguments.precision or ("ieee",),
        arguments.format or ("nchw",),
    )


def _divisor(arguments: Namespace, device: torch.device) -> int:
    """What the heights, widths and lengths of suites are divided by."""
    divisor: int | None = arguments.divisor
    return divisor or (1 if device.type == "cuda" else CPU_DIVISOR)


def memory_advice(arguments: Namespace, device: torch.device) -> str:
    """What to do about a case that the arguments select and that does not fit into memory."""
    has_suites = arguments.suite or not (arguments.shape or arguments.model)
    divisor = _divisor(arguments, device) if has_suites else arguments.divisor or 1
    batch = f"--batch below {arguments.batch or models.BATCH}, or " if arguments.model else ""
    return f"{batch}--divisor {2 * divisor} may fit"


def advise(arguments: Namespace, selected: Sequence[Case], device: torch.device) -> None:
    """Suggests ``--divisor`` on a CPU if the selected cases would take minutes at their size."""
    flops = sum(case.workload.problem.flops for case in selected)
    if device.type == "cpu" and arguments.divisor is None and flops > LONG_FLOPS:
        say(
            arguments,
            f"{flops:.1g} operations take long on a CPU: --divisor {2 * CPU_DIVISOR} divides "
            "heights, widths and lengths",
        )


def _model_layers(arguments: Namespace) -> list[Workload]:
    """The convolutions of the models that the arguments name."""
    for option in ("batch", "image"):
        if getattr(arguments, option) and not arguments.model:
            raise UsageError(f"--{option} applies to a --model, and none is given")
    batch, side = arguments.batch or models.BATCH, arguments.image
    return [one for name in arguments.model or () for one in models.workloads(name, batch, side)]


def select_device(name: str | None) -> torch.device:
    """The named device; without a name a GPU if there is one, else the CPU.

    Raises:
        UsageError: this machine has no such device.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        raise UsageError(f"no device {name!r}: it should be cpu, cuda or cuda:N")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"no device {name!r} here: {str(error).splitlines()[0]}") from error
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def suite_files(arguments: Namespace) -> list[Path]:
    """The files among the suites that the arguments name."""
    return [Path(name) for name in arguments.suite or () if name not in SUITES]


def say(arguments: Namespace, text: str) -> None:
    """Prints a line of progress to stderr, unless ``--quiet`` is given."""
    if not arguments.quiet:
        print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """Prints a value as JSON to stdout."""
    print(json.dumps(value, indent=1))

"""``fastconv info``: describes the machine, and the kernels that given shapes would run."""

from __future__ import annotations

from argparse import Namespace

from fastconv.bench import info
from fastconv.commands import common
from fastconv.commands.common import UsageError, print_json
from fastconv.kernels import gpus
from fastconv.kernels.family import Gpu


def run(arguments: Namespace) -> int:
    """Prints the description; exit status 1 if one of the shapes cannot be planned."""
    device = common.select_device(arguments.device)
    gpu = _gpu(arguments)
    cases = common.select_cases(arguments, device) if arguments.shape else []
    found = info.gather(device, cases, arguments.explain, gpu)
    if arguments.json:
        print_json(found)
    else:
        print("\n".join(info.lines(found)))
    return 1 if any(case["error"] for case in found["cases"]) else 0


def _gpu(arguments: Namespace) -> Gpu | None:
    """The GPU that ``--gpu`` names, if it is given.

    Raises:
        UsageError: there is no such GPU, or an option is given that needs a shape, and no shape.
    """
    for option in ("gpu", "explain"):
        if getattr(arguments, option) and not arguments.shape:
            raise UsageError(
                f"--{option} needs a --shape to plan, for example "
                '--shape "8x64x56x56 64x64x3x3 padding=1"'
            )
    if arguments.gpu is None:
        return None
    try:
        return gpus.named(arguments.gpu)
    except ValueError as error:
        raise UsageError(f"--gpu: {error}") from None

"""``fastconv info``: describes the machine, and the kernels that given shapes would run."""

from __future__ import annotations

from argparse import Namespace

from fastconv.bench import info
from fastconv.commands import common
from fastconv.commands.common import print_json


def run(arguments: Namespace) -> int:
    """Prints the description; exit status 1 if one of the shapes cannot be planned."""
    device = common.select_device(arguments.device)
    cases = common.select_cases(arguments, device) if arguments.shape else []
    found = info.gather(device, cases, arguments.explain, arguments.gpu)
    if arguments.json:
        print_json(found)
    else:
        print("\n".join(info.lines(found)))
    return 1 if any(case["error"] for case in found["cases"]) else 0

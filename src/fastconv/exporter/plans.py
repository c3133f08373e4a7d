"""The plans that an exported file holds, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

import torch

from fastconv.backends.cuda import operands_of
from fastconv.exporter import DTYPES, ExportError
from fastconv.kernels import planner
from fastconv.kernels.family import Argument, Constant, Launch, Operands, Plan
from fastconv.kernels.gpus import H200
from fastconv.problem import Problem

# The tensors that plans may use. Files have them all but the weight gradient's "bias_grad", which
# they compute by a kernel of its own: a tensor that is absent is a null pointer.
_CORRELATION = {"input", "weight", "bias", "output", "scratch"}
_PLANNERS = {
    "forward": (planner.forward, _CORRELATION),
    "input_grad": (planner.input_grad, _CORRELATION),
    "weight_grad": (
        planner.weight_grad,
        {"grad_output", "input", "output", "bias_grad", "scratch"},
    ),
}


def tuned(
    problems: Sequence[Problem], dtypes: Sequence[str]
) -> Iterator[tuple[str, Problem, str, str, Plan]]:
    """What is computed, of which problem, in which type and precision, and the plan for it."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ExportError(f"dtype should be one of {', '.join(DTYPES)}, but got {dtype!r}")
    for problem in problems:
        for dtype in dtypes:
            for precision in ("tf32", "ieee") if dtype == "float32" else ("ieee",):
                operands = _operands(problem, dtype, precision)
                for which in _PLANNERS:
                    plan = _plan(which, problem, operands)
                    yield which, problem, operands.scalar, precision, plan


def _operands(problem: Problem, dtype: str, precision: str) -> Operands:
    """Contiguous tensors."""
    _, group_in, height, width = problem.weight_shape
    strides = (group_in * height * width, height * width, width, 1)
    return operands_of(getattr(torch, dtype), False, False, strides, True, precision)


def _plan(which: str, problem: Problem, operands: Operands) -> Plan:
    plan_pass, tensors = _PLANNERS[which]
    # Right on Hopper GPUs with fewer processors as well: blocks do not wait for one another. And
    # without this process's switch: the file outlives it.
    plan = plan_pass(problem, operands, H200, planner.EVERY)
    used = {name for launch in plan.launches for name in launch.tensors}
    if unknown := used - tensors:
        raise ExportError(f"plans for {which} use tensors that files have not: {sorted(unknown)}")
    return plan


def sources(plans: Sequence[Plan]) -> list[str]:
    """The device code that plans need, in the order of its first use."""
    return list(dict.fromkeys(launch.kernel.source for plan in plans for launch in plan.launches))


def text(problems: Sequence[Problem], dtypes: Sequence[str]) -> tuple[str, list[Plan]]:
    """The plans as Python that fills a dictionary TUNED, and the plans themselves."""
    names = {
        problem: "EXPORTED" if len(problems) == 1 else f"EXPORTED_{number}"
        for number, problem in enumerate(problems)
    }
    parts = ["\n".join(_geometry(name, problem) for problem, name in names.items())]
    parts.append("TUNED = {}")
    plans = []
    for which, problem, scalar, precision, plan in tuned(problems, dtypes):
        parts.append(_assignment(which, names[problem], scalar, precision, plan))
        plans.append(plan)
    return "\n\n".join(parts) + "\n", plans


def _geometry(name: str, problem: Problem) -> str:
    padding = (problem.padding.top, problem.padding.left)
    return (
        f"{name} = Geometry(\n"
        f"    input={problem.input_shape},\n"
        f"    weight={problem.weight_shape},\n"
        f"    stride={problem.stride},\n"
        f"    padding={padding},\n"
        f"    dilation={problem.dilation},\n"
        f"    groups={problem.groups},\n"
        ")"
    )


def _assignment(which: str, geometry: str, scalar: str, precision: str, plan: Plan) -> str:
    prefix = "_".join([which, geometry.removeprefix("EXPORTED"), scalar.split(":")[-1], precision])
    prefix = prefix.replace("__", "_").upper()
    configurations = dict.fromkeys(launch.kernel.constants for launch in plan.launches)
    names = {
        constants: prefix if len(configurations) == 1 else f"{prefix}_{number}"
        for number, constants in enumerate(configurations)
    }
    definitions = [_constants(name, constants) for constants, name in names.items()]
    launches = "".join(_launch(launch, names[launch.kernel.constants]) for launch in plan.launches)
    return (
        "\n".join(definitions)
        + f'\nTUNED["{which}", {geometry}, "{scalar}", "{precision}"] = Plan(\n'
        + f"    launches=(\n{launches}    ),\n"
        + f"    scratch_bytes={plan.scratch_bytes},\n)"
    )


def _constants(name: str, constants: tuple[tuple[str, Constant], ...]) -> str:
    pairs = ", ".join(f"{key}={_quoted(value)}" for key, value in constants) + ","
    body = textwrap.fill(
        pairs, 96, initial_indent=" " * 8, subsequent_indent=" " * 8, break_long_words=False
    )
    return f"{name} = tuple(\n    dict(\n{body}\n    ).items()\n)"


def _launch(launch: Launch, constants: str) -> str:
    blocks, *others = launch.grid
    if others != [1, 1]:
        raise ExportError(f"files launch grids of one dimension, but got {launch.grid}")
    arguments = ", ".join(_argument(argument) for argument in launch.arguments)
    return (
        "        Launch(\n"
        f'            "{launch.kernel.source}", "{launch.kernel.entry}", {constants},\n'
        f"            grid={blocks}, block={launch.block}, shared_bytes={launch.shared_bytes},\n"
        f"            arguments=({arguments}),\n        ),\n"
    )


def _argument(argument: Argument) -> str:
    if not isinstance(argument, str | int):
        raise ExportError(
            f"files launch no kernels with tensor maps, such as that of {argument.tensor}"
        )
    return _quoted(argument)


def _quoted(value: Constant) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

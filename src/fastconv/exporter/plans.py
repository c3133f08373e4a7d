"""The plans that an exported file holds, as text."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from fastconv.backends.cuda import operands_of
from fastconv.exporter.common import DTYPES, ExportError
from fastconv.kernels import planner
from fastconv.kernels.family import AnyMap, Argument, Constant, Gpu, Launch, Operands, Plan
from fastconv.kernels.gpus import GPUS
from fastconv.problem import Problem

# The GPUs that plans are made for. Those of sm_80 and sm_86 serve all other GPUs since, by their
# shared memory.
TARGETS = ("sm_90a", "sm_80", "sm_86")

Constants = tuple[tuple[str, Constant], ...]

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
_WORKERS = 5  # where a weight gradient's kernels, both of them, have the number of its workers


class Tuned(NamedTuple):
    """A plan: for which GPU, what is computed, of which problem, in which type and precision."""

    target: str
    which: str
    problem: Problem
    scalar: str
    precision: str
    plan: Plan


def tuned(problems: Sequence[Problem], dtypes: Sequence[str]) -> Iterator[Tuned]:
    """All plans of a file."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ExportError(f"dtype should be one of {', '.join(DTYPES)}, but got {dtype!r}")
    for problem in problems:
        for dtype in dtypes:
            for precision in ("tf32", "ieee") if dtype == "float32" else ("ieee",):
                operands = _operands(problem, dtype, precision)
                for which, target in product(_PLANNERS, TARGETS):
                    plan = _plan(which, problem, operands, target)
                    if plan is not None:
                        yield Tuned(target, which, problem, operands.scalar, precision, plan)


def _operands(problem: Problem, dtype: str, precision: str) -> Operands:
    """Contiguous tensors."""
    _, group_in, height, width = problem.weight_shape
    strides = (group_in * height * width, height * width, width, 1)
    return operands_of(getattr(torch, dtype), False, False, strides, True, precision)


def _plan(which: str, problem: Problem, operands: Operands, target: str) -> Plan | None:
    """The package's; None where the file plans the portable kernels."""
    plan_pass, tensors = _PLANNERS[which]
    # Right on GPUs with fewer processors as well: blocks do not wait for one another. And without
    # this process's switch: the file outlives it.
    plan = plan_pass(problem, operands, GPUS[target], planner.EVERY)
    if plan.family == "direct" and target != "sm_90a":
        return None
    used = {name for launch in plan.launches for name in launch.tensors}
    if unknown := used - tensors:
        raise ExportError(f"plans for {which} use tensors that files have not: {sorted(unknown)}")
    return plan


def sources(plans: Sequence[Plan]) -> list[str]:
    """The device code that plans need, in the order of its first use."""
    return list(dict.fromkeys(launch.kernel.source for plan in plans for launch in plan.launches))


def text(problems: Sequence[Problem], dtypes: Sequence[str]) -> tuple[str, list[Plan]]:
    """The plans as Python that fills a dictionary TUNED, and the plans themselves."""
    geometries = {
        problem: "EXPORTED" if len(problems) == 1 else f"EXPORTED_{number}"
        for number, problem in enumerate(problems)
    }
    parts = ["\n".join(_geometry(name, problem) for problem, name in geometries.items())]
    parts += [_targets(), "TUNED = {}"]
    names: defaultdict[Problem, dict[Constants, str]] = defaultdict(dict)
    plans = []
    for one in tuned(problems, dtypes):
        parts.append(_assignment(one, geometries[one.problem], names[one.problem]))
        plans.append(one.plan)
    return "\n\n".join(parts) + "\n", plans


def _targets() -> str:
    lines = (
        f'    "{name}": Target(processors={GPUS[name].processors}, '
        f"shared_bytes={GPUS[name].shared_bytes_per_block}),\n"
        for name in TARGETS
    )
    return f"TARGETS = {{\n{''.join(lines)}}}"


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


def _assignment(one: Tuned, geometry: str, names: dict[Constants, str]) -> str:
    """A plan, as a function of what share of the blocks that it has a GPU has room for.

    Before it come constants that are not among ``names``, and are then.
    """
    target, which, _, scalar, precision, plan = one
    suffix = geometry.removeprefix("EXPORTED")
    prefix = "_".join([target, which, suffix, scalar.split(":")[-1], precision])
    prefix = prefix.replace("__", "_").upper()
    definitions = []
    for number, constants in enumerate(dict.fromkeys(_all_constants(plan))):
        if constants not in names:
            name = f"{prefix}_{number}"
            definitions.append(_constants(name, constants, names) + "\n")
            names[constants] = name
    launches = "".join(
        _launch(launch, names[launch.kernel.constants], GPUS[target]) for launch in plan.launches
    )
    return (
        "".join(definitions)
        + f'TUNED["{target}", "{which}", {geometry}, "{scalar}", "{precision}"] = '
        + f"lambda share: Plan(\n    launches=(\n{launches}    ),\n"
        + f"    scratch_bytes={_scratch_bytes(plan)},\n)"
    )


def _all_constants(plan: Plan) -> Iterator[Constants]:
    return (launch.kernel.constants for launch in plan.launches)


def _constants(name: str, constants: Constants, others: dict[Constants, str]) -> str:
    """In full, or by how they differ from those of ``others`` that are most like them."""
    alike = (other for other in others if [*dict(other)] == [*dict(constants)])
    like = max(alike, key=lambda other: len({*other} & {*constants}), default=())
    words = [others[like]] if like else []
    words += [f"{key}={_quoted(value)}" for key, value in constants if (key, value) not in like]
    return f"{name} = config(\n{_filled(words, 4)}\n)"


def _filled(words: list[str], indent: int) -> str:
    """Arguments in lines of at most 96 characters."""
    return textwrap.fill(
        ", ".join(words) + ",",
        96,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _launch(launch: Launch, constants: str, gpu: Gpu) -> str:
    if launch.grid[1:] != (1, 1):
        raise ExportError(f"files launch grids of one dimension, but got {launch.grid}")
    arguments = [_argument(argument) for argument in launch.arguments]
    early = " early=True," if launch.early else ""
    workers = _workers(launch)
    if workers is not None:
        arguments[_WORKERS] = _share(workers)
    return (
        "        Launch(\n"
        f'            "{launch.kernel.source}", "{launch.kernel.entry}", {constants},\n'
        f"            grid={_grid(launch, gpu)}, block={launch.block}, "
        f"shared_bytes={launch.shared_bytes},{early}\n"
        f"            arguments=({_separated(arguments)}),\n        ),\n"
    )


def _separated(arguments: Sequence[str]) -> str:
    """In a line, or each in one of its own where a map takes several."""
    if not any("\n" in argument for argument in arguments):
        return ", ".join(arguments)
    return "".join(f"\n{' ' * 16}{argument}," for argument in arguments) + f"\n{' ' * 12}"


def _grid(launch: Launch, gpu: Gpu) -> str:
    """Blocks, or, where they go by the number of processors, the share of them."""
    kernel, blocks = launch.kernel, launch.grid[0]
    if (kernel.source, kernel.entry) == ("ampere/correlate.cuh", "correlate"):
        # They walk over tiles: any number will do, also where there were as many tiles by chance.
        return _share(blocks) if blocks % gpu.processors == 0 else str(blocks)
    workers = _workers(launch)
    if workers is not None and kernel.entry == "weight_grad":
        return f"{blocks // workers} * {_share(workers)}"
    return str(blocks)


def _scratch_bytes(plan: Plan) -> str:
    """Workers have equal parts of it."""
    workers = _workers(plan.launches[0])
    if workers is None:
        return str(plan.scratch_bytes)
    return f"{plan.scratch_bytes // workers} * {_share(workers)}"


def _workers(launch: Launch) -> int | None:
    """How many share a weight gradient's pixels, where that may be another number."""
    if launch.kernel.source != "ampere/weight_grad.cuh":
        return None
    workers = launch.arguments[_WORKERS]
    assert isinstance(workers, int)
    return workers


def _share(blocks: int) -> str:
    return f"share({blocks})"


def _argument(argument: Argument) -> str:
    return _quoted(argument) if isinstance(argument, str | int) else _map(argument)


def _map(of: AnyMap) -> str:
    """With all of its fields, of which the file's own class has the same ones."""
    fields = [f"{name}={_quoted(value)}" for name, value in vars(of).items()]
    return f"{type(of).__name__}(\n{_filled(fields, 20)}\n{' ' * 16})"


def _quoted(value: Constant | tuple[int, ...]) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

"""Makes the tuned plans of an exported file, and writes them as Python."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch

from fastconv._precision import Precision
from fastconv.backends.cuda import Seen, operands_of, seen_by_kernels
from fastconv.errors import ExportError
from fastconv.exporter.common import DTYPES
from fastconv.kernels import planner
from fastconv.kernels.family import AnyMap, Argument, Constant, Gpu, Launch, Operands, Plan
from fastconv.kernels.gpus import GPUS
from fastconv.problem import Problem

# The GPUs that plans are made for. The plans of sm_80 and sm_86 also run on all newer GPUs with
# enough shared memory.
TARGETS = ("sm_90a", "sm_80", "sm_86")

Constants = tuple[tuple[str, Constant], ...]

# The tensors that plans may use. Exported files pass all of them but the weight gradient's
# "bias_grad", for which they launch a separate kernel: an absent tensor is a null pointer.
_CONVOLUTION_TENSORS = {
    "input", "weight", "bias", "output", "scratch", "input_copy", "output_copy"
}  # fmt: skip
_PLANNERS = {
    "forward": (planner.forward, _CONVOLUTION_TENSORS),
    "input_grad": (planner.input_grad, _CONVOLUTION_TENSORS),
    "weight_grad": (
        planner.weight_grad,
        {
            "grad_output", "input", "output", "bias_grad", "scratch",
            "grad_output_copy", "input_copy",
        },
    ),
}  # fmt: skip
# The number of splits is this argument of both kernels of Ampere's weight gradient (split-K).
_SPLITS_ARGUMENT = 5


class Tuned(NamedTuple):
    """A plan, and what it is for: the GPU, the pass, the problem, the type and the precision."""

    target: str
    which: str
    problem: Problem
    scalar: str
    precision: str
    plan: Plan


def tuned(
    problems: Sequence[Problem], dtypes: Sequence[str], only: Precision | None = None
) -> Iterator[Tuned]:
    """All tuned plans of a file; ``only`` is the one arithmetic of float32 that it has."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise ExportError(f"dtype should be one of {', '.join(DTYPES)}, but got {dtype!r}")
    for problem in problems:
        seen = {which: _seen(problem, which) for which in _PLANNERS}
        for dtype in dtypes:
            for precision in _precisions(dtype, only):
                for which, target in product(_PLANNERS, TARGETS):
                    operands = _operands(seen[which], dtype, precision)
                    plan = _plan(which, seen[which].problem, operands, target)
                    if plan is not None:
                        yield Tuned(target, which, problem, operands.scalar, precision, plan)


def _precisions(dtype: str, only: Precision | None) -> tuple[Precision, ...]:
    if dtype != "float32":
        return ("ieee",)
    return ("tf32", "ieee") if only is None else (only,)


def _seen(problem: Problem, which: str) -> Seen:
    """A problem and its tensors, as a pass's kernels see them: contiguous, as tuned plans are.

    Volumes that are images through other strides are planned as these: kernels take addresses.
    """
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    input, weight, output = (torch.empty(shape, device="meta") for shape in shapes)
    return seen_by_kernels(problem, input, weight, output, transposed=which == "input_grad")


def _operands(seen: Seen, dtype: str, precision: str) -> Operands:
    strides = seen.weight.stride()
    return operands_of(getattr(torch, dtype), False, False, strides, True, precision)


def _plan(which: str, problem: Problem, operands: Operands, target: str) -> Plan | None:
    """The package's plan; None if the file's plan for the portable kernels serves as well."""
    plan_pass, tensors = _PLANNERS[which]
    # The plan is right on GPUs with fewer SMs as well, since blocks do not wait for one another.
    # EVERY family is considered, whatever FASTCONV_FAMILY selects in this process.
    plan = plan_pass(problem, operands, GPUS[target], planner.EVERY)
    # Of a file's plan for the portable kernels, seven warps of eight have no pixels in one row.
    several_rows = max(problem.input_size[0], problem.output_size[0]) > 1
    if plan.family == "direct" and target != "sm_90a" and several_rows:
        return None
    used = {name for launch in plan.launches for name in launch.tensors}
    if unknown := used - tensors:
        raise ExportError(f"plans for {which} use tensors that files lack: {sorted(unknown)}")
    return plan


def sources(plans: Sequence[Plan]) -> list[str]:
    """The device sources of some plans, in the order of their first use."""
    return list(dict.fromkeys(launch.kernel.source for plan in plans for launch in plan.launches))


def text(
    problems: Sequence[Problem], dtypes: Sequence[str], precision: Precision | None = None
) -> tuple[str, list[Plan]]:
    """Python that fills the dictionary TUNED with all plans, and the plans themselves."""
    geometries = {
        problem: "EXPORTED" if len(problems) == 1 else f"EXPORTED_{number}"
        for number, problem in enumerate(problems)
    }
    parts = ["\n".join(_geometry(name, problem) for problem, name in geometries.items())]
    parts += [_targets(), "TUNED = {}"]
    names: defaultdict[Problem, dict[Constants, str]] = defaultdict(dict)
    plans = []
    for one in tuned(problems, dtypes, precision):
        parts.append(_assignment(one, geometries[one.problem], names[one.problem]))
        plans.append(one.plan)
    return "\n\n".join(parts) + "\n", plans


def _targets() -> str:
    lines = (
        f'    "{name}": Target(sms={GPUS[name].sm_count}, '
        f"shared_bytes={GPUS[name].shared_bytes_per_block}),\n"
        for name in TARGETS
    )
    return f"TARGETS = {{\n{''.join(lines)}}}"


def _geometry(name: str, problem: Problem) -> str:
    stride, sides, dilation, groups = problem.geometry
    return (
        f"{name} = Geometry(\n"
        f"    input={problem.input_shape},\n"
        f"    weight={problem.weight_shape},\n"
        f"    stride={stride},\n"
        f"    padding={sides[::2]},\n"
        f"    dilation={dilation},\n"
        f"    groups={groups},\n"
        ")"
    )


def _assignment(one: Tuned, geometry: str, names: dict[Constants, str]) -> str:
    """A plan as Python: a function of ``share``, which scales a number of blocks to another GPU.

    Definitions of constants that ``names`` does not have precede it, and are added to ``names``.
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
        + f"    scratch_bytes={_scratch_bytes(plan)},\n{_regions(plan)})"
    )


def _all_constants(plan: Plan) -> Iterator[Constants]:
    return (launch.kernel.constants for launch in plan.launches)


def _constants(name: str, constants: Constants, others: dict[Constants, str]) -> str:
    """The definition of constants, by their differences from the most similar of ``others``."""
    alike = (other for other in others if [*dict(other)] == [*dict(constants)])
    like = max(alike, key=lambda other: len({*other} & {*constants}), default=())
    words = [others[like]] if like else []
    words += [f"{key}={_quoted(value)}" for key, value in constants if (key, value) not in like]
    return f"{name} = config(\n{_filled(words, 4)}\n)"


def _filled(words: list[str], indent: int) -> str:
    """Arguments, in lines of at most 96 characters."""
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
    splits = _splits(launch)
    if splits is not None:
        arguments[_SPLITS_ARGUMENT] = _share(splits)
    return (
        "        Launch(\n"
        f'            "{launch.kernel.source}", "{launch.kernel.entry}", {constants},\n'
        f"            grid={_grid(launch, gpu)}, block={launch.block}, "
        f"shared_bytes={launch.shared_bytes},{early}\n"
        f"            arguments=({_separated(arguments)}),\n        ),\n"
    )


def _separated(arguments: Sequence[str]) -> str:
    """Arguments in one line or, if one is a tensor map of several lines, each in its own."""
    if not any("\n" in argument for argument in arguments):
        return ", ".join(arguments)
    return "".join(f"\n{' ' * 16}{argument}," for argument in arguments) + f"\n{' ' * 12}"


def _grid(launch: Launch, gpu: Gpu) -> str:
    """The grid as Python: a number, or a share of it where it depends on the number of SMs."""
    kernel, blocks = launch.kernel, launch.grid[0]
    if (kernel.source, kernel.entry) == ("ampere/halo/kernel.cuh", "convolve"):
        # The blocks are persistent, so that any number is right. A multiple of the SMs may also be
        # the number of tiles by chance, which does no harm.
        return _share(blocks) if blocks % gpu.sm_count == 0 else str(blocks)
    splits = _splits(launch)
    if splits is not None and kernel.entry == "weight_grad":
        return f"{blocks // splits} * {_share(splits)}"
    return str(blocks)


def _scratch_bytes(plan: Plan) -> str:
    """The size of the workspace as Python; splits have equal parts of it."""
    splits = _splits(plan.launches[0])
    if splits is None:
        return str(plan.scratch_bytes)
    return f"{plan.scratch_bytes // splits} * {_share(splits)}"


def _regions(plan: Plan) -> str:
    """Where the regions of the workspace begin, as Python; nothing if there are none."""
    begin = {region.name: region.offset for region in plan.regions}
    return f"    regions={begin},\n".replace("'", '"') if begin else ""


def _splits(launch: Launch) -> int | None:
    """The splits (split-K) of a weight gradient, if their number is free; else None."""
    if launch.kernel.source != "ampere/wgrad_halo/kernel.cuh":
        return None
    splits = launch.arguments[_SPLITS_ARGUMENT]
    assert isinstance(splits, int)
    return splits


def _share(blocks: int) -> str:
    return f"share({blocks})"


def _argument(argument: Argument) -> str:
    return _quoted(argument) if isinstance(argument, str | int) else _map(argument)


def _map(of: AnyMap) -> str:
    """A tensor map as Python; the class in the file has the same fields."""
    fields = [f"{name}={_quoted(value)}" for name, value in vars(of).items()]
    return f"{type(of).__name__}(\n{_filled(fields, 20)}\n{' ' * 16})"


def _quoted(value: Constant | tuple[int, ...]) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)

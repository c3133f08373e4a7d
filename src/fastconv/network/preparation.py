"""``prepare``, ``preparing``: a network's kernels, compiled side by side before its first step."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastconv import tables
from fastconv.backends import cuda, left_statistics
from fastconv.backends.batchnorm import launches
from fastconv.jit import loading
from fastconv.kernels.family import ALIGNMENT, Kernel, Plan
from fastconv.network.dry_run import (
    DryRun,
    NeedsData,
    call_without_data,
    calling_frame,
    tensors_of,
)
from fastconv.ops import batchnorm_schema, devices, gradients, hooks
from fastconv.ops.schema import OPERATORS, Operator, backward
from fastconv.problem import Epilogue, Problem

_GPU = "cuda"  # the type of devices that kernels are compiled for


class PreparedPass(NamedTuple):
    """A pass that some of a network's layers have in common: one row of a ``Preparation``.

    Attributes:
        name: ``"forward"``, ``"input_grad"`` or ``"weight_grad"``. A transposed layer is an
            ``"input_grad"``, and ``problem`` is that of the convolution whose gradient it is.
        problem: the sizes, stride, padding, dilation and groups.
        dtype: the type of the tensors.
        family: which kernels compute it: ``"hopper"``, ``"dense"``, ``"direct"`` and others.
        calls: how often it is called in one step of the network.
        epilogue: what the pass of a layer does to its accumulators: residual and activation.

    Examples:
        >>> report = fastconv.prepare(fastconv.Conv2d(3, 8, 3), torch.empty(2, 3, 9, 9))
        >>> for one in report.passes:  # none on a CPU
        ...     print(one.label, one.problem.input_shape, one.family)
    """

    name: str
    problem: Problem
    dtype: torch.dtype
    family: str
    calls: int
    epilogue: Epilogue

    @property
    def label(self) -> str:
        """The name of the pass and of its epilogue: ``"forward+residual+relu"``."""
        residual = ["residual"] if self.epilogue.residual else []
        activation = self.epilogue.activation
        return "+".join((self.name, *residual, *([activation] if activation != "identity" else [])))


@dataclass(frozen=True)
class Preparation:
    """What ``fastconv.prepare`` has done. Printed, it is a table.

    Attributes:
        passes: the distinct passes of the network.
        kernels: how many distinct kernels all passes have.
        new_kernels: how many of them were not loaded before.
        seconds: how long it took.
        norms: how many distinct passes of ``fastconv.batch_norm_act`` there are beside ``passes``.

    Examples:
        >>> report = fastconv.prepare(fastconv.Conv2d(3, 8, 3), torch.empty(2, 3, 9, 9))
        >>> print(report)  # with a model on a GPU, a table of all passes
        no convolution of fastconv's on a GPU: there was nothing to prepare
    """

    passes: tuple[PreparedPass, ...]
    kernels: int
    new_kernels: int
    seconds: float
    norms: int = 0

    def __str__(self) -> str:
        if not self.passes and not self.norms:
            return "no convolution of fastconv's on a GPU: there was nothing to prepare"
        rows: list[tuple[str, ...]] = [("pass", "input", "weight", "type", "kernels of", "calls")]
        for one in self.passes:
            sizes = ("x".join(map(str, s)) for s in (one.problem.input_shape,
                                                     one.problem.weight_shape))  # fmt: skip
            dtype = str(one.dtype).removeprefix("torch.")
            rows.append((one.label, *sizes, dtype, one.family, str(one.calls)))
        norms = f"{self.norms} passes of batch normalization, " if self.norms else ""
        total = (
            f"{len(self.passes)} passes of {sum(one.calls for one in self.passes)} calls, {norms}"
            f"{self.kernels} kernels, {self.new_kernels} of them new, {self.seconds:.1f} s"
        )
        return "\n".join((*tables.lines(rows), total))


def prepare(
    model: Callable[..., Any], *example: Any, progress: bool | None = None, **named: Any
) -> Preparation:
    """Plans, compiles and loads all kernels that a model's convolutions need, side by side.

    Without it, a network's first step waits for its layers one after the other. Nothing is
    computed: the model is called with tensors that have no data (``FakeTensorMode``), its
    parameters and buffers replaced likewise, so that none of them changes. What its code does to
    Python state meanwhile is undone: attributes, caches, counters, layers and buffers that it makes
    on its first call, random numbers. Where gradients are enabled and the result requires them, the
    kernels of a backward pass are prepared as well.

    Call it as the model will be called: in the same mode (``train``, ``eval``), under the same
    ``autocast``, ``fastconv.precision`` and ``no_grad``, with an example of the same size,
    type and memory format. Kernels are compiled for these alone. Layers of complex numbers are not
    prepared: they compile when first called.

    Args:
        model: a module, or any function of tensors.
        *example: what it will be called with. Tensors may be fake.
        progress: whether to show on stderr how far it is; by default, if that is a terminal.
        **named: the example's arguments by name.

    Returns:
        What was prepared; printed, it is a table. The model stays as it was.

    Raises:
        ValueError: there is no tensor in the example.
        RuntimeError: the model does something that takes data (``.item()``, a branch on a value, an
            operator without support of fake tensors), or its layers have no sizes yet: its first
            step then compiles what it needs. Or the model keeps tensors without data where that
            cannot be undone; the error says where.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.GpuUnavailable: this machine lacks what the kernels need beside the GPU.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> model = fastconv.convert(torch.nn.Conv2d(3, 64, 7, stride=2)).to(device)
        >>> report = fastconv.prepare(model, torch.empty(64, 3, 224, 224, device=device))
        >>> print(report)  # with a GPU, a table of all passes
        no convolution of fastconv's on a GPU: there was nothing to prepare
    """
    start = time.perf_counter()
    return _prepared(needs_of(model, example, named, guard=True), start, progress)


class Preparing:
    """What ``fastconv.preparing`` gives its block.

    Attributes:
        report: what was prepared; None until the block has ended.

    Examples:
        >>> with fastconv.preparing() as step:
        ...     output = fastconv.Conv2d(3, 8, 3)(torch.empty(2, 3, 9, 9))
        >>> isinstance(step, fastconv.Preparing), isinstance(step.report, fastconv.Preparation)
        (True, True)
    """

    report: Preparation | None = None


@contextmanager
def preparing(*, progress: bool | None = None) -> Iterator[Preparing]:
    """Prepares whatever is in the block: several models, a loss, a backward pass.

    It does what ``fastconv.prepare`` does for a single model.

    In the block nothing is computed, and tensors that are made there have no data
    (``FakeTensorMode``). Tensors from outside are used for their form alone: they, and their
    ``.grad``, stay as they are. When the block ends, all kernels that its convolutions would have
    needed are compiled and loaded.

    What modules do to their Python state in the block is undone, as by ``fastconv.prepare``. Other
    objects that were there before, such as a ``GradScaler`` or a list, are put back only where they
    hold tensors without data. Variables that the block sets stay set.

    Args:
        progress: whether to show on stderr how far compiling is; by default, if that is a terminal.

    Yields:
        An object whose ``report`` is there when the block has ended.

    Raises:
        Exception: whatever the block raises. Code that takes data (``.item()`` of a tensor that was
            made there, a branch on its value) is an error of PyTorch's. Nothing is compiled then.
        RuntimeError: an object from before the block still holds tensors without data; the error
            names it.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.GpuUnavailable: this machine lacks what the kernels need beside the GPU.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> model, images = fastconv.Conv2d(3, 8, 3), torch.randn(2, 3, 9, 9)
        >>> with fastconv.preparing() as step:
        ...     model(images).square().mean().backward()
        >>> print(step.report)  # with a model on a GPU, a table of all passes
        no convolution of fastconv's on a GPU: there was nothing to prepare
        >>> model.weight.grad is None  # nothing was computed
        True
    """
    start, found, recorder = time.perf_counter(), Preparing(), _Recorder()
    run = DryRun(FakeTensorMode(allow_non_fake_inputs=True), recorder)
    with run.guarded({}, is_known=False, caller=calling_frame()):
        yield found
    found.report = _prepared(recorder.needs, start, progress)


def _prepared(needs: Needs, start: float, progress: bool | None) -> Preparation:
    """Plans, compiles and loads what passes need; the work began at the time ``start``."""
    plans = {need: plan_and_compile(need) for need in needs}
    kernels, new = load_kernels(plans, progress_shower("compiled {} of {} kernels", progress))
    passes = (
        PreparedPass(
            need.plan.__name__, need.problem, need.dtype, plan.family, needs[need], need.epilogue
        )
        for need, plan in plans.items()
        if isinstance(need, cuda.Need)
    )
    norms = sum(isinstance(need, launches.Need) for need in needs)
    return Preparation(tuple(passes), kernels, new, time.perf_counter() - start, norms)


def plan_and_compile(need: Need) -> Plan:
    """Plans a pass and starts to compile its kernels in the background."""
    if isinstance(need, cuda.Need):
        return cuda.plan_and_compile(need)
    plan = launches.planned(need)
    kernels = (one.kernel for one in plan.launches)
    loading.compile_ahead(kernels, cuda.gpu(need.device).architecture, need.device)
    return plan


Show = Callable[[int, int], None]
"""Shows how much is done, the first argument, of how much there is to do."""


def load_kernels(plans: Mapping[Need, Plan], show: Show | None = None) -> tuple[int, int]:
    """Compiles the plans' kernels side by side and loads them.

    Returns:
        The number of distinct kernels, and of those that were not loaded before.
    """
    kernels: dict[int, dict[Kernel, None]] = defaultdict(dict)  # by device, each kernel once
    for need, plan in plans.items():
        kernels[need.device].update((one.kernel, None) for one in plan.launches)
    new = sum(loading.load(of, device, show) for device, of in kernels.items())
    for need, plan in plans.items():
        if isinstance(need, cuda.Need):
            cuda.ready(need, plan)
        else:
            launches.ready(need)
    return sum(map(len, kernels.values())), new


def progress_shower(words: str, progress: bool | None) -> Show | None:
    """A function that shows progress on stderr, or None if nothing should be shown.

    Args:
        words: a format with places for what is done and for what there is to do.
        progress: whether to show it; None: if stderr is a terminal.
    """

    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        shown = words.format(done, total)
        print(f"\rfastconv: {shown}", end=end, file=sys.stderr, flush=True)

    return show if (sys.stderr.isatty() if progress is None else progress) else None


# --- What a network needs -------------------------------------------------------------------------


def is_gpu(device: torch.device) -> bool:
    """Whether kernels are compiled for that device."""
    return device.type == _GPU


Need = cuda.Need | launches.Need
"""What a pass of a convolution or of a normalization has to compute."""

Needs = Counter[Need]
"""What the passes of a network have to compute, and how often."""


def needs_of(
    model: Callable[..., Any], example: Any, named: Any, guard: bool | None = None
) -> Needs:
    """What a model's passes have to compute, found by a dry run; a backward pass is among them.

    ``guard`` is that of :func:`fastconv.network.dry_run.call_without_data`.
    """
    if not tensors_of((example, named)):
        raise ValueError(
            "prepare() takes a model and an example of what it is called with, which has tensors: "
            "prepare(model, torch.randn(8, 3, 224, 224)), for one"
        )
    recorder = _Recorder()
    try:
        call_without_data(model, example, named, watch=recorder, backward=True, guard=guard)
    except NeedsData as error:
        raise RuntimeError(f"cannot prepare the model, as it {error}") from error
    return recorder.needs


class _Recorder(TorchDispatchMode):
    """Records what fastconv's operators are called with on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: Needs = Counter()
        self._latest: cuda.Need | None = None  # the latest forward pass
        self._shares = 0  # of statistics that the convolution before leaves

    def __enter__(self) -> _Recorder:
        self._before, hooks.block_convolved = hooks.block_convolved, self._note_block
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        hooks.block_convolved = self._before

    def _note_block(self) -> None:
        """Has the latest convolution leave statistics, as blocks ask it to."""
        plain, self._latest = self._latest, None
        if plain is None or plain.dtype not in left_statistics.TYPES:
            return
        self.needs[plain] -= 1
        if not self.needs[plain]:
            del self.needs[plain]
        given = plain._replace(statistics=True)
        self.needs[given] += 1
        self._shares = cuda.planned(given).shares

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _OPERATORS:
            self._record(_OPERATORS[function], *args, **kwargs)
        elif function is backward:
            for name, part in gradients.parts(*args):
                self._record(OPERATORS[name], *part)
        elif function in _NORMS and is_gpu(args[0].device) and args[0].numel():
            need = _NORMS[function](*args)
            if need is not None and isinstance(need.of, launches.Running):
                of = need.of._replace(shares=self._shares)
                self.needs[need._replace(of=of)] += 1
                self._shares = 0
            elif need is not None:
                self.needs[need] += 1
        return function(*args, **kwargs)

    def _record(self, operator: Operator, *args: Any, **kwargs: Any) -> None:
        result = operator.describe(operator.check, *args, **kwargs)
        need = devices.need(operator, result, args) if is_gpu(result.device) else None
        if operator is OPERATORS["forward"]:
            self._latest = need
        if need is not None:
            self.needs[need] += 1


_OPERATORS = {operator.call: operator for operator in OPERATORS.values()}

# Allocators align tensors as kernels can take advantage of.
_NORMS: dict[Any, Callable[..., launches.Need | None]] = {
    batchnorm_schema.forward: lambda *args: batchnorm_schema.forward_need(
        batchnorm_schema.Arguments(*args), ALIGNMENT
    ),
    batchnorm_schema.backward: lambda *args: batchnorm_schema.backward_need(
        batchnorm_schema.GradArguments(*args), ALIGNMENT
    ),
}

"""``prepare``, ``preparing``: a network's kernels, compiled side by side before its first step."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastconv import tables
from fastconv.backends import cuda
from fastconv.jit import launch
from fastconv.kernels.family import Kernel, Plan
from fastconv.ops import devices
from fastconv.ops.schema import OPERATORS
from fastconv.problem import Epilogue, Problem

_GPU = "cuda"


class PreparedPass(NamedTuple):
    """A pass that some of the network's layers have in common."""

    name: str  # "forward", "input_grad" or "weight_grad"
    problem: Problem
    dtype: torch.dtype
    family: str  # whose kernels compute it
    calls: int  # in one step of the network
    epilogue: Epilogue  # of a forward pass

    @property
    def label(self) -> str:
        """The operator's name, and what is done to its sums: "forward+residual+relu"."""
        residual = ["residual"] if self.epilogue.residual else []
        activation = self.epilogue.activation
        return "+".join((self.name, *residual, *([activation] if activation != "identity" else [])))


@dataclass(frozen=True)
class Preparation:
    """What :func:`prepare` has done; as text, a table."""

    passes: tuple[PreparedPass, ...]
    kernels: int  # different ones
    new_kernels: int  # that were not on the device yet
    seconds: float

    def __str__(self) -> str:
        if not self.passes:
            return "no convolution of fastconv's on a GPU: there was nothing to prepare"
        rows: list[tuple[str, ...]] = [("pass", "input", "weight", "type", "kernels of", "calls")]
        for one in self.passes:
            sizes = ("x".join(map(str, s)) for s in (one.problem.input_shape,
                                                     one.problem.weight_shape))  # fmt: skip
            dtype = str(one.dtype).removeprefix("torch.")
            rows.append((one.label, *sizes, dtype, one.family, str(one.calls)))
        total = (
            f"{len(self.passes)} passes of {sum(one.calls for one in self.passes)} calls, "
            f"{self.kernels} kernels, {self.new_kernels} of them new, {self.seconds:.1f} s"
        )
        return "\n".join((*tables.lines(rows), total))


def prepare(
    model: Callable[..., Any], *example: Any, progress: bool | None = None, **named: Any
) -> Preparation:
    """Plans and compiles whatever a model's convolutions need, side by side, and loads it.

    Without it a network's first step waits for its layers one after the other. Nothing is
    computed: the model is called with tensors that have no data (``FakeTensorMode``), its
    parameters and buffers replaced likewise, so that none of them changes. Where gradients are
    enabled and the result has some, those of a backward pass are prepared as well.

        >>> model = model.cuda()
        >>> print(fastconv.prepare(model, torch.empty(64, 3, 224, 224, device="cuda")))

    Call it as the model will be called: in the same mode (``train``, ``eval``), under the same
    ``autocast``, :class:`fastconv.precision` and ``no_grad``, with an example of the same size,
    type and memory format. Kernels are compiled for these alone. Layers of complex numbers are not
    prepared: they compile when first called.

    Args:
        model: a module, or any function of tensors.
        example: what it will be called with. Tensors may be fake.
        progress: whether to show on stderr how far it is; by default, if that is a terminal.
        named: the same, by name.

    Returns:
        What was prepared; printed, a table.

    Raises:
        RuntimeError: the model does something that takes data (``.item()``, a branch on a value, an
            operator that knows no fake tensors). Its first step compiles what it needs then.
        CompilationError, GpuUnavailable, LaunchError: a kernel cannot be made, and why.
    """
    start = time.perf_counter()
    return _prepared(needs_of(model, example, named), start, progress)


class Preparing:
    """Of a block that is prepared: what was done is there when it has ended."""

    report: Preparation | None = None


@contextmanager
def preparing(*, progress: bool | None = None) -> Iterator[Preparing]:
    """:func:`prepare` for whatever is in the block: several models, a loss, a backward pass.

    In the block nothing is computed, and tensors that are made there have no data
    (``FakeTensorMode``). Those from outside stand for their form: they, and their ``.grad``, stay
    as they are. When it ends, all that convolutions in it would have needed is compiled and loaded.

        >>> with fastconv.preparing() as step:
        ...     criterion(model(images), targets).backward()
        >>> print(step.report)

    Leave the optimizer's step out: it would keep tensors without data. So would modules that note a
    tensor in an attribute; :func:`prepare`, which knows the model, undoes that.

    Args:
        progress: whether to show on stderr how far compiling is; by default, if that is a terminal.

    Raises:
        Exception: whatever the block raises; what takes data (``.item()`` of a tensor that was made
            there, a branch on its value) is an error of PyTorch's. Nothing is compiled then.
        CompilationError, GpuUnavailable, LaunchError: a kernel cannot be made, and why.
    """
    start, found, recorder = time.perf_counter(), Preparing(), _Recorder()
    with _without_data(FakeTensorMode(allow_non_fake_inputs=True), recorder):
        yield found
    found.report = _prepared(recorder.needs, start, progress)


def _prepared(needs: Needs, start: float, progress: bool | None) -> Preparation:
    """Has them planned, compiled and loaded; ``start`` is when it began."""
    plans = {need: cuda.begun(need) for need in needs}
    kernels, new = make_ready(plans, shower("compiled {} of {} kernels", progress))
    passes = (
        PreparedPass(
            need.plan.__name__, need.problem, need.dtype, plan.family, needs[need], need.epilogue
        )
        for need, plan in plans.items()
    )
    return Preparation(tuple(passes), kernels, new, time.perf_counter() - start)


Show = Callable[[int, int], None]
"""Told how much is done, and how much there is to do."""


def make_ready(plans: Mapping[cuda.Need, Plan], show: Show | None = None) -> tuple[int, int]:
    """Compiles the plans' kernels side by side and loads them: how many; how many of them new."""
    kernels: dict[int, dict[Kernel, None]] = defaultdict(dict)  # by device, each of them once
    for need, plan in plans.items():
        kernels[need.device].update((one.kernel, None) for one in plan.launches)
    new = sum(launch.load(of, device, show) for device, of in kernels.items())
    for need, plan in plans.items():
        cuda.ready(need, plan)
    return sum(map(len, kernels.values())), new


def shower(words: str, progress: bool | None) -> Show | None:
    """Shows on stderr how far something is; None if it should not, by default if that is a file.

    ``words`` have places for what is done and for what there is to do.
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


Needs = Counter[cuda.Need]
"""What passes are asked to do; how often."""


def needs_of(model: Callable[..., Any], example: Any, named: Any) -> Needs:
    """What the model's passes ask for, a backward pass included."""
    if not tensors_of((example, named)):
        raise ValueError("prepare() takes a model and an example of what it is called with")
    recorder = _Recorder()
    try:
        call_without_data(model, example, named, watch=recorder, backward=True)
    except NeedsData as error:
        raise RuntimeError(f"cannot prepare the model, as it {error}") from error
    return recorder.needs


class NeedsData(Exception):
    """A model that cannot be called with tensors that have no data; says why."""


def call_without_data(
    model: Callable[..., Any],
    example: Any,
    named: Any,
    watch: AbstractContextManager[Any],
    backward: bool = False,
) -> None:
    """Calls the model with fake tensors, in a context, and a backward pass if it should.

    Parameters and buffers are fake as well, and attributes of modules are put back: nothing
    changes, and nothing is computed.

    Raises:
        NeedsData: it does something that takes data.
    """
    tensors = tensors_of((example, named))
    state = {}
    if isinstance(model, torch.nn.Module):
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fake = detect_fake_mode([*tensors, *state.values()]) or FakeTensorMode(
        allow_non_fake_inputs=True  # tensors that are neither parameters nor buffers
    )
    with ExitStack() as stack:
        stack.enter_context(_without_data(fake, watch))
        example, named, state = tree_map_only(Tensor, fake.from_tensor, (example, named, state))
        try:
            if isinstance(model, torch.nn.Module):
                stack.enter_context(unchanged_attributes(model))
                result = torch.func.functional_call(model, state, example, named)
            else:
                result = model(*example, **named)
            outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
            if backward and outputs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        except Exception as error:
            raise NeedsData(
                "cannot be called with tensors that have no data "
                f"(torch.utils FakeTensorMode): {error}"
            ) from error


@contextmanager
def _without_data(fake: FakeTensorMode, watch: AbstractContextManager[Any]) -> Iterator[None]:
    """Within, nothing is computed, and tensors from outside do not change; nor does their grad."""
    stand_ins = _StandIns(fake)
    with ExitStack() as stack:
        # Autocast would go on to give out fake weights that it has cast and kept.
        stack.callback(torch.clear_autocast_cache)
        stack.callback(stand_ins.put_back)
        for mode in (fake, watch, stand_ins):
            stack.enter_context(mode)
        yield


class _StandIns(TorchDispatchMode):
    """Has fake tensors instead of those with data: one for each, which is changed in its place."""

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake = fake
        self._grads: dict[int, tuple[Tensor, Tensor | None]] = {}  # of leaves, before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _OF_NEW_CONSTANTS:
            args, kwargs = tree_map_only(Tensor, self._of, (args, kwargs))
        return function(*args, **kwargs)

    def _of(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad and tensor.is_leaf:
            self._grads.setdefault(id(tensor), (tensor, tensor.grad))
        return self._fake.from_tensor(tensor)

    def put_back(self) -> None:
        for tensor, grad in self._grads.values():
            tensor.grad = grad


# What torch.tensor(2.0) ends with: the fake tensor knows its value, which models may look at.
_OF_NEW_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


@contextmanager
def unchanged_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Undoes what modules note in attributes meanwhile: not to be met again is a fake tensor."""
    noted = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in noted:
            for name in vars(module).keys() - attributes.keys():
                del vars(module)[name]
            vars(module).update(attributes)


def tensors_of(values: Any) -> list[Tensor]:
    """The tensors in whatever a model takes or returns."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Recorder(TorchDispatchMode):
    """Notes what our operators are asked for on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: Needs = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _OPERATORS:
            self._note(function, *args, **kwargs)
        return function(*args, **kwargs)

    def _note(self, function: Any, *args: Any, **kwargs: Any) -> None:
        operator = _OPERATORS[function]
        result = operator.describe(operator.check, *args, **kwargs)
        if not is_gpu(result.device):
            return
        need = devices.need(operator, result, args)
        if need is not None:
            self.needs[need] += 1


_OPERATORS = {operator.call: operator for operator in OPERATORS.values()}

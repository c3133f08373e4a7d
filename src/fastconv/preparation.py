"""``prepare``, ``preparing``: a network's kernels, compiled side by side before its first step."""

from __future__ import annotations

import gc
import inspect
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.modules.module as _hooks
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fastconv import tables
from fastconv.backends import cuda
from fastconv.jit import loading
from fastconv.kernels.family import Kernel, Plan
from fastconv.ops import devices
from fastconv.ops.schema import OPERATORS
from fastconv.problem import Epilogue, Problem
from fastconv.state import (
    State,
    clear_caches,
    holders,
    named_variables,
    same_random_numbers,
    take_out,
)

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
    parameters and buffers replaced likewise, so that none of them changes. What its code does to
    Python state meanwhile is undone: attributes, caches, counters, layers and buffers that it makes
    on its first call, random numbers (:mod:`fastconv.state`). Where gradients are enabled and the
    result has some, those of a backward pass are prepared as well.

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
            operator that knows no fake tensors), or its layers have no sizes yet. Its first step
            compiles what it needs then. Or it keeps tensors without data where that cannot be
            undone; the error says where.
        CompilationError, GpuUnavailable, LaunchError: a kernel cannot be made, and why.
    """
    start = time.perf_counter()
    return _prepared(needs_of(model, example, named, guard=True), start, progress)


class Preparing:
    """What :func:`preparing` gives its block: the report is there when the block has ended."""

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

    What modules do to their Python state in the block is undone, as by :func:`prepare`. Of other
    objects that were there before, such as a ``GradScaler`` or a list, that is undone by which they
    hold tensors without data. Variables that the block sets are its own.

    Args:
        progress: whether to show on stderr how far compiling is; by default, if that is a terminal.

    Raises:
        Exception: whatever the block raises; what takes data (``.item()`` of a tensor that was made
            there, a branch on its value) is an error of PyTorch's. Nothing is compiled then.
        RuntimeError: something goes on to hold tensors without data; it is named.
        CompilationError, GpuUnavailable, LaunchError: a kernel cannot be made, and why.
    """
    start, found, recorder = time.perf_counter(), Preparing(), _Recorder()
    run = _DryRun(FakeTensorMode(allow_non_fake_inputs=True), recorder)
    with run.guarded({}, is_known=False, caller=_calling()):
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
    new = sum(loading.load(of, device, show) for device, of in kernels.items())
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
"""What the passes of a network are asked to compute, and how often."""


def needs_of(
    model: Callable[..., Any], example: Any, named: Any, guard: bool | None = None
) -> Needs:
    """What the model's passes ask for, a backward pass included.

    ``guard`` is :func:`call_without_data`'s.
    """
    if not tensors_of((example, named)):
        raise ValueError("prepare() takes a model and an example of what it is called with")
    recorder = _Recorder()
    try:
        call_without_data(model, example, named, watch=recorder, backward=True, guard=guard)
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
    guard: bool | None = None,
) -> None:
    """Calls the model with fake tensors, in a context, and a backward pass if it should.

    Nothing is computed and no tensor changes. With ``guard`` nothing else does, either: parameters
    and buffers are fake as well, and what the model does to its Python state is undone. It is there
    for modules unless it is False; functions of ours, which keep nothing or keep it on purpose, do
    without.

    Raises:
        NeedsData: it does something that takes data.
        RuntimeError: it keeps fake tensors, guarded as it is.
    """
    module = isinstance(model, torch.nn.Module)
    given = [*tensors_of((example, named))]
    if isinstance(model, torch.nn.Module):
        given += (*model.parameters(), *model.buffers())
    known = detect_fake_mode(given)
    fake = known or FakeTensorMode(allow_non_fake_inputs=True)  # for what is not exchanged
    roots = {"model": model, "example": example, "named": named}
    run = _DryRun(fake, watch)
    with run.guarded(roots, known is not None) if guard or (module and guard is None) else run:
        _call(fake, model, example, named, backward)


def _call(
    fake: FakeTensorMode, model: Callable[..., Any], example: Any, named: Any, backward: bool
) -> None:
    """Calls the model; what that has made is gone when this returns."""
    try:
        example, named = tree_map_only(Tensor, fake.from_tensor, (example, named))
        outputs = [one for one in tensors_of(model(*example, **named)) if one.requires_grad]
        if backward and outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    except NeedsData:
        raise
    except Exception as error:
        raise NeedsData(
            f"cannot be called with tensors that have no data (torch.utils FakeTensorMode): {error}"
        ) from error


class _DryRun:
    """Within, nothing is computed, and tensors from outside do not change; nor does their grad."""

    def __init__(self, fake: FakeTensorMode, watch: AbstractContextManager[Any]) -> None:
        self._fake, self._watch = fake, watch
        self._state = State()
        self._others: set[int] = set()  # fake tensors of this mode that were there before
        self._stack = ExitStack()
        self._thread = threading.get_ident()

    def __enter__(self) -> None:
        with self._stack:  # which undoes what has been done if something fails here
            # Autocast would go on to give out fake weights that it has cast and kept.
            self._stack.callback(torch.clear_autocast_cache)
            self._stack.callback(self._state.put_back, self._is_new)
            for mode in (self._fake, self._watch, _StandIns(self._fake, self._state)):
                self._stack.enter_context(mode)
            self._stack = self._stack.pop_all()

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    def _is_new(self, one: Any) -> bool:
        """Whether it is a fake tensor that has been made meanwhile."""
        is_ours = isinstance(one, FakeTensor) and one.fake_mode is self._fake
        return is_ours and id(one) not in self._others

    # --- Guarded ---

    @contextmanager
    def guarded(
        self, roots: Mapping[str, Any], is_known: bool, caller: FrameType | None = None
    ) -> Iterator[None]:
        """The same, and Python state that can be reached from the roots does not change.

        Nor does that of modules that are called, whatever they are reached from. With a ``caller``
        there is a block of its code within, which may keep tensors in its own variables; what they
        had before must not. ``is_known`` says that there may be others' tensors of this mode.
        """
        before = self._left() if is_known else []
        self._others = {id(one) for one in before}
        for one in before:
            self._state.take_tensor(one)
        if caller is not None:
            self._state.take(_variables(caller), shared=True)
        # Before what watches is entered, which may have hooks of its own.
        modules = self._state.take({**roots, **_OF_PYTORCH})
        try:
            with same_random_numbers(), self:
                self._exchange(modules)
                handle = _hooks.register_module_forward_pre_hook(self._meet)
                try:
                    yield
                finally:
                    handle.remove()
        except BaseException as error:
            if caller is not None:
                clear_caches(self._is_new)
                raise
            _clear_frames(error)  # whose variables would hold what was made
            with nullcontext() if isinstance(error, Exception) else suppress(RuntimeError):
                self._check(named_only=True)
            raise
        else:
            self._check(caller is not None, caller and caller.f_globals)
        finally:
            self._state.forget()

    def _meet(self, module: torch.nn.Module, _: Any) -> None:
        """Is told of each module that is about to be called, in whichever thread."""
        if threading.get_ident() == self._thread and not self._state.has(module):
            self._exchange(self._state.take({type(module).__name__: module}, late=True))

    def _exchange(self, modules: Iterable[torch.nn.Module]) -> None:
        """Has fake parameters and buffers in place of the modules' own, which are noted."""
        for module in modules:
            for of in (vars(module).get("_parameters"), vars(module).get("_buffers")):
                if not isinstance(of, dict):  # a ScriptModule's are C++'s: see _StandIns
                    continue
                for name, tensor in of.items():
                    if is_lazy(tensor):
                        raise NeedsData(
                            "has parameters that have no sizes yet "
                            f"({type(module).__name__}.{name}): call it once before"
                        )
                    if tensor is not None:
                        # What has no fake form stays what it is; who uses it is told.
                        with suppress(Exception):
                            of[name] = self._fake.from_tensor(tensor)

    def _check(self, named_only: bool, allowed: Any = None) -> None:
        """Raises if something still holds fake tensors that have been made meanwhile.

        With ``named_only``, what has no name of its own is let be: a function's variable may have
        it. ``allowed`` is an object that may hold such tensors.
        """
        self._state.close()
        if not self._left():
            return
        gc.collect()
        if not self._left():
            return
        clear_caches(self._is_new)
        left = self._left()
        found = holders(left, self._state, named_only, allowed) if left else {}
        for holder in found.values():
            take_out(holder, self._is_new)
        if found:
            raise RuntimeError(
                "the model was called with tensors that have no data, and keeps such in "
                f"{', '.join(found)}, where fastconv cannot put back what was there before. "
                "Clear that before it is called next, and call it once with data instead"
            )

    def _left(self) -> list[Any]:
        """All fake tensors that have been made meanwhile and still exist."""
        return [one for one in gc.get_objects() if type(one) is FakeTensor and self._is_new(one)]


# What PyTorch itself keeps of models.
_OF_PYTORCH = {
    "hooks of all modules": (_hooks._global_forward_hooks, _hooks._global_forward_pre_hooks),
    "parametrize.cached()": parametrize._cache,
}


def _variables(caller: FrameType) -> dict[str, Any]:
    """What a function's variables have now, and global ones that it names."""
    code = caller.f_code
    found = named_variables(code, caller.f_globals)
    if code.co_flags & inspect.CO_OPTIMIZED:  # else they are those of a file
        variables = caller.f_locals
        found |= variables
        if sys.version_info < (3, 13):
            variables.clear()  # a copy that the frame keeps, and with it what they had
    return found


def _calling() -> FrameType:
    """The frame of the code whose ``with`` statement enters a context of ours."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") == "contextlib" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _clear_frames(error: BaseException | None) -> None:
    """Empties the variables of functions that an error has ended."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class _StandIns(TorchDispatchMode):
    """Gives operators fake tensors instead of those with data, each of which has one fake."""

    def __init__(self, fake: FakeTensorMode, state: State) -> None:
        super().__init__()
        self._fake, self._state = fake, state

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
        self._state.take_tensor(tensor)
        return self._fake.from_tensor(tensor)


# torch.tensor(2.0) calls these last: its fake tensor knows the value, which models may look at.
_OF_NEW_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


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

"""The call of a convolution in a network as a value: recorded, repeated with random data, timed."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fastconv import _frozen, _precision, timing
from fastconv._precision import Precision, precision
from fastconv.backends import cuda
from fastconv.backends.epilogue import applied
from fastconv.fused import FUSED
from fastconv.geometry import Activation, activation_of
from fastconv.jit import cache as disk
from fastconv.jit import compile
from fastconv.kernels import planner, tuned
from fastconv.kernels.family import Plan
from fastconv.network import preparation
from fastconv.network.exchange import known_kind
from fastconv.problem import Epilogue, Problem
from fastconv.timing import Effort, Run

LEAST_GAIN = 0.01
"""The share of PyTorch's time that a layer has to save for it to be exchanged."""

CLEAR_GAIN = 1.1
"""No more samples are taken once all of one run are this many times as long as all of the other."""

CALL_EFFORT = Effort(repeats=7, seconds=2.0)
MODEL_EFFORT = Effort(repeats=7, seconds=10.0)

# The types of the package's files that times depend on.
_SOURCES = (".py", ".cuh", ".cc", ".h", ".json")


class Form(NamedTuple):
    """The shape, strides and type of a tensor, without its data and its device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def random(self, device: torch.device) -> Tensor:
        """A tensor of this form with normal numbers; a dense one if elements share addresses."""
        reached = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        made: Tensor
        if reached + 1 >= math.prod(self.shape):
            made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        else:
            made = torch.empty(self.shape, dtype=self.dtype, device=device)
        return made.normal_()


@dataclass(frozen=True)
class Call:
    """Everything that the time of a layer's call depends on, except the machine and settings."""

    kind: str  # the name of the layer's class in PyTorch: "Conv2d"
    input: Form
    weight: Form
    bias: Form | None
    stride: tuple[int, ...]
    padding: str | tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    padding_mode: str
    output_padding: tuple[int, ...] | None  # None for layers that are not transposed
    gradients: tuple[str, ...]  # those that autograd computes, of "input", "weight" and "bias"
    autocast: torch.dtype | None
    precision: Precision | None  # the one that `with fastconv.precision(...)` sets
    # fastconv's kernel computes these in its epilogue; after PyTorch's layer they are operators.
    activation: Activation | None = None
    residual: Form | None = None

    @classmethod
    def of(cls, module: Any, input: Tensor, output_size: Sequence[int] | None = None) -> Call:
        """The call of a layer with this input, under the current settings.

        ``output_size`` is what transposed layers take in addition.
        """
        device, bias = input.device.type, module.bias
        tensors = {"input": input, "weight": module.weight, "bias": bias}
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        return cls(
            known_kind(module).pytorchs.__name__,
            Form.of(input),
            Form.of(module.weight),
            None if bias is None else Form.of(bias),
            module.stride,
            module.padding,
            module.dilation,
            module.groups,
            module.padding_mode,
            _output_padding(module, input, output_size),
            tuple(
                name
                for name, tensor in tensors.items()
                if recorded and tensor is not None and tensor.requires_grad
            ),
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            _precision.override(),
        )

    def trial(self, layer: nn.Module, device: torch.device) -> Trial:
        """The call with random data, of a layer that is called so."""
        return Trial(self, layer, device)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the call is computed."""
        double = self.input.dtype == torch.float64
        return self.input.dtype if self.autocast is None or double else self.autocast

    @property
    def forms(self) -> tuple[Form, ...]:
        """Of the operands by whose sizes people know the call."""
        return self.input, self.weight

    @property
    def axes(self) -> int:
        """The number of axes along which the layer convolves."""
        return len(self.stride)

    @property
    def is_batched(self) -> bool:
        return len(self.input.shape) == self.axes + 2

    @property
    def out_channels(self) -> int:
        first, second, *_ = self.weight.shape
        return first if self.output_padding is None else second * self.groups

    @property
    def geometry(self) -> str:
        """The layer's options that differ from their defaults, as text."""
        ones, zeros = (1,) * self.axes, (0,) * self.axes
        said = {
            "stride": (self.stride, ones),
            "padding": (self.padding, zeros),
            "output_padding": (self.output_padding or zeros, zeros),
            "dilation": (self.dilation, ones),
            "groups": (self.groups, 1),
            "padding_mode": (self.padding_mode, "zeros"),
        }
        return " ".join(
            f"{name}={_short(value)}" for name, (value, default) in said.items() if value != default
        )


def _output_padding(
    module: Any, input: Tensor, output_size: Sequence[int] | None
) -> tuple[int, ...] | None:
    """The output padding of a transposed layer's call; None for a layer of another kind."""
    if not module.transposed:
        return None
    if output_size is None:
        return tuple(module.output_padding)
    more = module._output_padding(
        input, output_size, module.stride, module.padding, module.kernel_size,
        len(module.kernel_size), module.dilation,
    )  # fmt: skip
    return tuple(more)


def is_one_kernel(call: Call, epilogue: Epilogue) -> bool:
    """Whether one kernel of fastconv's computes a call with an epilogue."""
    if call.output_padding is None:
        return True
    if any(more >= step for more, step in zip(call.output_padding, call.stride, strict=True)):
        return False
    batch = call.input.shape[0] if call.is_batched else 1
    *_, channels = call.input.shape[: -call.axes]
    # A sequence is an image of one row.
    ones, zeros = (1,) * (2 - call.axes), (0,) * (2 - call.axes)
    problem = Problem.of_transposed(
        (batch, channels, *ones, *call.input.shape[-call.axes :]),
        (*call.weight.shape[:2], *ones, *call.weight.shape[2:]),
        (*zeros, *call.output_padding),
        (*ones, *call.stride),
        tuple(side for one in (*zeros, *call.padding) for side in (one, one)),
        (*ones, *call.dilation),
        call.groups,
    )
    return planner.applies_epilogue(problem, epilogue)


def _short(value: object) -> str:
    """An option as text; a pair of equal numbers is written as one number."""
    if not isinstance(value, tuple):
        return str(value)
    return ",".join(map(str, dict.fromkeys(value) if len(set(value)) == 1 else value))


@contextmanager
def watched(layers: Mapping[str, nn.Module], seen: dict[str, list[Call]]) -> Iterator[None]:
    """Records how layers are called, by name, after their own pre-hooks have run."""

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        input, *others = args or (kwargs["input"],)
        output_size = others[0] if others else kwargs.get("output_size")
        seen.setdefault(name, []).append(Call.of(module, input, output_size))

    with ExitStack() as stack:
        for name, module in layers.items():
            handle = module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
            stack.callback(handle.remove)
        yield


class Operators(TorchDispatchMode):
    """Hashes the operators that a model calls and their arguments, on which its time depends.

    Numbers in tensors and the names of layers are no part of the hash.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hash = hashlib.sha256()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves, tree = tree_flatten((args, kwargs))
        words = [_form_of(leaf) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves]
        self._hash.update(f"{function} {tree} {words}\n".encode())
        return function(*args, **kwargs)

    def digest(self) -> str:
        return self._hash.hexdigest()


def _form_of(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f"{tuple(tensor.shape)} {tensor.dtype} {tensor.layout}"
    return f"{tuple(Form.of(tensor))} {tensor.requires_grad}"


def code_of(model: nn.Module) -> str:
    """A hash of the classes of a model's modules, and of the code of those not from PyTorch."""
    digest = hashlib.sha256()
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        for one in kind.__mro__:
            digest.update(f"{one.__module__}.{one.__qualname__}\n".encode())
            if not one.__module__.startswith(("torch.", "builtins")):
                for name, value in vars(one).items():
                    code = getattr(inspect.unwrap(value), "__code__", None)
                    if code is not None:
                        digest.update(f"{name} {_instructions(code)}\n".encode())
    return digest.hexdigest()


def _instructions(code: CodeType) -> object:
    """A function's instructions, without its file and its line numbers."""
    constants = [
        _instructions(one) if isinstance(one, CodeType)
        else sorted(map(repr, one)) if isinstance(one, frozenset)
        else repr(one)
        for one in code.co_consts
    ]  # fmt: skip
    return code.co_code.hex(), code.co_names, constants


# --- Repeated -------------------------------------------------------------------------------------


class Passes:
    """What trials of calls have in common: the backward pass, from random gradients."""

    wanted: list[Tensor]  # the tensors whose gradients the call computes
    _grad_output: Tensor | None = None  # the same in every call

    def gradients(self, output: Tensor) -> object:
        """The gradients that are wanted, or the output if there are none."""
        torch.clear_autocast_cache()  # in a network, each step casts each weight once
        if not self.wanted:
            return output
        if self._grad_output is None:
            self._grad_output = torch.randn_like(output)
        return torch.autograd.grad(output, self.wanted, self._grad_output)


class Trial(Passes):
    """A call with random data, by PyTorch's layer and by fastconv's.

    Neither runs hooks, and the layer's own parameters are not touched.
    """

    def __init__(self, call: Call, layer: nn.Module, device: torch.device) -> None:
        self.call = call
        self.input, weight = (form.random(device) for form in (call.input, call.weight))
        bias = None if call.bias is None else call.bias.random(device)
        self.residual = None if call.residual is None else call.residual.random(device)
        tensors = {"input": self.input, "weight": weight, "bias": bias}
        self.wanted = [tensors[name].requires_grad_() for name in call.gradients]  # type: ignore[union-attr]
        parameters = {"weight": weight, "bias": bias}
        kind = known_kind(layer)
        self._pytorchs = _twin(layer, kind.pytorchs, parameters, call.output_padding)
        self.layer = _twin(layer, FUSED[kind.ours], parameters, call.output_padding)
        self.layer.activation = call.activation

    def pytorchs(self) -> object:
        return self.gradients(self.pytorchs_forward(self.input, self.residual))

    def ours(self) -> object:
        return self.gradients(self.ours_forward(self.input, self.residual))

    def pytorchs_forward(self, input: Tensor, residual: Tensor | None) -> Tensor:
        with self.settings():
            epilogue = Epilogue(*activation_of(self.call.activation))
            return applied(self._pytorchs.forward(input), residual, epilogue)

    def ours_forward(self, input: Tensor, residual: Tensor | None) -> Tensor:
        with self.settings():
            output: Tensor = self.layer.forward(input, residual=residual)
            return output

    @contextmanager
    def settings(self) -> Iterator[None]:
        call, device = self.call, self.input.device.type
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(bool(self.wanted)))
            cast = torch.autocast(device, dtype=call.autocast, enabled=call.autocast is not None)
            stack.enter_context(cast)
            if call.precision is not None:
                stack.enter_context(precision(call.precision))
            yield


def _twin(
    layer: nn.Module, cls: Any, parameters: dict[str, Any], output_padding: tuple[int, ...] | None
) -> Any:
    """A layer of another class with these parameters; only its ``forward`` may be called.

    ``output_padding`` is that of a transposed layer's call, which may have given an output size.
    """
    made = object.__new__(cls)
    made.__dict__ = {**layer.__dict__, "_parameters": parameters}
    if output_padding is not None:
        made.__dict__["output_padding"] = output_padding
    return made


def convolved(
    layer: nn.Module, input: Tensor, weight: Tensor, output_padding: tuple[int, ...] | None
) -> Tensor:
    """The result of PyTorch's layer with these weights and no bias, in their type."""
    parameters = {"weight": weight, "bias": None}
    twin = _twin(layer, known_kind(layer).pytorchs, parameters, output_padding)
    tries: bool = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(False)  # to try algorithms out would take long
    try:
        with torch.autocast(input.device.type, enabled=False):
            found: Tensor = twin.forward(input)
    finally:
        torch._C._set_cudnn_benchmark(tries)
    return found


def plans(call: Any, layer: nn.Module, device: torch.device) -> dict[preparation.Need, Plan]:
    """The plans of all passes of a call, whose kernels begin to be compiled."""
    with FakeTensorMode():
        trial = call.trial(layer, device)
    needs = preparation.needs_of(trial.ours_forward, (trial.input, trial.residual), {})
    return {need: preparation.plan_and_compile(need) for need in needs}


# --- Timed ----------------------------------------------------------------------------------------


class Times(NamedTuple):
    """Median times in ms by PyTorch's layers and by fastconv's, and the errors of the medians."""

    theirs: float
    ours: float
    theirs_error: float
    ours_error: float

    @classmethod
    def of(cls, theirs: Sequence[float], ours: Sequence[float]) -> Times:
        medians = statistics.median(theirs), statistics.median(ours)
        return cls(*medians, _error(theirs), _error(ours))

    @classmethod
    def sum(cls, several: Sequence[Times]) -> Times:
        theirs, ours, *errors = zip(*several, strict=True)
        return cls(sum(theirs), sum(ours), *(math.hypot(*error) for error in errors))

    @property
    def gains(self) -> bool:
        """Whether fastconv takes less, by more than :data:`LEAST_GAIN` and than the errors."""
        return self.theirs - self.ours > self._least_difference

    @property
    def undecided(self) -> bool:
        """Whether neither is faster."""
        return abs(self.theirs - self.ours) <= self._least_difference

    @property
    def _least_difference(self) -> float:
        return max(LEAST_GAIN * self.theirs, math.hypot(self.theirs_error, self.ours_error))


def _error(samples: Sequence[float]) -> float:
    """Two standard errors of the median; one is 1.25 standard deviations / sqrt(n)."""
    # The spread is half the interquartile range: 0.674 standard deviations of normal samples.
    deviation = statistics.median(samples) * timing.spread(samples) / 0.674
    return 2 * 1.25 * deviation / math.sqrt(len(samples))


def is_clear(samples: Sequence[Sequence[float]]) -> bool:
    """Whether two runs differ so much that more samples would not change the choice."""
    first, second = samples
    return min(first) > CLEAR_GAIN * max(second) or min(second) > CLEAR_GAIN * max(first)


class Clock:
    """Measures calls and models; tests without a GPU replace :data:`clock`.

    A trial is a :class:`Trial`, or a block's
    :class:`~fastconv.network.norm_calls.NormTrial`.
    """

    def first(self, trial: Any) -> None:
        """Lets PyTorch choose its algorithm for a call, which takes long if it tries several."""
        trial.pytorchs()
        timing.synchronize(trial.input.device)

    def call(self, trial: Any) -> Times:
        """The GPU time of a call, without the host's."""
        runs = trial.pytorchs, trial.ours
        return Times.of(*timing.take_turns(runs, trial.input.device, CALL_EFFORT, is_clear))

    def model(
        self, runs: Sequence[Run], before: Sequence[Run], device: torch.device, with_host: bool
    ) -> Times:
        """The time of the whole model before and after the exchange.

        Args:
            runs: call the model as it was, and as it would be.
            before: make the model so, before each sample.
            device: the GPU.
            with_host: whether to take the time of the wall clock, or the GPU's.
        """
        if with_host:
            samples = timing.take_wall_turns(runs, device, MODEL_EFFORT, before, is_clear)
        else:
            samples = timing.take_turns(runs, device, MODEL_EFFORT, is_clear, before)
        return Times.of(*samples)


clock = Clock()


# --- Stored ---------------------------------------------------------------------------------------


def stored_times(what: str, device: torch.device) -> Times | None:
    """The times of a call or a model, if they were measured under the same circumstances."""
    payload = disk.load(disk.TIMES, _key(what, device))
    if payload is None:
        return None
    try:
        return Times(*map(float, json.loads(payload)))
    except (ValueError, TypeError):  # the entry is damaged, or of another format
        return None


def store_times(what: str, title: str, device: torch.device, times: Times) -> None:
    """Stores times on disk; ``title`` describes them to people who list the cache."""
    about = {"source": title, "architecture": cuda.gpu(device.index).architecture}
    disk.store(disk.TIMES, _key(what, device), json.dumps(times).encode(), about)


def _key(what: str, device: torch.device) -> str:
    return disk.key(
        what,
        {name: str(value) for name, value in _circumstances(device).items()},
        (),
        compile.nvrtc_version(),
    )


def _circumstances(device: torch.device) -> dict[str, object]:
    """What times depend on, except for the call: the machine, versions and settings."""
    cudnn = torch.backends.cudnn
    return {
        "gpu": gpu_name(device),
        "fastconv": _sources(),
        "tuned": _own_choices(),
        "switch": planner.current(),
        "frozen weights": _frozen.active(),
        "torch": (torch.__version__, torch.version.cuda),
        "cudnn": (cudnn.version(), cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32": _precision.pytorch_setting(),
    }


def _own_choices() -> dict[str, str]:
    """The plans that ``fastconv tune`` has chosen on this machine."""
    try:
        return tuned.read(tuned.own())
    except RuntimeError:  # there is no home folder to read them from
        return {}


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


@cache
def _sources() -> str:
    """A hash of all files of the package."""
    digest = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _SOURCES):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()

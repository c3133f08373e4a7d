"""Transposed convolutions on the native host path: which calls it serves, and their gradients."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastconv
from fastconv import native
from fastconv.kernels import planner
from native.helpers import Host, close, noted_warnings, tensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's")

NODE = "FastconvConvTransposeBackward"


class Function(NamedTuple):
    """A transposed convolution of 4 to 6 channels in 2 groups, along one, two or three axes."""

    axes: int

    @property
    def ours(self) -> Callable[..., Tensor]:
        return getattr(fastconv, f"conv_transpose{self.axes}d")

    @property
    def theirs(self) -> Callable[..., Tensor]:
        return getattr(F, f"conv_transpose{self.axes}d")

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        shapes = ((2, 4, 6, 5, 3), (4, 3, 3, 2, 2), (6,))
        return tuple(shape[: 2 + self.axes] for shape in shapes)

    def tensors(self, **options: Any) -> list[Tensor]:
        return tensors(*self.shapes, **options)

    def options(self, given: tuple[dict[str, Any], dict[str, Any]]) -> dict[str, Any]:
        """The options for one axis or two; those of a third axis are the first one's."""
        if self.axes < 3:
            return given[self.axes - 1]
        return {
            name: value + value[:1]
            if isinstance(value, list | tuple) and len(value) == 2
            else value
            for name, value in given[1].items()
        }


FUNCTIONS = [Function(1), Function(2), Function(3)]
functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: f"{one.axes}d")


def pythons(function: Callable[[], Any]) -> Any:
    """What a function returns while Python serves all calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "conv2d", None)
        return function()


def assert_same(ours: Any, pythons: Any) -> None:
    """Both have the same bits, in the same order in memory."""
    for one, other in zip(ours, pythons, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert one.equal(other)


# --- Which calls are served -----------------------------------------------------------------------

# Options of calls that C++ serves, for one axis and for two. Both have 2 groups.
SERVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({}, {}),
    "numbers": ({"stride": 2, "padding": 1, "output_padding": 1, "dilation": 2},) * 2,
    "tuples": (
        {"stride": (2,), "padding": (1,), "output_padding": (1,), "dilation": (2,)},
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (0, 2), "dilation": (2, 1)},
    ),
    "lists": (
        {"stride": [2], "padding": [1], "output_padding": [1], "dilation": [2]},
        {"stride": [2, 3], "padding": [1, 0], "output_padding": [0, 2], "dilation": [2, 1]},
    ),
    "one for both axes": ({"stride": (2,)}, {"stride": (2,), "padding": [1], "dilation": (1,)}),
    "sides": ({"padding": ((2, 1),)}, {"padding": ((2, 1), (0, 1))}),
    "sides in lists": ({"padding": [[2, 1]]}, {"padding": [(2, 1), [0, 1]]}),
    "precision": ({"precision": "ieee"},) * 2,
}


@functions
@pytest.mark.parametrize("batched", [True, False], ids=["", "unbatched"])
@pytest.mark.parametrize("epilogue", ["", "activation", "residual"])
@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_calls_that_are_served(
    host: Host, function: Function, options: Any, epilogue: str, batched: bool
) -> None:
    given = {**function.options(options), "groups": 2}
    input, *others = function.tensors()
    some = (input if batched else input[0], *others)
    if epilogue:
        given["activation"] = ("leaky_relu", 0.25)
    if epilogue == "residual":
        given["residual"] = torch.randn_like(function.ours(*some, **given))
        host.filled.clear()
    output = function.ours(*some, **given)
    assert host.filled == ["transposed"]
    expected = pythons(lambda: function.ours(*some, **given))
    assert_same([output], [expected])
    host.asked.clear()
    function.ours(*some, **given)
    assert not host.asked, "the table has the form of the call"


# Python serves these, or raises their errors.
OTHERS: dict[str, Any] = {
    "output padding of the dilation": {"output_padding": 1, "dilation": 2},
    "output padding of the stride": {"output_padding": 2, "stride": 2},
    "negative output padding": {"output_padding": -1},
    "no stride": {"stride": 0},
    "too many numbers": {"padding": (1, 1, 1, 1)},
    "too many pairs": {"padding": ((1, 0), (1, 0), (1, 0), (1, 0))},
    "a name": {"padding": "same"},
    "a name in a tuple": {"padding": ("same",)},
    "a pair in a pair": {"padding": ((1,),)},
    "a fraction": {"stride": 1.0},
    "a bool": {"dilation": True},
    "an array": {"stride": torch.ones(1, dtype=torch.int64).numpy()},
    "an unknown activation": {"activation": "swish"},
    "a residual of another rank": {"residual": torch.zeros(2)},
    "an unknown precision": {"precision": "float8"},
    "a list for groups": {"groups": [1]},
}


@functions
@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS)
def test_calls_that_are_not_served(host: Host, function: Function, options: Any) -> None:
    some = function.tensors()
    given = {
        "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "precision": None,
        "activation": None, "residual": None, "axes": function.axes,
        "output_padding": 0, **options,
    }  # fmt: skip
    assert native.conv2d is not None
    assert native.conv2d(*some, *given.values()) is NotImplemented
    assert not host.asked


@functions
def test_tensors_that_are_not_served(host: Host, function: Function) -> None:
    class Other(Tensor):
        pass

    input, weight, bias = function.tensors()
    rest = (1, 0, 1, 1, None, None, None, function.axes, 0)
    assert native.conv2d is not None
    for some in (
        (input.as_subclass(Other), weight, bias),
        (input, weight.as_subclass(Other), bias),
        (input, weight, bias.as_subclass(Other)),
        (input[0, 0], weight, bias),
        (input[None], weight, bias),
        (input, weight[0], bias),
        (input.to_sparse(), weight, bias),
        ([1.0], weight, bias),
        (input, weight, 1),
    ):
        assert native.conv2d(*some, *rest) is NotImplemented
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(input, input)
        assert native.conv2d(dual, weight, bias, *rest) is NotImplemented
    assert not host.asked


def test_transforms_modes_and_tracers(host: Host) -> None:
    """They see the operator, which Python computes."""
    input, weight, bias = FUNCTIONS[1].tensors()

    def call(input: Tensor) -> Tensor:
        return fastconv.conv_transpose2d(input, weight, bias[:3], stride=2)

    expected = pythons(lambda: call(input))
    close(torch.func.vmap(call)(input[None])[0], expected)
    gradient = torch.func.grad(lambda x: call(x).square().sum())(input)
    leaf = input.clone().requires_grad_()
    close(gradient, *torch.autograd.grad(pythons(lambda: call(leaf)).square().sum(), leaf))
    with torch.profiler.profile() as profile:
        call(input)
    assert "fastconv::transposed" in {event.key for event in profile.key_averages()}
    compiled: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
    close(compiled(input), expected)
    assert not host.asked


# What is wrong with a call, as the input of a right one and other options.
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = {
    "channels": (lambda input: input[:, :3], {}),
    "groups": (lambda input: input, {"groups": 3}),
    "negative groups": (lambda input: input, {"groups": -1}),
    "nothing to convolve": (lambda input: input[..., :0], {}),
    "no output": (lambda input: input, {"padding": 9}),
    "type": (Tensor.double, {}),
    "bias": (lambda input: input, {"bias": torch.zeros(5)}),
}


@functions
@pytest.mark.parametrize("batched", [True, False], ids=["", "unbatched"])
@pytest.mark.parametrize(("change", "options"), WRONG.values(), ids=WRONG)
def test_errors_are_pythons(
    host: Host, function: Function, change: Any, options: dict[str, Any], batched: bool
) -> None:
    input, weight, _ = function.tensors()
    input = change(input)

    def call() -> None:
        function.ours(input if batched else input[0], weight, **options)

    with pytest.raises(RuntimeError) as ours:
        call()
    with pytest.raises(RuntimeError) as others:
        pythons(call)
    assert str(ours.value) == str(others.value)


@functions
def test_a_residual_of_another_size(host: Host, function: Function) -> None:
    input, weight, _ = function.tensors()
    with pytest.raises(RuntimeError, match="Expected residual of the output's size"):
        function.ours(input, weight, residual=input)
    assert host.operators == ["transposed"]


# --- Gradients ------------------------------------------------------------------------------------

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
SUBSETS = [which for n in (1, 2, 3) for which in itertools.combinations(range(3), n)]
GEOMETRY = {"stride": 2, "padding": 1, "output_padding": 1, "groups": 2}


@functions
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_bits_are_pythons(host: Host, function: Function, dtype: torch.dtype, last: bool) -> None:
    """Output and gradients, for a gradient of the output in either memory format."""

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1) if last else tensor

    input, weight, bias = (tensor.to(dtype) for tensor in function.tensors())
    above = torch.randn(function.ours(input, weight, bias, **GEOMETRY).shape).to(dtype)

    def results() -> list[Tensor]:
        leaves = [one.detach().requires_grad_() for one in (laid_out(input), weight, bias)]
        output = function.ours(*leaves, **GEOMETRY)
        found = [output.detach()]
        for grad in (above, laid_out(above)):
            found += torch.autograd.grad(output, leaves, grad, retain_graph=True)
        return found

    ours = results()
    # PyTorch's dispatcher has to see the conjugates of complex tensors.
    gradients = [] if dtype.is_complex else ["forward", "weight_grad"] * 2
    assert host.filled == ["transposed"] * 2 + gradients
    assert_same(ours, pythons(results))


@functions
@pytest.mark.parametrize("how", ["grad", "inputs", "only leaves"])
@pytest.mark.parametrize("wanted", SUBSETS, ids=str)
def test_only_wanted_gradients(
    host: Host, function: Function, wanted: tuple[int, ...], how: str
) -> None:
    """The input gradient is the forward pass; a bias's is a sum."""

    def gradients(call: Callable[..., Tensor]) -> list[Tensor | None]:
        torch.manual_seed(0)
        some = function.tensors(requires_grad=True)
        if how == "only leaves":
            some = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(some)]
        chosen, loss = [some[i] for i in wanted], call(*some, **GEOMETRY).square().sum()
        if how == "grad":
            return [*torch.autograd.grad(loss, chosen)]
        loss.backward(inputs=chosen if how == "inputs" else None)
        return [t.grad for t in some]

    close(gradients(function.ours), gradients(function.theirs))
    both = {0: "forward", 1: "weight_grad"}
    assert host.filled == ["transposed", *(both[i] for i in wanted if i in both)]


@functions
@pytest.mark.parametrize("wanted", SUBSETS, ids=str)
def test_recorded_gradients(host: Host, function: Function, wanted: tuple[int, ...]) -> None:
    def gradients(call: Callable[..., Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        some = function.tensors(requires_grad=True)
        loss = call(*some, **GEOMETRY).square().sum()
        found = torch.autograd.grad(loss, [some[i] for i in wanted], create_graph=True)
        return [*found, *torch.autograd.grad(sum(t.square().sum() for t in found), some)]

    close(gradients(function.ours), gradients(function.theirs))


@functions
def test_second_derivatives(host: Host, function: Function) -> None:
    shapes = tuple((1, *shape[1:]) if len(shape) > 1 else shape for shape in function.shapes)
    some = [torch.randn(shape).double() for shape in (shapes[0], function.shapes[1], shapes[2])]
    leaves = [one.requires_grad_() for one in some]
    call = lambda *leaves: function.ours(*leaves, **GEOMETRY)  # noqa: E731
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


# --- Nodes ----------------------------------------------------------------------------------------


@functions
def test_the_node(host: Host, function: Function) -> None:
    """It saves input and weight alone, and is the output's own, which is no view."""
    some = function.tensors(requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        output = function.ours(*some, groups=2)
    assert [tuple(tensor.shape) for tensor in saved] == list(function.shapes[:2])
    assert not output._is_view()
    node = output.grad_fn
    assert node.name() == type(node).__name__ == NODE
    assert isinstance(node, torch.autograd.graph.Node)
    for (edge, _), leaf in zip(node.next_functions, some, strict=True):
        assert edge.variable is leaf


@functions
def test_saved_tensors_may_lie_elsewhere(host: Host, function: Function) -> None:
    some = function.tensors(requires_grad=True)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: packed[i]):
        output = function.ours(*some, groups=2)
    packed[1].zero_()
    input_grad, weight_grad = torch.autograd.grad(output.sum(), some[:2])
    assert input_grad.eq(0).all()
    assert weight_grad.ne(0).any()


@functions
@pytest.mark.parametrize("which", [0, 1])
def test_tensors_changed_in_place(host: Host, function: Function, which: int) -> None:
    some = function.tensors(requires_grad=True)
    output = function.ours(*some, groups=2).sum()
    with torch.no_grad():
        some[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@functions
def test_hooks(host: Host, function: Function) -> None:
    some = function.tensors(requires_grad=True)
    output = function.ours(*some, groups=2)
    output.retain_grad()
    seen: list[str] = []
    output.register_hook(lambda grad: seen.append("tensor") or grad * 2)
    output.grad_fn.register_prehook(lambda grads: seen.append("before"))
    output.grad_fn.register_hook(lambda *_: seen.append("after"))
    some[1].register_post_accumulate_grad_hook(lambda _: seen.append("leaf"))
    output.sum().backward()
    assert seen == ["tensor", "before", "after", "leaf"]
    assert output.grad.eq(2).all()
    assert some[2].grad.eq(2 * output.numel() / 6).all()


def test_anomaly_mode(host: Host) -> None:
    some = FUNCTIONS[1].tensors(requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        anomaly = torch.autograd.detect_anomaly()
    with anomaly, noted_warnings() as words:
        output = fastconv.conv_transpose2d(*some, groups=2)
        with pytest.raises(RuntimeError, match=f"'{NODE}' returned nan"):
            output.backward(torch.full_like(output, torch.nan))
    (warning,) = words
    assert "in test_anomaly_mode" in warning, "where forward was called"


@functions
def test_inference_tensors_are_not_saved(host: Host, function: Function) -> None:
    input, weight, _ = function.tensors()
    with torch.inference_mode():
        made = input + 0
        assert function.ours(made, weight).is_inference()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        function.ours(made, weight.requires_grad_())
    assert not function.ours(made, weight.detach()).requires_grad


@functions
@pytest.mark.parametrize("recorded", [False, True], ids=["", "recorded"])
def test_autocast(host: Host, function: Function, recorded: bool) -> None:
    """Tensors are cast, and backward passes within the region compute in the types they get."""

    def results() -> list[Tensor]:
        torch.manual_seed(1)
        some = function.tensors(requires_grad=recorded)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = function.ours(*some, groups=2)
            assert output.dtype == torch.bfloat16
            if not recorded:
                return [output]
            return [output, *torch.autograd.grad(output.float().square().sum(), some)]

    ours = results()
    assert host.filled[0] == "transposed"
    assert {tensor.dtype for tensor in host.asked[0][1:4]} == {torch.bfloat16}
    assert_same(ours, pythons(results))


@functions
@pytest.mark.parametrize("which", range(4))
def test_an_epilogue_that_is_recorded(host: Host, function: Function, which: int) -> None:
    """It is a transposed convolution in the library, and PyTorch's functions."""
    some = function.tensors()
    residual = torch.randn_like(function.ours(*some, groups=2))
    (*some, residual)[which].requires_grad_()
    host.filled.clear()
    options: dict[str, Any] = {"activation": "silu", "residual": residual, "groups": 2}
    output = function.ours(*some, **options)
    close(output, F.silu(function.theirs(*some, groups=2) + residual))
    assert host.filled == ["transposed"]
    output.sum().backward()
    assert (*some, residual)[which].grad is not None
    with torch.no_grad():
        close(function.ours(*some, **options), output)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        fastconv.ConvTranspose1d(4, 6, 3, stride=2), nn.ReLU(), fastconv.ConvTranspose1d(6, 2, 3)
    )


def trained(net: nn.Module) -> list[Tensor]:
    net(torch.ones(2, 4, 9)).square().sum().backward()
    return [parameter.grad for parameter in net.parameters() if parameter.grad is not None]


def test_compiled_autograd(host: Host) -> None:
    from torch._dynamo import compiled_autograd

    def gradients() -> list[Tensor]:
        torch.compiler.reset()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            return trained(net())

    expected = trained(net())
    close(gradients(), expected)
    close(pythons(gradients), expected)


def test_layers(host: Host) -> None:
    gradients = trained(net())
    assert host.filled == ["transposed"] * 2 + ["forward", "weight_grad", "weight_grad"]
    assert_same(gradients, pythons(lambda: trained(net())))
    layer = fastconv.ConvTranspose2d(4, 6, 3, stride=2)
    host.filled.clear()
    assert layer(torch.ones(4, 5, 5), output_size=(12, 11)).shape == (6, 12, 11)
    assert host.filled == ["transposed"]


def test_a_bypass(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within ``planner.only``, whose plans the table cannot hold, all calls run in Python."""
    monkeypatch.setattr(native, "_module", host.module)
    some = FUNCTIONS[1].tensors(requires_grad=True)
    recorded = fastconv.conv_transpose2d(*some, groups=2)
    gradients = torch.autograd.grad(recorded.sum(), some, retain_graph=True)
    count = len(host.filled)
    with planner.only("direct"):
        close(fastconv.conv_transpose2d(*some, groups=2), recorded)
        close(torch.autograd.grad(recorded.sum(), some), gradients)
    assert len(host.filled) == count

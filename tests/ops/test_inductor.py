"""The pass that replaces a convolution and what follows it by ``fused`` in compiled graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fastconv
from fastconv.backends.epilogue import applied
from fastconv.ops import inductor
from fastconv.problem import ACTIVATIONS, Epilogue

FUSED = ["fastconv.fused.default"]
INPUT, WEIGHT = torch.randn(2, 4, 6, 5), torch.randn(4, 4, 3, 3)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "DEVICES", ("cpu",))


def convolution(input: Tensor, weight: Tensor) -> Tensor:
    return fastconv.conv2d(input, weight, padding=1)


def calls(graph: Graph) -> list[str]:
    """The operators of a graph, without sizes."""
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in names if "sym_size" not in name]


def fused_graph(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """Traces a function as Inductor does, applies the pass, and checks the graph's results.

    The function takes the inputs, and the weight between the first and the others.
    """
    inputs = (inputs[0], WEIGHT.to(inputs[0].dtype), *inputs[1:])
    module = make_fx(function, select_decomp_table(), tracing_mode="symbolic")(*inputs)
    inductor.fuse(module.graph)
    module.recompile()
    rounding = TOLERANCE[inputs[0].dtype]
    torch.testing.assert_close(module(*inputs), function(*inputs), atol=rounding, rtol=rounding)
    return module


@pytest.mark.parametrize(
    ("residual", "dtype"),
    [("none", torch.float32), ("second", torch.bfloat16), ("first", torch.float32)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_epilogue(activation: str, residual: str, dtype: torch.dtype) -> None:
    epilogue = Epilogue(activation, 0.2 if activation == "leaky_relu" else 0.0)

    def block(input: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        output = convolution(input, weight)
        if residual != "none":
            output = output + other if residual == "second" else other + output
        return applied(output, None, epilogue)

    input, other = torch.randn(2, 2, 4, 6, 5, dtype=dtype).unbind()
    graph = fused_graph(block, input, other).graph
    if (activation, residual) == ("identity", "none"):
        assert calls(graph) == ["fastconv.forward.default"]
        return
    assert calls(graph) == FUSED
    (node,) = (node for node in graph.nodes if node.op == "call_function" and "fused" in str(node))
    assert node.args[-2:] == (activation, epilogue.slope)


def relu_and_the_sum(input: Tensor, weight: Tensor, other: Tensor) -> Any:
    output = convolution(input, weight) + other
    return output.relu(), output


def relu_and_the_convolution(input: Tensor, weight: Tensor, other: Tensor) -> Any:
    output = convolution(input, weight)
    return (output + other).relu(), output


def silu_and_its_sigmoid(input: Tensor, weight: Tensor, other: Tensor) -> Any:
    output = convolution(input, weight)
    factor = output.sigmoid()
    return output * factor, factor


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (relu_and_the_sum, ["fastconv.fused.default", "aten.relu.default"]),
        (
            relu_and_the_convolution,
            ["fastconv.forward.default", "aten.add.Tensor", "aten.relu.default"],
        ),
        (
            silu_and_its_sigmoid,
            ["fastconv.forward.default", "aten.sigmoid.default", "aten.mul.Tensor"],
        ),
    ],
)
def test_what_others_use_stays(block: Callable[..., Any], expected: list[str]) -> None:
    input, other = torch.randn(2, 2, 4, 6, 5).unbind()
    assert calls(fused_graph(block, input, other).graph) == expected


def twice(input: Tensor, weight: Tensor) -> Tensor:
    output = convolution(input, weight)
    return output + output


def infinite_slope(input: Tensor, weight: Tensor) -> Tensor:
    return functional.leaky_relu(convolution(input, weight), inf)  # fused takes finite slopes


@pytest.mark.parametrize("block", [twice, infinite_slope])
def test_what_fused_would_not_do(block: Callable[..., Any]) -> None:
    found = calls(fused_graph(block, torch.rand(2, 4, 6, 5)).graph)
    assert found[0] == "fastconv.forward.default"
    assert FUSED[0] not in found


def test_a_weight_that_changes_after_the_convolution() -> None:
    def block(input: Tensor, weight: Tensor) -> Tensor:
        output = convolution(input, weight)
        weight.zero_()
        return output.relu()

    weight = WEIGHT.clone()
    module = make_fx(block, select_decomp_table(), tracing_mode="fake")(INPUT, weight)
    inductor.fuse(module.graph)
    assert "aten.copy_.default" in calls(module.graph), "by which the weight is changed"
    assert "fastconv.forward.default" in calls(module.graph)


def test_unused_nodes_of_others_stay() -> None:
    def block(input: Tensor, weight: Tensor) -> Tensor:
        input.sin()
        return convolution(input, weight).relu()

    graph = fused_graph(block, INPUT).graph
    assert calls(graph) == ["aten.sin.default", *FUSED]


@pytest.mark.parametrize(
    "other",
    [
        torch.randn(4, 1, 1),
        torch.randn(2, 4, 6, 5, dtype=torch.float64),
        torch.randn(1, 2, 4, 6, 5),
        torch.tensor(2.0),
    ],
    ids=["broadcast", "another type", "another rank", "a number"],
)
def test_residuals_that_are_none(other: Tensor) -> None:
    graph = fused_graph(lambda x, w, y: convolution(x, w) + y, torch.randn(2, 4, 6, 5), other).graph
    assert calls(graph)[0] == "fastconv.forward.default"


def test_strides_of_another_format() -> None:
    """A sum with the residual's strides is not replaced: what is fused has the convolution's."""
    input, other = torch.randn(2, 2, 4, 6, 5).unbind()
    last = other.contiguous(memory_format=torch.channels_last)
    module = fused_graph(lambda x, w, y: (y + convolution(x, w)).relu(), input, last)
    expected = torch.relu(last + convolution(input, WEIGHT)).stride()
    assert module(input, WEIGHT, last).stride() == expected


def test_two_layers() -> None:
    def block(input: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        return (convolution(convolution(input, weight).relu(), weight) + other).relu()

    input, other = torch.randn(2, 2, 4, 6, 5).unbind()
    assert calls(fused_graph(block, input, other).graph) == 2 * FUSED


def test_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    def block(input: Tensor, weight: Tensor) -> Tensor:
        return convolution(input, weight).relu()

    input = torch.randn(2, 4, 6, 5)
    for value, expected in (("0", 2), ("1", 1)):
        monkeypatch.setenv(inductor.VARIABLE, value)
        assert len(calls(fused_graph(block, input).graph)) == expected
    monkeypatch.setenv(inductor.VARIABLE, "yes")
    with pytest.raises(ValueError, match="should be 0 or 1, or not set, but got 'yes'"):
        fused_graph(block, input)


def test_other_devices_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "DEVICES", ("cuda",))
    graph = fused_graph(lambda x, w: convolution(x, w).relu(), torch.randn(2, 4, 6, 5)).graph
    assert calls(graph) == ["fastconv.forward.default", "aten.relu.default"]


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
def test_compiled() -> None:
    """Inductor applies the pass."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    input, layer = torch.randn(2, 4, 6, 5), fastconv.Conv2d(4, 4, 3)
    with torch.no_grad(), config.patch(force_disable_caches=True):
        compiled = torch.compile(lambda x: layer(x).relu(), fullgraph=True)
        found, (code,) = run_and_get_code(compiled, input)
        torch.testing.assert_close(found, layer(input).relu())
    assert "torch.ops.fastconv.fused.default" in code
    assert "torch.ops.fastconv.forward" not in code


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
@pytest.mark.skipif(not hasattr(torch.Tag, "needs_exact_strides"), reason="PyTorch has no such tag")
def test_strides_that_the_user_asked_for() -> None:
    """Inductor computes what ``fused`` reads with the strides that eager mode gives it."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    def block(input: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        input = (input * 2).contiguous(memory_format=torch.channels_last)
        return (convolution(input, weight) + other.cos()).relu()

    torch._dynamo.reset()
    other = torch.randn(2, 4, 6, 5).contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), config.patch(force_disable_caches=True):
        _, (code,) = run_and_get_code(torch.compile(block, fullgraph=True), INPUT, WEIGHT, other)
    assert FUSED[0] in code
    assert code.count("empty_strided_cpu((2, 4, 6, 5), (120, 1, 20, 4)") == 2


def test_passes_of_the_user() -> None:
    """Ours comes first; each of the user's is called and cached as before."""
    from torch._inductor import config, custom_graph_pass

    if not hasattr(custom_graph_pass, "get_custom_graph_passes"):
        pytest.skip("this version of PyTorch takes a single pass")

    def theirs(graph: Graph) -> None:
        pass

    for given in (theirs, [theirs, theirs]):
        with config.patch(post_grad_custom_pre_pass=given):
            inductor._add_pass()
            ours, *others = config.post_grad_custom_pre_pass
        assert ours.uuid()
        assert others == (given if isinstance(given, list) else [given])


def test_every_thread_has_the_pass() -> None:
    from torch._inductor import config

    import_module("torch._inductor.fx_passes.post_grad")  # adds the pass, if it is the first import
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(lambda: config.post_grad_custom_pre_pass).result()
    assert type(found).__module__ == inductor.__name__

"""``torch.compile`` and ``torch.export`` trace whole graphs, which give eager mode's results."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import gradcheck
from torch.export import Dim

import fastconv
import oracle
from effort import PATIENCE_S
from fastconv import _precision

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler"),
    ),
]
OPTIONS = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


def _tensors(batch: int = 2, height: int = 9, width: int = 8) -> list[Tensor]:
    return [torch.randn(shape) for shape in ((batch, 4, height, width), (6, 2, 3, 2), (6,))]


def _assert_same(
    compiled: Callable[..., Tensor], eager: Callable[..., Tensor], tensors: list[Tensor]
) -> None:
    grad_output = torch.randn_like(eager(*tensors))
    actual, expected = (
        oracle.with_gradients(function, tensors, grad_output) for function in (compiled, eager)
    )
    torch.testing.assert_close(actual, expected)
    assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in expected]


@pytest.mark.parametrize("backend", BACKENDS)
def test_function(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code is compiled anew, and CI=1 turns on PyTorch's strict checks of itself."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CI", "1")

    def block(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fastconv.conv2d(input.sin(), weight, bias, **OPTIONS)

    _assert_same(torch.compile(block, backend=backend, fullgraph=True), block, _tensors())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("asked", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_only_some_gradients(asked: tuple[int, ...], backend: str) -> None:
    def gradients(*tensors: Tensor) -> Any:
        def loss(*tensors: Tensor) -> Tensor:
            return fastconv.conv2d(*tensors, **OPTIONS).sin().sum()

        return torch.func.grad(loss, asked)(*tensors)

    tensors = _tensors()
    compiled = torch.compile(gradients, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), gradients(*tensors))
    leaves = [tensor.requires_grad_() for tensor in tensors]
    forward = torch.compile(fastconv.conv2d, backend=backend, fullgraph=True)
    found, expected = (
        torch.autograd.grad(function(*leaves, **OPTIONS).sum(), [leaves[i] for i in asked])
        for function in (forward, oracle.conv2d)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": 1},
        {"padding": "same", "dilation": 2},
        {"padding": "valid", "stride": [1, 2]},
    ],
    ids=str,
)
def test_forms_of_arguments(options: dict[str, Any]) -> None:
    def call(*tensors: Tensor) -> Tensor:
        return fastconv.conv2d(*tensors, groups=2, **options)

    _assert_same(torch.compile(call, backend="aot_eager", fullgraph=True), call, _tensors())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("weight_too", [False, True], ids=["", "weight"])
def test_memory_formats(memory_format: torch.memory_format, weight_too: bool) -> None:
    def call(*tensors: Tensor) -> Tensor:
        return fastconv.conv2d(*tensors, **OPTIONS)

    input, weight, bias = _tensors()
    input = input.to(memory_format=memory_format)
    if weight_too:
        weight = weight.to(memory_format=memory_format)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    _assert_same(compiled, call, [input, weight, bias])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_gradients_keep_their_layout(memory_format: torch.memory_format) -> None:
    def loss(input: Tensor, weight: Tensor) -> Tensor:
        tokens = fastconv.conv2d(input, weight, stride=2).flatten(2).transpose(1, 2)
        return (tokens @ torch.ones(6, 5)).sum()

    input, weight = torch.randn(2, 4, 8, 6), torch.randn(6, 4, 2, 2).to(memory_format=memory_format)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    _assert_same(compiled, loss, [input, weight])
    theirs = oracle.with_gradients(
        lambda *leaves: nn.functional.conv2d(*leaves, stride=2).sum(),
        [input, weight],
        torch.ones(()),
    )
    ours = oracle.with_gradients(compiled, [input, weight], torch.ones(()))
    assert [gradient.stride() for gradient in ours] == [gradient.stride() for gradient in theirs]


# No side equals one of the weight's: PyTorch takes sides that are equal at first for the same one.
SIZES = [(5, 9, 8), (3, 12, 8), (2, 7, 19), (4, 30, 11)]


def test_dynamic_shapes_compile_once() -> None:
    def call(*tensors: Tensor) -> Tensor:
        return fastconv.conv2d(*tensors, **OPTIONS)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for size in SIZES:
        _assert_same(compiled, call, _tensors(*size))
    assert counter.frame_count == 1


def test_marked_dimensions_compile_once() -> None:
    module = fastconv.Conv2d(4, 6, 3, padding="same")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for size in SIZES:
        input = _tensors(*size)[0]
        for dim in (0, 2, 3):
            torch._dynamo.mark_dynamic(input, dim)
        torch.testing.assert_close(compiled(input), module(input))
    assert counter.frame_count == 1


def test_automatic_dynamic_shapes_compile_twice() -> None:
    module = fastconv.Conv2d(4, 6, 3, stride=2, padding=((1, 0), (0, 2)))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for batch, height, width in ((5, 9, 8), (3, 12, 11), (2, 7, 19), (4, 30, 14)):
        input = torch.randn(batch, 4, height, width)
        torch.testing.assert_close(compiled(input), module(input))
    assert counter.frame_count == 2


def _network() -> nn.Module:
    return nn.Sequential(
        fastconv.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        fastconv.Conv2d(8, 8, (3, 2), stride=2, padding=((1, 0), (0, 2)), groups=4),
        nn.ReLU(),
        fastconv.Conv2d(8, 5, 1, padding=1, padding_mode="circular"),
    )


def test_network_trains() -> None:
    eager, trained = _network(), _network()
    trained.load_state_dict(eager.state_dict())
    compiled = torch.compile(trained, backend="aot_eager", fullgraph=True)
    input = torch.randn(2, 3, 10, 11)
    for network in (eager, compiled):
        network(input).square().mean().backward()
    for ours, expected in zip(trained.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


def _precisions(graph: torch.fx.GraphModule) -> list[str | None]:
    """The precision of each convolution of a graph."""
    return [
        node.args[-1]
        for node in graph.graph.nodes
        if node.target is torch.ops.fastconv.forward.default
    ]


def test_precision_inside_and_outside() -> None:
    seen: list[list[str | None]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        seen.append(_precisions(graph))
        return graph

    def both(input: Tensor, weight: Tensor) -> Tensor:
        with fastconv.precision("ieee"):
            inside = fastconv.conv2d(input, weight)
        return inside + fastconv.conv2d(input, weight)

    compiled = torch.compile(both, backend=backend, fullgraph=True)
    input, weight = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)
    for _ in range(2):
        compiled(input, weight)
        with fastconv.precision("tf32"):
            compiled(input, weight)
    assert seen == [["ieee", None], ["ieee", "tf32"]]  # Nothing else was compiled.


def test_precision_of_threads() -> None:
    """Code compiled for one precision does not serve a thread that has chosen another."""
    seen: list[list[str | None]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            seen.append(_precisions(graph))
            return graph(*tensors)

        return run

    compiled = torch.compile(fastconv.conv2d, backend=backend, fullgraph=True)
    input, weight = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)

    def within(mode: Any) -> None:
        with fastconv.precision(mode):
            compiled(input, weight)

    with fastconv.precision("tf32"), ThreadPoolExecutor(1) as thread:
        for _ in range(2):
            compiled(input, weight)
            thread.submit(within, "ieee").result(PATIENCE_S)
            thread.submit(compiled, input, weight).result(PATIENCE_S)  # The thread has chosen none.
    compiled(input, weight)
    assert seen == 2 * [["tf32"], ["ieee"], ["tf32"]] + [[None]]


def test_precision_where_tracing_stops() -> None:
    """Untraced code is inside a context that traced code has entered, and the other way round."""
    seen: list[Any] = []

    @torch.compiler.disable
    def untraced(input: Tensor, weight: Tensor) -> Tensor:
        seen.append(_precision.override_untraced())
        with fastconv.precision("tf32"):
            seen.append(_precision.override_untraced())
            return traced(input, weight)

    def traced(input: Tensor, weight: Tensor) -> Tensor:
        return fastconv.conv2d(input, weight)

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*tensors: Any) -> Any:
            seen.extend(_precisions(graph))
            return graph(*tensors)

        return run

    def both(input: Tensor, weight: Tensor) -> Tensor:
        with fastconv.precision("ieee"):
            before = fastconv.conv2d(input, weight)
            within = untraced(input, weight)
            after = fastconv.conv2d(input, weight)
        return before + within + after + fastconv.conv2d(input, weight)

    compiled = torch.compile(both, backend=backend)
    traced = torch.compile(traced, backend=backend)
    tensors = torch.randn(1, 2, 6, 6), torch.randn(3, 2, 3, 3)
    for _ in range(2):
        seen.clear()
        compiled(*tensors)
        assert seen == ["ieee", "ieee", "tf32", "tf32", "ieee", None]
    assert _precision.override() is None


TRANSPOSED = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}


@pytest.mark.parametrize("function", ["conv2d", "conv_transpose2d"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
@pytest.mark.usefixtures("host_path")
def test_one_call_computes_both_gradients(function: str, dynamic: bool) -> None:
    """One alone is computed by itself, and its graph keeps nothing that it does not read."""
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    options = OPTIONS if function == "conv2d" else TRANSPOSED
    alone = "input_grad" if function == "conv2d" else "forward"
    eager = partial(getattr(fastconv, function), **options)
    shapes = ((3, 4, 9, 8), (6, 2, 3, 2) if function == "conv2d" else (4, 3, 3, 2), (6,))
    for wanted, expected in (
        ((0, 1, 2), "backward"),
        ((0, 1), "backward"),
        ((0, 2), alone),
        ((1,), "weight_grad"),
    ):
        graphs.clear()
        torch._dynamo.reset()
        compiled = torch.compile(
            eager, backend=aot_autograd(fw_compiler=compiler), fullgraph=True, dynamic=dynamic
        )
        leaves = [torch.randn(shape, requires_grad=i in wanted) for i, shape in enumerate(shapes)]
        found, reference = (
            torch.autograd.grad(of(*leaves).sin().sum(), [leaves[i] for i in wanted])
            for of in (compiled, eager)
        )
        assert all(map(torch.equal, found, reference))
        assert [one.stride() for one in found] == [one.stride() for one in reference]
        called = [node.target for node in graphs[-1].graph.nodes if node.op == "call_function"]
        ours = [target for target in called if str(target).startswith("fastconv.")]
        assert ours == [getattr(torch.ops.fastconv, expected).default]
        given = [node.meta["val"] for node in graphs[-1].graph.nodes if node.op == "placeholder"]
        tensors = [value for value in given if isinstance(value, Tensor)]
        assert len(tensors) == (3 if expected == "backward" else 2)


def test_export_of_gradients() -> None:
    class Gradients(nn.Module):
        def forward(self, grad: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            geometry = ((1, 1), (1, 1, 1, 1), (1, 1), 1, None)
            gradients: tuple[Tensor, ...] = torch.ops.fastconv.backward(
                grad, input, weight, *geometry, False, True
            )
            return gradients

    def example(batch: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape) for shape in ((batch, 6, 8, 7), (batch, 4, 8, 7)))

    weight, batch = torch.randn(6, 4, 3, 3), Dim("batch")
    program = torch.export.export(
        Gradients(), (*example(3), weight), dynamic_shapes=({0: batch}, {0: batch}, None)
    )
    exported = _reloaded(program).module()
    for count in (3, 5):
        some = example(count)
        found, expected = exported(*some, weight), Gradients()(*some, weight)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("host_path")
def test_gradcheck(backend: str) -> None:
    """Compiled gradients are those of the function, by either registration of the operators."""

    def block(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden = fastconv.conv2d(input, weight, bias, **OPTIONS).tanh()
        hidden = fastconv.conv_transpose2d(hidden, weight, bias, stride=(1, 2), groups=2).tanh()
        return fastconv.conv2d(hidden, weight[:4, :, :2, :1], groups=4 // 2, padding=(0, 1))

    shapes = ((2, 4, 6, 7), (4, 2, 3, 2), (4,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    assert gradcheck(compiled, leaves, nondet_tol=0)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = fastconv.Conv2d(4, 6, 3, stride=(2, 1), padding=((1, 0), (2, 1)))

    def forward(self, input: Tensor) -> Tensor:
        return self.convolution(input).relu()


def _reloaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


@pytest.mark.parametrize("reload", [lambda program: program, _reloaded], ids=["", "reloaded"])
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize(
    ("dynamic", "sizes"),
    [(None, [(2, 9)]), ({0: Dim("batch"), 2: Dim("height", min=4)}, [(2, 9), (1, 4), (7, 30)])],
    ids=["static", "dynamic"],
)
def test_export(
    dynamic: dict[int, Any] | None,
    sizes: list[tuple[int, int]],
    strict: bool,
    reload: Callable[..., Any],
) -> None:
    block = _Block()
    program = torch.export.export(
        block,
        (torch.randn(2, 4, 9, 8),),
        dynamic_shapes=None if dynamic is None else {"input": dynamic},
        strict=strict,
    )
    assert any(node.target is torch.ops.fastconv.forward.default for node in program.graph.nodes)
    exported = reload(program).module()
    for batch, height in sizes:
        input = torch.randn(batch, 4, height, 8)
        torch.testing.assert_close(exported(input), block(input))


LOADING = """
import sys, torch
import fastconv

program, input, expected = sys.argv[1:]
found = torch.export.load(program).module()(torch.load(input))
torch.testing.assert_close(found, torch.load(expected))
print("loaded")
"""


def test_export_in_another_process(tmp_path: Path) -> None:
    """A saved program runs in a process that knows nothing but that it imports fastconv."""
    block, input = _Block(), torch.randn(2, 4, 9, 8)
    program = torch.export.export(block, (input,))
    paths = [str(tmp_path / name) for name in ("program.pt2", "input.pt", "expected.pt")]
    torch.export.save(program, paths[0])
    torch.save(input, paths[1])
    torch.save(block(input).detach(), paths[2])
    command = [sys.executable, "-c", LOADING, *paths]
    assert subprocess.check_output(command, text=True).splitlines()[-1] == "loaded"

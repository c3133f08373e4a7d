"""Fused epilogues under what PyTorch does to operators: autograd, transforms, graphs."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim
from torch.func import grad, jacrev, jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

import fastconv
import oracle
from epilogues import (
    ALL,
    FORMATS,
    FUNCTIONS,
    GEOMETRY,
    INPUT,
    OPTIONS,
    RESIDUAL,
    WEIGHT,
    assert_close,
    conv2d,
    every_activation,
    random_tensors,
    reference,
)
from fastconv import ops
from recorder import Recorder

pytestmark = pytest.mark.usefixtures("host_path")

# --- What PyTorch does to operators ---------------------------------------------------------------


def _operator_arguments(dtype: torch.dtype = torch.float32) -> Any:
    input, weight, bias, residual = random_tensors(*ALL, dtype=dtype)
    for with_bias, with_residual, formats in product((0, 1), (0, 1), product(FORMATS, FORMATS)):
        some = [
            tensor.to(memory_format=FORMATS[name])
            for tensor, name in zip((input, weight), formats, strict=True)
        ]
        others = (bias if with_bias else None, residual if with_residual else None)
        yield *some, *others, *GEOMETRY, "silu", 0.0


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
def test_opcheck(requires_grad: bool) -> None:
    for arguments in (*_operator_arguments(),)[::13]:  # One has bias and residual, one neither.
        prepared = [
            argument.requires_grad_(requires_grad) if isinstance(argument, Tensor) else argument
            for argument in arguments
        ]
        torch.library.opcheck(ops.fused, tuple(prepared))


def test_promised_layouts_are_returned() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for arguments in _operator_arguments(dtype):
            output = ops.fused(*arguments)
            on_meta = (a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
            promised = ops.fused(*on_meta)
            assert promised.device.type == "meta"
            assert (promised.shape, promised.stride(), promised.dtype) == (
                output.shape,
                output.stride(),
                output.dtype,
            )


# Activations without corners, where finite differences would be wrong.
SMOOTH = ("identity", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh", ("leaky_relu", 0.9))


@pytest.mark.parametrize("activation", SMOOTH, ids=str)
def test_gradcheck(activation: Any) -> None:
    tensors = [tensor.requires_grad_() for tensor in random_tensors(*ALL)]
    function = partial(conv2d, activation=activation)
    gradcheck(
        function, tensors, fast_mode=True,
        check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
    )  # fmt: skip
    gradgradcheck(
        function, tensors, fast_mode=True,
        check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True,
    )  # fmt: skip


@every_activation
def test_gradients(activation: Any) -> None:
    tensors = random_tensors(*ALL)
    grad_output = torch.randn(RESIDUAL, dtype=torch.float64)
    ours, theirs = (
        oracle.with_gradients(function, tensors, grad_output, activation=activation)
        for function in (conv2d, reference)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", range(4), ids=["input", "weight", "bias", "residual"])
def test_only_what_is_recorded_is_composed(which: int) -> None:
    """One fused operator computes everything unless gradients are recorded."""
    tensors = random_tensors(*ALL)
    with Recorder() as recorder:
        conv2d(*tensors)
        tensors[which].requires_grad_()
        output = conv2d(*tensors)
        with torch.no_grad():
            conv2d(*tensors)
        with torch.inference_mode():
            conv2d(*tensors)
    assert output.requires_grad
    assert [name for name, _ in recorder.calls] == ["fused", "forward", "fused", "fused"]


def test_rounding() -> None:
    """Results are rounded once, or after each step where gradients are recorded."""
    input, weight = torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), torch.ones(1, 1, 1, 1)
    weight = weight.bfloat16() * (1 + 2**-7)
    input = input * (1 + 2**-7)  # The product has one bit more than bfloat16: 2^-14.
    residual = torch.full_like(input, -1 - 2**-6)
    once = fastconv.conv2d(input, weight, residual=residual)
    assert once.item() == 2**-14
    recorded = fastconv.conv2d(input, weight.requires_grad_(), residual=residual)
    assert recorded.item() == 0


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, *x: grad(lambda *y: f(*y).sin().sum(), (0, 1, 2, 3))(*x),
    "jvp": lambda f, *x: jvp(f, x, tuple(tensor.cos() for tensor in x)),
    "jacrev": lambda f, *x: jacrev(f, (1, 3))(*x),
    "vmap of grad": lambda f, *x: vmap(
        grad(lambda *y: f(*y).sin().sum(), (0, 1, 3)), (None, None, None, 0)
    )(*x[:3], torch.stack([x[3], -x[3]])),
    "grad of vmap": lambda f, *x: grad(
        lambda w: vmap(f, (0, None, None, None))(torch.stack([x[0], -x[0]]), w, *x[2:]).sum()
    )(x[1]),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_function_transforms(transform: Callable[..., Any]) -> None:
    tensors = random_tensors(*ALL)
    torch.testing.assert_close(transform(conv2d, *tensors), transform(reference, *tensors))


MAPPED = [dims for dims in product((None, 0, 1), repeat=4) if dims.count(None) < 4][::3]


@pytest.mark.parametrize("dims", [*MAPPED, (None, None, None, 0)], ids=str)
def test_vmap(dims: tuple[int | None, ...]) -> None:
    shapes = (
        shape if dim is None else (*shape[:dim], 3, *shape[dim:])
        for shape, dim in zip(ALL, dims, strict=True)
    )
    tensors = random_tensors(*shapes)
    expected = [
        reference(*(
            tensor if dim is None else tensor.select(dim, index)
            for tensor, dim in zip(tensors, dims, strict=True)
        ))
        for index in range(3)
    ]  # fmt: skip
    torch.testing.assert_close(vmap(conv2d, dims)(*tensors), torch.stack(expected))
    nothing = [t if d is None else t.narrow(d, 0, 0) for t, d in zip(tensors, dims, strict=True)]
    assert vmap(conv2d, dims)(*nothing).shape == (0, *RESIDUAL)


def test_vmap_without_a_residual() -> None:
    input, weight = random_tensors((3, *INPUT), WEIGHT)
    expected = torch.stack([reference(image, weight) for image in input])
    torch.testing.assert_close(vmap(conv2d, (0, None))(input, weight), expected)
    with pytest.raises(RuntimeError, match=r"size \[2, 6, 2, 7\], but got residual of size \[6\]"):
        vmap(lambda x: conv2d(x, weight, None, torch.ones(6).double()))(input)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(to: torch.dtype, requires_grad: bool) -> None:
    input, weight, bias, residual = random_tensors(*ALL, dtype=torch.float32)
    mixed = [input.to(to), weight.requires_grad_(requires_grad), bias.double().float(), residual]
    with torch.autocast("cpu", dtype=to):
        output = conv2d(*mixed)
    assert (output.dtype, output.requires_grad) == (to, requires_grad)
    cast = [tensor.detach().to(to) for tensor in mixed]
    if not requires_grad:
        assert_close(output, cast, "gelu")
    else:
        torch.testing.assert_close(output, reference(*cast), rtol=2e-2, atol=2e-2)
    with pytest.raises(RuntimeError, match="should be the same"):
        conv2d(*mixed)


class _Tagged(Tensor):
    """A tensor that records calls of ``fastconv.conv2d``."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is fastconv.conv2d:
            cls.seen.append(kwargs)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("which", range(4), ids=["input", "weight", "bias", "residual"])
def test_torch_function(which: int) -> None:
    tensors = random_tensors(*ALL)
    expected = conv2d(*tensors)
    tensors[which] = tensors[which].as_subclass(_Tagged)
    _Tagged.seen = []
    output = conv2d(*tensors)
    assert type(output) is _Tagged
    torch.testing.assert_close(output.as_subclass(Tensor), expected)
    (seen,) = _Tagged.seen
    assert seen["activation"] == "gelu"
    assert seen["residual"] is tensors[3]


def test_flops() -> None:
    def count(requires_grad: bool, **options: Any) -> int:
        tensors = random_tensors(*ALL)
        tensors[1].requires_grad_(requires_grad)
        with FlopCounterMode(display=False) as counter:
            fastconv.conv2d(*tensors[:3], **OPTIONS, **options)
        return counter.get_total_flops()

    residual = torch.zeros(RESIDUAL, dtype=torch.float64)
    assert count(False) > 0
    for requires_grad in (False, True):
        assert count(requires_grad, activation="silu", residual=residual) == count(False)


# --- Graphs ---------------------------------------------------------------------------------------


class _Block(nn.Module):
    """A network with one layer for each activation, some with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(fastconv.Conv2d(4, 4, 3, padding=1) for _ in FUNCTIONS)

    def forward(self, input: Tensor) -> Tensor:
        for i, (layer, activation) in enumerate(zip(self.layers, FUNCTIONS, strict=True)):
            input = fastconv.conv2d(
                input, layer.weight, layer.bias, padding=((1, 1), (1, 1)), activation=activation,
                residual=input if activation is None or i % 2 else None,
            )  # fmt: skip
        return input


def _targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


FUSED, FORWARD = "fastconv.fused.default", "fastconv.forward.default"


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_compile(training: bool) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model, input = _Block(), torch.randn(2, 4, 5, 6)
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    with torch.set_grad_enabled(training):
        ours, expected = compiled(input), model(input)
    torch.testing.assert_close(ours, expected)
    targets = _targets(graphs[0].graph)
    counts = targets.count(FUSED), targets.count(FORWARD)
    assert counts == ((0, len(FUNCTIONS)) if training else (len(FUNCTIONS), 0))
    if training:
        ours, theirs = (
            torch.autograd.grad(output.sum(), list(model.parameters()))
            for output in (ours, expected)
        )
        torch.testing.assert_close(ours, theirs)
    else:
        assert set(targets) == {FUSED}


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_export_and_decompositions(tmp_path: Path) -> None:
    model, input = _Block().eval(), torch.randn(2, 4, 5, 6)
    program = torch.export.export(model, (input,), dynamic_shapes=({0: Dim("batch")},))
    assert set(_targets(program.graph)) == {FUSED}
    assert set(_targets(program.run_decompositions().graph)) == {FUSED}
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    table = torch.export.default_decompositions()
    table.update(torch._decomp.get_decompositions([torch.ops.fastconv.fused]))
    decomposed = program.run_decompositions(table)
    assert not any("fastconv" in target for target in _targets(decomposed.graph))
    path = tmp_path / "model.onnx"
    torch.onnx.export(program, (), path, dynamo=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (argument,) = session.get_inputs()
    for batch in (1, 3):
        input = torch.randn(batch, 4, 5, 6)
        with torch.no_grad():
            expected = model(input)
        torch.testing.assert_close(torch.export.load(file).module()(input), expected)
        file.seek(0)
        torch.testing.assert_close(decomposed.module()(input), expected)
        (result,) = session.run(None, {argument.name: input.numpy()})
        torch.testing.assert_close(torch.from_numpy(result), expected)

"""The operators of batch normalization: schemas, meta functions, compilation, transforms."""

from __future__ import annotations

import copy
import re
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import fastconv
from batchnorm_cases import EPS, Case, Tensors
from fastconv.kernels.batchnorm.plan import beside

forward = torch.ops.fastconv.batch_norm_forward
backward = torch.ops.fastconv.batch_norm_backward

CASES = [
    Case(3, 4, (3, 3), residual=True),
    Case(3, 8, (3, 3), torch.bfloat16, mixed=True, channels_last=True, activation="silu"),
    Case(4, 5, (), torch.float64, activation="gelu", residual=True, affine=False),
    Case(3, 4, (2, 3, 2), channels_last=True, activation="identity", residual=True),
]


def _arguments(case: Case, tensors: Tensors, training: bool = True) -> tuple[Any, ...]:
    running = (tensors.running_mean, tensors.running_var)
    options = (None, training, 0.1, EPS, case.activation, case.slope)
    return tensors.x, tensors.residual, tensors.weight, tensors.bias, *running, *options


@pytest.mark.usefixtures("host_path")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operators_pass_opcheck(case: Case, training: bool) -> None:
    tensors = Tensors.random(case)
    for leaf in tensors.leaves:
        leaf.requires_grad_()
    torch.library.opcheck(forward, _arguments(case, tensors, training))
    tensors = Tensors.random(case)
    y, mean, invstd = forward(*_arguments(case, tensors, training))
    which = beside(case.activation, case.slope, case.residual)
    other = {None: None, "output": y, "residual": tensors.residual}[which]
    given = (tensors.grad, tensors.x, other, tensors.weight, tensors.bias, mean, invstd, training)
    for wanted in ((True, True, case.residual), (False, True, False), (True, False, False)):
        torch.library.opcheck(
            backward, (*given, case.residual, case.activation, case.slope, *wanted)
        )


@pytest.mark.usefixtures("host_path")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_functions_compute_the_same(dynamic: bool) -> None:
    case = Case(3, 4, (3, 3), channels_last=True, residual=True)

    def function(x: Tensor, residual: Tensor, mean: Tensor, var: Tensor, *affine: Tensor) -> Tensor:
        output = fastconv.batch_norm_act(
            x * 2, mean, var, *affine, training=True, activation="relu", residual=residual
        )
        return output + 1

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    results = []
    for call in (function, compiled):
        tensors = Tensors.random(case)
        leaves = [leaf.requires_grad_() for leaf in tensors.leaves]
        x, residual, *affine = leaves
        output = call(x, residual, tensors.running_mean, tensors.running_var, *affine)
        gradients = torch.autograd.grad(output, leaves, tensors.grad)
        results.append((output, tensors.running_mean, tensors.running_var, *gradients))
    torch.testing.assert_close(*results)


class _Network(nn.Module):
    """Two blocks; the second one has a residual and averages all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fastconv.ConvBNAct2d(4, 4, 3, padding=1)
        self.second = fastconv.ConvBNAct2d(4, 4, 3, padding=1, momentum=None, activation="silu")

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x), residual=x)


def _step(model: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [*(one.grad for one in model.parameters()), *(one.clone() for one in model.buffers())]


@pytest.mark.usefixtures("host_path")
@pytest.mark.parametrize("sizes", [(3,), (3, 2, 5)], ids=["static", "dynamic"])
def test_compiled_modules_train(sizes: tuple[int, ...]) -> None:
    torch._dynamo.reset()
    model = _Network()
    expected = copy.deepcopy(model)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for size in sizes:
        x = torch.randn(size, 4, 6, 5)
        torch.testing.assert_close(_step(compiled, x), _step(expected, x))
    assert counter.frame_count == min(len(sizes), 2)


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
def test_inductor_copies_nothing() -> None:
    """Running statistics are written where they are, and tensors go from one operator to the next.

    So there is nothing that Inductor would have to compile.
    """
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()

    def blocks(x: Tensor, mean: Tensor, var: Tensor, *parameters: Tensor) -> Tensor:
        def block(x: Tensor, activation: Any, residual: Tensor | None, *of: Tensor) -> Tensor:
            weight, *affine = of
            return fastconv.conv_bn_act(
                x, weight, None, mean, var, *affine, padding=1, training=True,
                activation=activation, residual=residual,
            )  # fmt: skip

        return block(block(x, "relu", None, *parameters[:3]), "silu", x, *parameters[3:])

    def step(function: Any) -> list[Tensor]:
        torch.manual_seed(0)
        x, mean, var = map(torch.rand, ((2, 4, 6, 5), (4,), (4,)))
        shapes = 2 * ((4, 4, 3, 3), (4,), (4,))
        parameters = [torch.rand(shape, requires_grad=True) for shape in shapes]
        output = function(x, mean, var, *parameters)
        grads = torch.autograd.grad(output, parameters, torch.ones_like(output))
        return [output.detach(), mean, var, *grads]

    with config.patch(force_disable_caches=True):
        compiled = torch.compile(blocks, fullgraph=True)
        found, codes = run_and_get_code(step, compiled)
    torch.testing.assert_close(found, step(blocks))
    code = "\n".join(codes)
    assert code.count("fastconv.batch_norm_forward.default(") == 2
    assert code.count("fastconv.batch_norm_backward.default(") == 2
    assert not re.search(r"= empty_strided_\w+\(|aten\.(clone|copy)", code), code


def test_exported_programs_keep_the_operator() -> None:
    layer = fastconv.ConvBNAct2d(3, 4, 3).train()
    program = torch.export.export(layer, (torch.randn(2, 3, 7, 7),))
    targets = {node.target for node in program.graph.nodes}
    assert forward.default in targets


def test_mapped_statistics_are_those_of_each_batch() -> None:
    x, weight = torch.randn(5, 3, 4, 3, 3), torch.randn(5, 4)
    mean, var = torch.zeros(5, 4), torch.ones(5, 4)

    def function(x: Tensor, weight: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return fastconv.batch_norm_act(x, mean, var, weight, training=True, activation="relu")

    found = torch.vmap(function)(x, weight, mean, var)
    for number in range(5):
        running = (torch.zeros(4), torch.ones(4))
        expected = torch.relu(F.batch_norm(x[number], *running, weight[number], training=True))
        torch.testing.assert_close(found[number], expected)
        torch.testing.assert_close((mean[number], var[number]), running)
    shared = torch.vmap(lambda x: function(x, weight[0], None, None))(x)  # type: ignore[arg-type]
    torch.testing.assert_close(shared[0], found[0])
    with pytest.raises(RuntimeError, match="were not batched"):
        torch.vmap(function, (0, 0, None, None))(x, weight, mean[0], var[0])


@pytest.mark.usefixtures("host_path")
def test_gradients_of_transforms() -> None:
    x = torch.randn(3, 4, 2, 2, dtype=torch.float64)
    weight = torch.randn(4, dtype=torch.float64)

    def loss(by: Any) -> Any:
        return lambda x, weight: by(x, weight).square().sum()

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        return fastconv.batch_norm_act(x, None, None, weight, training=True, activation="tanh")

    def theirs(x: Tensor, weight: Tensor) -> Tensor:
        # By elementary operations: PyTorch's gradient of a tangent of F.batch_norm is another one.
        variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        return torch.tanh((x - mean) * torch.rsqrt(variance + EPS) * weight[:, None, None])

    for transform in (
        lambda f: torch.func.grad(f, (0, 1)),
        lambda f: torch.func.jacrev(torch.func.grad(f)),
        lambda f: torch.func.jacfwd(torch.func.grad(f, 1)),
        lambda f: torch.func.grad(lambda x, w: torch.func.jvp(f, (x, w), (x + 1, w))[1]),
    ):
        found, expected = transform(loss(ours))(x, weight), transform(loss(theirs))(x, weight)
        torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("host_path")
def test_mapped_gradients() -> None:
    """As of ``is_grads_batched``; and the operator's own rule."""
    x = torch.randn(3, 4, 2, 2, requires_grad=True)
    output = fastconv.batch_norm_act(x, None, None, training=True, activation="relu")
    grads = torch.randn(5, *output.shape)
    (found,) = torch.autograd.grad(output, x, grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(output, x, grad, retain_graph=True)[0])


def test_mapped_backward_operator() -> None:
    x, grad, weight = torch.randn(5, 3, 4, 2), torch.randn(3, 4, 2), torch.randn(5, 4)
    mean, invstd = torch.randn(5, 4), torch.rand(5, 4)

    def function(x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, wanted: bool) -> Any:
        options = (True, False, "relu", 0.0, True, wanted, False)
        return backward(grad, x, None, weight, None, mean, invstd, *options)

    for wanted in (True, False):
        operands = (x, weight, mean, invstd)
        found = torch.vmap(function, (0, 0, 0, 0, None))(*operands, wanted)
        for number in range(5):
            expected = function(*(one[number] for one in operands), wanted)
            torch.testing.assert_close([one[number] for one in found], list(expected))


@pytest.mark.usefixtures("host_path")
def test_versions_count_what_is_written() -> None:
    mean, var = torch.zeros(4), torch.ones(4)
    x = torch.randn(3, 4)
    fastconv.batch_norm_act(x, mean, var)
    assert (mean._version, var._version) == (0, 0)
    fastconv.batch_norm_act(x, mean, var, training=True)
    assert min(mean._version, var._version) > 0

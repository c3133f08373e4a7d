"""What ``prepare`` finds in a network, plans and compiles. A CPU stands in for the GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fastconv
from conftest import Loads
from fastconv import native
from fastconv.backends import cuda
from fastconv.backends.batchnorm import launches
from fastconv.jit import pool
from fastconv.kernels import planner
from fastconv.kernels.family import Operands
from fastconv.network.preparation import Preparation, needs_of
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem

pytestmark = pytest.mark.usefixtures("host_path")


class Block(nn.Module):
    """Two equal layers, one of another shape, and a BatchNorm whose buffers training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = fastconv.Conv2d(3, 64, 3, padding=1)
        self.body = nn.Sequential(
            *(fastconv.Conv2d(64, 64, 3, padding=1, bias=False) for _ in range(2))
        )
        self.norm = nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(self.first(x).relu())).relu()


Passes = dict[tuple[str, tuple[int, ...]], int]


def _passes(found: Preparation) -> Passes:
    return {(one.name, one.problem.weight_shape): one.calls for one in found.passes}


FIRST, BODY = (64, 3, 3, 3), (64, 64, 3, 3)
EXAMPLE = torch.randn(8, 3, 40, 40)


def test_a_training_step(loads: Loads) -> None:
    model = Block()
    found = fastconv.prepare(model, EXAMPLE)
    assert _passes(found) == {
        ("forward", FIRST): 1,
        ("forward", BODY): 2,
        ("input_grad", BODY): 2,
        ("weight_grad", BODY): 2,
        ("weight_grad", FIRST): 1,  # the example requires no gradient
    }
    assert found.kernels == found.new_kernels == len(loads) > 5
    assert loads.begun == set(loads), "compiled while others are planned"
    assert {one.family for one in found.passes} == {"hopper"}
    again = fastconv.prepare(model, EXAMPLE)
    assert (again.kernels, again.new_kernels) == (found.kernels, 0)
    assert f"{found.kernels} kernels, 0 of them new" in str(again)
    assert "weight_grad  8x64x40x40  64x64x3x3  float32  hopper      2" in str(found)


def test_inference(loads: Loads) -> None:
    model = Block()
    with torch.no_grad():
        found = fastconv.prepare(model.eval(), EXAMPLE)
    assert _passes(found) == {("forward", FIRST): 1, ("forward", BODY): 2}


def test_a_first_layer_whose_input_requires_a_gradient(loads: Loads) -> None:
    model = Block()
    found = fastconv.prepare(model, EXAMPLE.clone().requires_grad_())
    assert _passes(found)["input_grad", FIRST] == 1


def test_other_layers(loads: Loads) -> None:
    """Transposed layers are input gradients, and their gradients are the other two passes."""
    model = nn.Sequential(
        fastconv.Conv1d(16, 32, 5, padding=2),
        nn.LeakyReLU(),
        fastconv.ConvTranspose1d(32, 8, 4, stride=2, padding=1),
    )
    found = fastconv.prepare(model, torch.empty(4, 16, 500))
    first, second = (32, 16, 1, 5), (32, 8, 1, 4)
    assert _passes(found) == {
        ("forward", first): 1,
        ("weight_grad", first): 1,
        ("input_grad", second): 1,
        ("forward", second): 1,
        ("weight_grad", second): 1,
    }


def test_epilogues_of_transposed_layers(loads: Loads) -> None:
    """Kernels have them if all positions have a tap; a residual, if the stride is 1."""
    input, weight, bias = torch.empty(2, 64, 40, 40), torch.empty(64, 32, 2, 2), torch.empty(32)

    def block(x: Tensor, stride: int) -> None:
        for activation, added in (("relu", False), ("silu", True)):
            size = (2, 32, *(stride * 39 + 2,) * 2)
            residual = torch.empty(size) if added else None
            fastconv.conv_transpose2d(
                x, weight, bias, stride, activation=activation, residual=residual
            )

    labels = {}
    with torch.no_grad():
        for stride in (1, 2, 3):
            found = fastconv.prepare(lambda x, stride=stride: block(x, stride), input)
            labels[stride] = sorted(one.label for one in found.passes)
    assert labels == {
        1: ["input_grad+relu", "input_grad+residual+silu"],
        2: ["input_grad", "input_grad+relu"],
        3: ["input_grad"],
    }


def test_fused_layers(loads: Loads) -> None:
    """They are those that ``optimize`` makes; an output size is part of the problem."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.along = fastconv.FusedConv1d(16, 32, 5, padding=2)
            self.up = fastconv.FusedConvTranspose1d(32, 8, 4, stride=2, padding=1)
            self.along.activation, self.up.activation = "gelu", "tanh"

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.along(x, x.repeat(1, 2, 1)), output_size=[1001])

    with torch.no_grad():
        found = fastconv.prepare(Model(), torch.empty(4, 16, 500))
    assert [one.label for one in found.passes] == ["forward+residual+gelu", "input_grad+tanh"]
    assert found.passes[1].problem.input_size == (1, 1001)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_precision(loads: Loads, precision: Any) -> None:
    model = Block()
    with fastconv.precision(precision), torch.no_grad():
        fastconv.prepare(model, EXAMPLE)
    # With ieee, kernels split each number into two parts.
    parts = {dict(kernel.constants)["parts"] for kernel in loads if kernel.entry == "convolve"}
    assert (2 in parts) == (precision == "ieee")


def test_autocast_and_memory_format(loads: Loads) -> None:
    model = Block()
    model, example = (one.to(memory_format=torch.channels_last) for one in (model, EXAMPLE))
    with torch.autocast("cpu", torch.bfloat16):
        found = fastconv.prepare(model, example)
    assert {one.dtype for one in found.passes} == {torch.bfloat16}
    kernels = [dict(kernel.constants) for kernel in loads if kernel.entry != "pack"]
    assert {constants["Scalar"] for constants in kernels} == {"fastconv::bfloat16"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_convolutions_of_blocks(loads: Loads, dtype: torch.dtype) -> None:
    """They leave statistics in 16 bits, which normalizations take."""
    block = fastconv.ConvBNAct2d(64, 128, 1, dtype=dtype)
    alone = fastconv.Conv2d(64, 128, 1, dtype=dtype)
    block, alone = (one.to(memory_format=torch.channels_last) for one in (block, alone))

    def network(x: Tensor) -> Tensor:
        y = block(x)
        return fastconv.batch_norm_act(alone(x), None, None, training=True) + y

    input = torch.empty(8, 64, 40, 40, dtype=dtype).to(memory_format=torch.channels_last)
    with torch.no_grad():
        asked = needs_of(network, (input,), {})
    convolutions = [need for need in asked if isinstance(need, cuda.Need)]
    shares = [need.of.shares for need in asked if isinstance(need, launches.Need)]
    if dtype == torch.bfloat16:
        assert sorted(need.statistics for need in convolutions) == [False, True]
        (given,) = (need for need in convolutions if need.statistics)
        assert shares == [cuda.planned(given).shares, 0]
        assert shares[0] > 0
    else:
        assert [need.statistics for need in convolutions] == [False]
        assert shares == [0, 0]
    fastconv.prepare(network, input)
    before = cuda._ready.cache_info().misses
    for need in convolutions:
        cuda.ready(need)
    assert cuda._ready.cache_info().misses == before


@pytest.mark.parametrize("host", [True, False], ids=["native", "Python"])
def test_blocks_on_both_host_paths(
    host: bool, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ask for the same, also where one family is forced, which no native call serves."""
    block = fastconv.ConvBNAct2d(64, 128, 1, dtype=torch.bfloat16)
    block = block.to(memory_format=torch.channels_last)
    input = torch.empty(8, 64, 40, 40, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    for name in ("conv2d", "batch_norm_act", "conv_bn_act"):
        if not host:
            monkeypatch.setattr(native, name, None)
    for context in (nullcontext(), planner.only("hopper")):
        with torch.no_grad(), context:
            asked = needs_of(block, (input,), {})
        (convolution,) = (need for need in asked if isinstance(need, cuda.Need))
        (shares,) = (need.of.shares for need in asked if isinstance(need, launches.Need))
        assert convolution.statistics
        assert shares == cuda.planned(convolution).shares > 0
    fastconv.prepare(block, input)


def test_epilogues(loads: Loads) -> None:
    """Without gradients, an epilogue is part of a kernel; with them, PyTorch computes it."""
    input, weight = torch.empty(8, 64, 40, 40), torch.empty(BODY)

    def block(x: Tensor) -> Tensor:
        x = fastconv.conv2d(x, weight, padding=1, activation="relu")
        return fastconv.conv2d(x, weight, padding=1, activation="relu", residual=x)

    asked = needs_of(block, (input,), {})
    assert [need.epilogue for need in asked] == [Epilogue("relu"), Epilogue("relu", 0.0, True)]
    assert [operands.epilogue for operands in map(_operands, asked)] == [
        need.epilogue for need in asked
    ]
    labels = [one.label for one in fastconv.prepare(block, input).passes]
    assert labels == ["forward+relu", "forward+residual+relu"]
    recorded = needs_of(block, (input.requires_grad_(),), {})
    assert {(need.plan.__name__, need.epilogue, calls) for need, calls in recorded.items()} == {
        ("forward", NO_EPILOGUE, 2),
        ("input_grad", NO_EPILOGUE, 2),
    }


def _operands(need: cuda.Need) -> Operands:
    """The operands that the planner of a need gets."""
    given: list[Operands] = []
    cuda.planned(need._replace(plan=lambda _, operands, *__: given.append(operands)))
    return given[0]


def test_prepared_passes_are_those_of_calls(loads: Loads) -> None:
    """Otherwise a call would plan and compile anew."""
    model = Block()
    fastconv.prepare(model, EXAMPLE)
    assert not cuda._given_plans
    input, weight = torch.empty(8, 64, 40, 40), torch.empty(BODY)
    problem = Problem.of(input.shape, weight.shape, (1, 1), (1, 1, 1, 1), (1, 1), 1)
    need = cuda.need(planner.forward, problem, input, weight, torch.empty_like(input), None)
    assert need is not None
    before = cuda._ready.cache_info().misses
    cuda.ready(need)
    assert cuda._ready.cache_info().misses == before


def test_nothing_changes(loads: Loads) -> None:
    """Buffers, gradients and parameters stay."""
    model = Block()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fastconv.prepare(model, EXAMPLE)
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attributes_are_put_back(loads: Loads) -> None:
    """A model must not keep tensors without data for its next calls."""

    class Keeps(Block):
        grid: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.grid is None:
                self.grid = torch.ones(x.shape[-2:])
            return super().forward(x * self.grid)

    model = Keeps()
    fastconv.prepare(model, EXAMPLE)
    assert "grid" not in vars(model)
    assert type(model(EXAMPLE)) is Tensor


def test_no_gpu() -> None:
    found = fastconv.prepare(Block(), EXAMPLE)
    assert found.passes == ()
    assert str(found) == "no convolution of fastconv's on a GPU: there was nothing to prepare"


def test_fake_tensors(loads: Loads) -> None:
    """They may be larger than memory."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        example = torch.empty(10_000, 3, 1000, 1000)
    found = fastconv.prepare(Block(), example)
    assert found.passes[0].problem.batch == 10_000


def test_functions_and_named_arguments(loads: Loads) -> None:
    model = Block()

    def function(*, image: Tensor) -> dict[str, Tensor]:
        return {"output": fastconv.conv2d(image, model.first.weight)}

    assert _passes(fastconv.prepare(function, image=EXAMPLE))["forward", FIRST] == 1


def _state(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.parametrize("with_grads", [False, True])
def test_functions_change_nothing(loads: Loads, with_grads: bool) -> None:
    """Buffers and gradients of a model that a function refers to stay."""
    model = Block()
    if with_grads:
        model(EXAMPLE).square().mean().backward()
    before, grads = _state(model), [parameter.grad for parameter in model.parameters()]
    copies = [None if grad is None else grad.clone() for grad in grads]
    found = fastconv.prepare(lambda x: model(x).sum(), EXAMPLE)
    assert _passes(found)["weight_grad", BODY] == 2
    assert all(map(torch.equal, _state(model), before))
    for parameter, grad, copy in zip(model.parameters(), grads, copies, strict=True):
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, copy)


def test_constants_have_values(loads: Loads) -> None:
    """A model may read and change constants that it makes itself."""
    layer = fastconv.Conv2d(3, 64, 3)

    def model(x: Tensor) -> Tensor:
        scale, rows = torch.tensor(2.0), torch.tensor(38)
        x = x * scale if scale > 1 else x
        return layer(x[:, :, : int(rows.add_(1))])

    (found,) = fastconv.prepare(model, EXAMPLE.clone()).passes[:1]
    assert found.problem.input_size == (39, 40)


def test_a_block(loads: Loads) -> None:
    """A step of two models has the same passes as with ``prepare``, and changes nothing."""
    model, critic = Block(), fastconv.Conv2d(64, 16, 5)
    targets = torch.randn(8, 16, 36, 36)
    before = _state(model) + _state(critic)
    with fastconv.preparing() as step:
        images = torch.randn(8, 3, 40, 40)
        loss = (critic(model(images)) - targets).square().mean()
        loss.backward()
        assert step.report is None
        assert not loads
    assert step.report is not None
    whole = nn.Sequential(model, critic)
    assert _passes(step.report) == _passes(fastconv.prepare(whole, EXAMPLE))
    assert step.report.new_kernels == len(loads) > 5
    assert all(map(torch.equal, _state(model) + _state(critic), before))
    assert {parameter.grad for parameter in whole.parameters()} == {None}
    assert type(model(EXAMPLE)) is Tensor


def test_a_block_under_autocast(loads: Loads) -> None:
    model = Block()
    with fastconv.preparing() as step, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(EXAMPLE)
    assert step.report is not None
    assert {one.dtype for one in step.report.passes} == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert type(model(EXAMPLE)) is Tensor  # autocast keeps no weight without data


def test_a_block_that_fails(loads: Loads) -> None:
    """It branches on a number of a fake tensor, which has none."""
    model = Block()
    with pytest.raises(RuntimeError), fastconv.preparing() as step:
        assert model(EXAMPLE).sum().backward() or model(EXAMPLE).sum() > 0
    assert step.report is None
    assert not loads
    assert {parameter.grad for parameter in model.parameters()} == {None}


def test_progress(loads: Loads, capsys: pytest.CaptureFixture[str]) -> None:
    model = Block()
    fastconv.prepare(model, EXAMPLE)
    assert capsys.readouterr().err == ""
    loads.clear()
    found = fastconv.prepare(model, EXAMPLE, progress=True)
    total = found.new_kernels
    assert capsys.readouterr().err.endswith(f"\rfastconv: compiled {total} of {total} kernels\n")


def test_a_model_that_needs_data() -> None:
    with pytest.raises(RuntimeError, match="cannot prepare the model, as it cannot be called with"):
        fastconv.prepare(lambda x: x.sum().item(), EXAMPLE)


@pytest.mark.parametrize("example", [(), (3,), ((8, 3, 224, 224),)])
def test_no_example(example: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes a model and an example .*, torch\.randn"):
        fastconv.prepare(Block(), *example)


def _jobs(monkeypatch: pytest.MonkeyPatch, value: str) -> Callable[[], int | None]:
    monkeypatch.setenv(pool.JOBS_VARIABLE, value)
    return pool.compile_jobs


def test_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _jobs(monkeypatch, "3")() == 3
    by_itself = _jobs(monkeypatch, "")()
    assert by_itself is None or by_itself >= 1


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_jobs_that_are_not_a_positive_number(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    with pytest.raises(ValueError, match="COMPILE_JOBS should be a positive number, but got"):
        _jobs(monkeypatch, value)()

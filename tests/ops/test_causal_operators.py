"""The operators of causal convolutions: schemas, meta functions, compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fastconv
from causal_cases import Case, Tensors

CASES = [
    Case(2, 3, 9, 4, states=True),
    Case(2, 8, 9, 4, torch.bfloat16, torch.float32, channels_last=True, sequences=True),
    Case(1, 4, 2, 5, torch.float64, channels_last=True, silu=False, gap=3),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward_and_backward_pass_opcheck(case: Case) -> None:
    tensors = Tensors.random(case)
    inputs = tensors.arguments
    for one in inputs:
        if one is not None and one.is_floating_point():
            one.requires_grad_()
    final = not case.sequences
    torch.library.opcheck(torch.ops.fastconv.causal_forward, (*inputs, case.silu, final))
    plain = [None if one is None else one.detach() for one in inputs]
    states = torch.randn(case.batch, case.dim, case.width - 1).to(case.dtype) if final else None
    torch.library.opcheck(
        torch.ops.fastconv.causal_backward,
        (torch.randn_like(plain[0]), states, *plain, case.silu, True, case.states),
    )


@pytest.mark.parametrize("circular", [False, True], ids=["shifted", "circular"])
def test_update_passes_opcheck(circular: bool) -> None:
    x, weight, bias, *_ = Tensors.random(Case(2, 3, 2, 4)).arguments
    seen = torch.tensor([3, 9], dtype=torch.int32) if circular else None
    torch.library.opcheck(
        torch.ops.fastconv.causal_update,
        (x, torch.randn(2, 3, 5), weight, bias, seen, None, True),
    )


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_compiled_functions_compute_the_same(channels_last: bool) -> None:
    case = Case(2, 8, 12, 4, channels_last=channels_last)

    def function(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        output, states = fastconv.causal_conv1d_fn(
            x * 2, weight, bias, return_final_states=True, activation="silu"
        )
        return output + 1, states

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for call in (function, compiled):
        x, weight, bias, *_ = (
            None if one is None else one.requires_grad_() for one in Tensors.random(case).arguments
        )
        output, states = call(x, weight, bias)
        (output.square().sum() + states.sum()).backward()
        results.append((output, states, x.grad, weight.grad, bias.grad))
    torch.testing.assert_close(*results)


def test_compiled_updates_write_to_the_state() -> None:
    x, weight, bias, *_ = Tensors.random(Case(2, 3, 1, 4)).arguments

    def function(x: Tensor, state: Tensor) -> Any:
        return fastconv.causal_conv1d_update(x[:, :, 0], state, weight, bias, "silu") * 2

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    states = torch.ones(2, 3, 4), torch.ones(2, 3, 4)
    with torch.no_grad():
        assert torch.equal(function(x, states[0]), compiled(x, states[1]))
    assert torch.equal(*states)
    assert torch.equal(states[0][:, :, 3], x[:, :, 0])


def test_symbolic_lengths_are_compiled_once() -> None:
    weight = torch.randn(3, 4)
    graphs = []

    def note(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda x: fastconv.causal_conv1d_fn(x, weight), backend=note, dynamic=True
    )
    for length in (9, 12, 31):
        x = torch.randn(2, 3, length)
        assert torch.equal(compiled(x), fastconv.causal_conv1d_fn(x, weight))
    assert len(graphs) == 1


def test_operations_are_counted() -> None:
    x, weight = torch.randn(2, 3, 10, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        fastconv.causal_conv1d_fn(x, weight).sum().backward()
    forward = 2 * 2 * 3 * 10 * 4
    assert counter.get_total_flops() == 3 * forward
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        fastconv.causal_conv1d_update(torch.randn(2, 3), torch.zeros(2, 3, 3), weight)
    assert counter.get_total_flops() == forward // 10


def test_exported_programs_keep_the_operators() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return fastconv.causal_conv1d_fn(x, self.weight, activation="silu")

    model, x = Model(), torch.randn(2, 3, 10)
    program = torch.export.export(model, (x,))
    targets = {node.target for node in program.graph.nodes}
    assert torch.ops.fastconv.causal_forward.default in targets
    assert torch.equal(program.module()(x), model(x))

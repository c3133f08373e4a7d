"""Causal convolutions on a GPU: real sizes in both layouts, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
from causal_cases import Case, Tensors, check_close, placed, random_cases, reference
from gpu.helpers import CUDA, free_memory

GIB = 1 << 30


@pytest.fixture
def _much_memory() -> Iterator[None]:
    yield from free_memory(24 * GIB)


def _drawn(case: Case) -> Tensors:
    """Random operands, drawn on the GPU."""
    torch.manual_seed(0)
    shape = (case.batch, case.dim, case.length)
    weight_dtype = case.weight_dtype or case.dtype
    states = torch.randn(*shape[:2], case.width - 1, device=CUDA).to(case.dtype)
    return Tensors(
        placed(torch.randn(shape, device=CUDA, dtype=case.dtype), case),
        (torch.randn(case.dim, case.width, device=CUDA) / case.width**0.5).to(weight_dtype),
        torch.randn(case.dim, device=CUDA).to(weight_dtype) if case.bias else None,
        None,
        states if case.states else None,
    )


def _some_channels(tensors: Tensors, step: int) -> Tensors:
    """Every so manieth channel: channels do not depend on each other."""
    bias, states = tensors.bias, tensors.initial_states
    return Tensors(
        tensors.x[:, ::step].contiguous(),
        tensors.weight[::step],
        None if bias is None else bias[::step],
        tensors.seq_idx,
        None if states is None else states[:, ::step],
    )


def _exact(tensors: Tensors, silu: bool) -> Tensor:
    """The output of operands in float64, by whole taps."""
    width, length = tensors.weight.shape[1], tensors.x.shape[2]
    states = tensors.initial_states
    if states is None:
        states = tensors.x.new_zeros(*tensors.x.shape[:2], width - 1)
    extended = torch.cat((states, tensors.x), 2)
    total = torch.zeros_like(tensors.x)
    for tap in range(width):
        total = total + extended[:, :, tap : tap + length] * tensors.weight[:, tap, None]
    if tensors.bias is not None:
        total = total + tensors.bias[:, None]
    return F.silu(total) if silu else total


def _check_all_passes(case: Case, tensors: Tensors, step: int) -> None:
    leaves = [one.requires_grad_() for one in tensors.arguments if one is not None]
    output = fastconv.causal_conv1d_fn(*tensors.arguments, activation=case.activation)
    assert output.mT.is_contiguous() if case.channels_last else output.is_contiguous()
    grad = torch.randn_like(output)
    found = torch.autograd.grad(output, leaves, grad)
    again = torch.autograd.grad(
        fastconv.causal_conv1d_fn(*tensors.arguments, activation=case.activation), leaves, grad
    )
    assert all(map(torch.equal, found, again)), "the same call gave other bits"
    exact = _some_channels(tensors, step).double()
    wanted = [one for one in exact.arguments if one is not None]
    expected_output = _exact(exact, case.silu)
    expected = torch.autograd.grad(expected_output, wanted, grad[:, ::step].double())
    check_close(output[:, ::step], expected_output, case.width, "output")
    terms = case.batch * case.length
    for name, one, other in zip(("x", "weight", "bias", "states"), found, expected, strict=False):
        part = one[:, ::step] if one.dim() == 3 else one[::step]
        check_close(part, other, 4 * case.width if one.dim() == 3 else terms, name)


LARGE = [
    Case(*shape, 4, dtype, channels_last=channels_last)
    for shape in ((1, 12288, 16384), (8, 4096, 2048))
    for dtype in (torch.bfloat16, torch.float32)
    for channels_last in (False, True)
]


@pytest.mark.usefixtures("_much_memory")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large_sequences(case: Case) -> None:
    _check_all_passes(case, _drawn(case), 97)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16, 31, 64], ids="width {}".format)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_widths(width: int, dtype: torch.dtype, channels_last: bool) -> None:
    case = Case(2, 200, 3000, width, dtype, channels_last=channels_last, states=width > 1)
    _check_all_passes(case, _drawn(case), 1)


@pytest.mark.parametrize("case", random_cases(64, 11, (4, 2, 3, 9), 700), ids=str)
def test_small_and_odd_ones(case: Case) -> None:
    """Odd lengths, gaps, misaligned tensors, sequences, states, mixed types."""
    tensors, on_cpu = Tensors.random(case, "cuda"), Tensors.random(case)
    output = fastconv.causal_conv1d_fn(*tensors.arguments, activation=case.activation)
    check_close(output, reference(on_cpu.double(), case.silu), case.width)
    leaves = [one for one in tensors.arguments if one is not None and one.is_floating_point()]
    twins = [one for one in on_cpu.arguments if one is not None and one.is_floating_point()]
    grad = placed(torch.randn(output.shape).to(output), case)
    found = _gradients(tensors, case, leaves, grad)
    expected = _gradients(on_cpu, case, twins, grad.cpu())
    terms = case.batch * case.length + 2 * case.width
    for one, other in zip(found, expected, strict=True):
        check_close(one, other.double(), terms)


def _gradients(tensors: Tensors, case: Case, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    for leaf in leaves:
        leaf.requires_grad_()
    output = fastconv.causal_conv1d_fn(*tensors.arguments, activation=case.activation)
    return list(torch.autograd.grad(output, leaves, grad))


@pytest.mark.parametrize("length", [2, 500])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_final_states(length: int, channels_last: bool) -> None:
    case = Case(3, 72, length, 4, torch.float64, channels_last=channels_last, states=True)
    results = []
    for device in ("cuda", "cpu"):
        tensors = Tensors.random(case, device)
        leaves = [one.requires_grad_() for one in tensors.arguments if one is not None]
        output, states = fastconv.causal_conv1d_fn(
            *tensors.arguments, return_final_states=True, activation="silu"
        )
        (output.square().sum() + states.pow(3).sum()).backward()
        results.append([output, states, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one.cpu(), other)


def test_second_derivatives() -> None:
    case = Case(2, 3, 9, 4, torch.float64, states=True)
    tensors = Tensors.random(case, "cuda")
    inputs = [one.requires_grad_() for one in tensors.arguments if one is not None]

    def function(x: Tensor, weight: Tensor, bias: Tensor, states: Tensor) -> Tensor:
        return fastconv.causal_conv1d_fn(x, weight, bias, None, states, activation="silu")

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("circular", [False, True], ids=["shifted", "circular"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_steps_continue_a_sequence(dtype: torch.dtype, circular: bool) -> None:
    case = Case(5, 1000, 40, 4, dtype, channels_last=True)
    tensors = _drawn(case)
    x, weight, bias, *_ = tensors.arguments
    _, state = fastconv.causal_conv1d_fn(x[:, :, :21], weight, bias, return_final_states=True)
    memory = torch.zeros(9, 1000, 3, device=CUDA, dtype=dtype)
    entries = torch.tensor([7, 1, 0, 4, 8], device=CUDA, dtype=torch.int32)
    memory[entries.long()] = state
    seen = torch.full((5,), 21, device=CUDA, dtype=torch.int32)
    outputs = []
    with torch.no_grad():
        for begin, end in ((21, 22), (22, 25), (25, 26), (26, 40)):
            new = x[:, :, begin] if end == begin + 1 else x[:, :, begin:end]
            outputs.append(
                fastconv.causal_conv1d_update(
                    new, memory, weight, bias, "silu", seen if circular else None, entries
                ).reshape(5, 1000, end - begin)
            )
            seen += end - begin
    exact = _exact(tensors.double(), True)[:, :, 21:]
    check_close(torch.cat(outputs, 2), exact, 4)
    # 21 and 40 inputs: the last three lie at 37 % 3 and after it, or in their order.
    order = torch.arange(37, 40, device=CUDA) % 3 if circular else torch.arange(3, device=CUDA)
    assert torch.equal(memory[entries.long()][:, :, order], x[:, :, 37:])
    assert not memory[[2, 3, 5, 6]].any()


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_more_than_32_bits_of_elements(channels_last: bool) -> None:
    """2.4e9 elements: the last sequence begins beyond 2^31."""
    needed = 40 * GIB
    for _ in free_memory(needed):
        case = Case(3, 20000, 40000, 4, torch.bfloat16, channels_last=channels_last)
        tensors = _drawn(replace(case, bias=False))
        _check_all_passes(replace(case, bias=False), tensors, 1999)


def test_captured_in_a_graph() -> None:
    case = Case(2, 64, 256, 4, torch.bfloat16)
    x, weight, bias, *_ = _drawn(case).arguments
    state = torch.zeros(2, 64, 3, device=CUDA, dtype=torch.bfloat16)
    expected_state = state.clone()

    def call(state: Tensor) -> tuple[Tensor, Tensor]:
        return (
            fastconv.causal_conv1d_fn(x, weight, bias, activation="silu"),
            fastconv.causal_conv1d_update(x[:, :, 0], state, weight, bias, "silu"),
        )

    with torch.no_grad():
        expected = call(expected_state)
        call(torch.zeros_like(state))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(state)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, expected))
    assert torch.equal(state, expected_state)

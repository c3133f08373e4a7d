"""``fastconv.causal_conv1d_fn`` and ``causal_conv1d_update`` against loops in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fastconv
from causal_cases import Case, Tensors, check_close, final_states, random_cases, reference

CASES = [*random_cases(32, 1, (1, 2, 3, 4, 8, 17), 40), Case(1, 2, 70, 64, states=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_float64(case: Case) -> None:
    tensors = Tensors.random(case)
    output = fastconv.causal_conv1d_fn(*tensors.arguments, activation=case.activation)
    assert output.dtype == case.dtype
    assert output.stride() == torch.empty_like(output).stride()
    check_close(output, reference(tensors.double(), case.silu), case.width)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_float64(case: Case) -> None:
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    leaves = [one for one in tensors.arguments if one is not None and one.is_floating_point()]
    wanted = [one for one in exact.arguments if one is not None and one.is_floating_point()]
    for leaf in leaves:
        leaf.requires_grad_()
    output = fastconv.causal_conv1d_fn(*tensors.arguments, activation=case.activation)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output)
    found = torch.autograd.grad(output, leaves, grad)
    expected = torch.autograd.grad(
        reference(exact, case.silu), wanted, grad.double(), materialize_grads=True
    )
    terms = case.batch * case.length + 2 * case.width
    for name, one, other in zip(("x", "weight", "bias or states", "states"), found, expected):  # noqa: B905
        check_close(one, other, terms, name)


@pytest.mark.parametrize("length", [1, 2, 9], ids="length {}".format)
@pytest.mark.parametrize("states", [False, True], ids=["zeros", "states"])
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_final_states_and_their_gradients(length: int, states: bool, channels_last: bool) -> None:
    case = Case(2, 3, length, 4, torch.float64, states=states, channels_last=channels_last)
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    x, initial = tensors.x.requires_grad_(), tensors.initial_states
    inputs = [x] if initial is None else [x, initial.requires_grad_()]
    output, final = fastconv.causal_conv1d_fn(
        *tensors.arguments, return_final_states=True, activation="swish"
    )
    torch.testing.assert_close(final, final_states(exact))
    grads = (torch.randn_like(output), torch.randn_like(final))
    found = torch.autograd.grad((output, final), inputs, grads)
    wanted = [one for one in (exact.x, exact.initial_states) if one is not None]
    expected = torch.autograd.grad(
        (reference(exact, True), final_states(exact)), wanted, grads, materialize_grads=True
    )
    torch.testing.assert_close(found, expected)


def test_final_states_continue_a_sequence() -> None:
    tensors = Tensors.random(Case(2, 3, 20, 5))
    x, weight, bias, *_ = tensors.arguments
    assert x is not None
    whole = fastconv.causal_conv1d_fn(x, weight, bias, activation="silu")
    memory = torch.empty(2, 4, 3).transpose(1, 2)
    first, states = fastconv.causal_conv1d_fn(
        x[:, :, :7], weight, bias, return_final_states=True, final_states_out=memory,
        activation="silu",
    )  # fmt: skip
    assert states is memory
    second = fastconv.causal_conv1d_fn(
        x[:, :, 7:], weight, bias, initial_states=states, activation="silu"
    )
    assert torch.equal(torch.cat((first, second), 2), whole)


def test_sequences_in_a_row_do_not_see_each_other() -> None:
    x, weight, *_ = Tensors.random(Case(1, 3, 12, 4, bias=False)).arguments
    assert x is not None
    seq_idx = torch.tensor([[0] * 5 + [1] * 4 + [-1] * 3], dtype=torch.int32)
    output = fastconv.causal_conv1d_fn(x, weight, seq_idx=seq_idx)
    apart = [fastconv.causal_conv1d_fn(part, weight) for part in (x[:, :, :5], x[:, :, 5:9])]
    assert torch.equal(output, torch.cat((*apart, torch.zeros(1, 3, 3)), 2))


@pytest.mark.parametrize("states", [False, True], ids=["sequences", "states"])
def test_derivatives_of_both_orders(states: bool) -> None:
    case = Case(2, 2, 6, 3, torch.float64, states=states, sequences=not states)
    tensors = Tensors.random(case).double()
    inputs = [one for one in tensors.arguments if one is not None and one.requires_grad]

    def function(x: Tensor, weight: Tensor, bias: Tensor, initial: Tensor | None = None) -> Any:
        return fastconv.causal_conv1d_fn(
            x, weight, bias, tensors.seq_idx, initial,
            return_final_states=states, activation="silu",
        )  # fmt: skip

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


# --- Updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("more", [0, 1, 6], ids="{} more states".format)
@pytest.mark.parametrize("circular", [False, True], ids=["shifted", "circular"])
def test_steps_compute_the_whole_sequence(width: int, more: int, circular: bool) -> None:
    case = Case(2, 3, 14, width, bias=width > 2)
    x, weight, bias, *_ = Tensors.random(case).arguments
    assert x is not None
    states = max(1, width - 1 + more)
    state = torch.zeros(2, 3, states)
    whole = fastconv.causal_conv1d_fn(x, weight, bias, activation="silu")
    outputs, done = [], torch.zeros(2, dtype=torch.int32)
    for count in (1, 3, 1, 7, 2):
        begin = int(done[0])
        new = x[:, :, begin : begin + count]
        outputs.append(
            fastconv.causal_conv1d_update(
                new[:, :, 0] if count == 1 else new, state, weight, bias, "silu",
                done if circular else None,
            ).reshape(2, 3, count)
        )  # fmt: skip
        done += count
    torch.testing.assert_close(torch.cat(outputs, 2), whole)
    newest = torch.arange(14 - min(states, 14), 14)
    places = newest % states if circular else newest - 14
    assert torch.equal(state[:, :, places], x[:, :, newest])


def test_updates_of_chosen_states() -> None:
    x, weight, bias, *_ = Tensors.random(Case(3, 4, 1, 4)).arguments
    assert x is not None
    state = torch.randn(6, 4, 5)
    before = state.clone()
    indices = torch.tensor([4, -1, 2], dtype=torch.int32)
    output = fastconv.causal_conv1d_update(
        x[:, :, 0], state, weight, bias, conv_state_indices=indices
    )
    own = before[[4, 2]].clone()
    expected = fastconv.causal_conv1d_update(x[[0, 2], :, 0], own, weight, bias)
    assert torch.equal(output[[0, 2]], expected)
    assert torch.equal(output[1], torch.zeros(4))
    assert torch.equal(state[[4, 2]], own)
    assert torch.equal(state[[0, 1, 3, 5]], before[[0, 1, 3, 5]])


def test_an_update_has_no_gradient() -> None:
    x, state, weight = torch.randn(2, 3), torch.zeros(2, 3, 3), torch.randn(3, 4)
    output = fastconv.causal_conv1d_update(x, state, weight.requires_grad_())
    with pytest.raises(NotImplementedError, match="has no gradient"):
        output.sum().backward()
    with torch.no_grad():
        assert not fastconv.causal_conv1d_update(x, state, weight).requires_grad


def test_updates_write_to_tensors_that_autograd_has_saved() -> None:
    state = torch.zeros(2, 3, 3)
    product = state * torch.ones(2, 3, 3, requires_grad=True)
    fastconv.causal_conv1d_update(torch.randn(2, 3), state, torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


# --- Errors ---------------------------------------------------------------------------------------


def _call(**changed: Any) -> None:
    arguments: dict[str, Any] = {"x": torch.zeros(2, 3, 8), "weight": torch.zeros(3, 4)}
    fastconv.causal_conv1d_fn(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"activation": "relu"}, "'silu' or 'swish', but got 'relu'"),
        ({"x": torch.zeros(3, 8)}, r"\(batch, dim, length\), but got one of shape \(3, 8\)"),
        ({"weight": torch.zeros(3, 65)}, "width from 1 to 64, but got 65"),
        ({"weight": torch.zeros(3, 0)}, "width from 1 to 64, but got 0"),
        ({"weight": torch.zeros(4, 4)}, "each of the 3 channels"),
        ({"weight": torch.zeros(3, 4).double()}, "float64 goes with float64 alone"),
        ({"bias": torch.zeros(4)}, r"bias should have shape \(3,\), but got \(4,\)"),
        ({"bias": torch.zeros(3).half()}, "type of weight, torch.float32, but got torch.float16"),
        ({"seq_idx": torch.zeros(2, 8)}, "seq_idx should have the type torch.int32"),
        ({"seq_idx": torch.zeros(2, 7).int()}, r"shape \(2, 8\), but got \(2, 7\)"),
        ({"initial_states": torch.zeros(2, 3, 4)}, r"shape \(2, 3, 3\), but got \(2, 3, 4\)"),
        (
            {"initial_states": torch.zeros(2, 3, 3), "seq_idx": torch.zeros(2, 8).int()},
            "should be None where seq_idx is given",
        ),
        (
            {"return_final_states": True, "seq_idx": torch.zeros(2, 8).int()},
            "return_final_states should be False",
        ),
        (
            {"return_final_states": True, "final_states_out": torch.zeros(1)},
            "final_states_out should have shape",
        ),
        ({"weight": torch.zeros(3, 4, device="meta")}, "weight is on meta, but x is on cpu"),
    ],
)  # fmt: skip
def test_errors_name_the_value(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _call(**changed)


def test_types_that_are_not_supported() -> None:
    with pytest.raises(NotImplementedError, match=r"float64, but x has torch\.int32"):
        _call(x=torch.zeros(2, 3, 8, dtype=torch.int32))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"conv_state": torch.zeros(2, 3, 2)}, "at least width - 1 = 3 positions"),
        ({"conv_state": torch.zeros(1, 3, 3)}, r"shape \(2, 3, 3\), but got \(1, 3, 3\)"),
        ({"conv_state": torch.zeros(2, 3, 3).half()}, "conv_state should have the type of x"),
        ({"cache_seqlens": torch.zeros(2)}, "cache_seqlens should have the type torch.int32"),
        ({"conv_state_indices": torch.zeros(3).int()}, r"shape \(2,\), but got \(3,\)"),
    ],
)
def test_errors_of_updates(changed: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(2, 3), "conv_state": torch.zeros(2, 3, 3), "weight": torch.zeros(3, 4)
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        fastconv.causal_conv1d_update(**{**arguments, **changed})


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 0)], ids=str)
def test_empty_sequences(shape: tuple[int, ...]) -> None:
    x = torch.zeros(shape, requires_grad=True)
    weight = torch.ones(shape[1], 4, requires_grad=True)
    output, states = fastconv.causal_conv1d_fn(x, weight, return_final_states=True)
    assert output.shape == shape
    assert states.shape == (*shape[:2], 3)
    output.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(shape[1], 4))

"""The kernels of causal convolutions, emulated: all types, layouts and options, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import fastconv
from causal_cases import Case, Tensors, check_close, final_states, random_cases, reference
from emulator.causal_passes import Run, backward_run, forward_run
from emulator.driver import precompile
from emulator.faults import Fault, with_fault
from fastconv.backends import cuda
from fastconv.backends.causal import launches
from fastconv.kernels.causal import plan
from fastconv.kernels.family import Plan
from fastconv.kernels.gpus import GPUS, H200
from fastconv.ops import causal

T4 = GPUS["sm_75"]

CASES = [
    *random_cases(16, 2, (4, 2, 7), 150),
    # Widths up to the largest, and one tap.
    Case(2, 3, 40, 1, channels_last=True, states=True),
    Case(1, 2, 100, 64, states=True),
    Case(1, 3, 100, 64, torch.bfloat16, channels_last=True, states=True),
    Case(1, 34, 20, 16, torch.float16, channels_last=True),
    # Several tiles, whose halos are those of neighbours; several blocks of channels.
    Case(1, 2, 2304, 4, torch.bfloat16, states=True),
    Case(2, 1, 1100, 5, sequences=True),
    Case(1, 72, 270, 4, torch.bfloat16, torch.float32, channels_last=True, states=True),
    Case(2, 40, 140, 3, channels_last=True, sequences=True),
]


def _grads(case: Case, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(7)
    grad = torch.randn(tensors.x.shape, generator=draw).to(case.dtype)
    shape = (case.batch, case.dim, case.width - 1)
    final = torch.randn(shape, generator=draw).to(case.dtype)
    return grad, None if case.sequences or case.width == 1 else final


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    runs = []
    for case in CASES:
        tensors = Tensors.random(case)
        runs.append(forward_run(case, tensors)[0])
        runs.append(backward_run(case, tensors, *_grads(case, tensors))[0])
    precompile(launch.kernel for run in runs for launch in run.plan.launches)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case) -> None:
    tensors = Tensors.random(case)
    run, y = forward_run(case, tensors)
    run.execute()
    check_close(y, reference(tensors.double(), case.silu), case.width)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Case) -> None:
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    grad, grad_final = _grads(case, tensors)
    run, found = backward_run(case, tensors, grad, grad_final)
    run.execute()
    outputs, grads = [reference(exact, case.silu)], [grad.double()]
    if grad_final is not None:
        outputs.append(final_states(exact))
        grads.append(grad_final.double())
    wanted = [exact.x, exact.weight]
    wanted += [exact.bias] if exact.bias is not None else []
    wanted += [exact.initial_states] if exact.initial_states is not None else []
    expected = list(torch.autograd.grad(outputs, wanted, grads, materialize_grads=True))
    terms = case.batch * case.length + 2 * case.width
    check_close(found.x, expected[0], 2 * case.width, "x")
    check_close(found.weight, expected[1], terms, "weight")
    if exact.bias is not None:
        check_close(found.bias, expected[2], terms, "bias")
    if case.states and case.width > 1:
        check_close(found.initial_states, expected[-1], 2 * case.width, "states")


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_shares_of_several_tiles(channels_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has several tiles, of several sequences, and adds them up itself."""
    case = Case(5, 3, 300, 4, channels_last=channels_last)
    tensors = Tensors.random(case)
    grad, _ = _grads(case, tensors)
    apart, found_apart = backward_run(case, tensors, grad, None)
    monkeypatch.setattr(plan, "BLOCKS_PER_SM", 1)
    few, found = backward_run(case, tensors, grad, None, replace(GPUS["sm_90a"], sm_count=1))
    assert few.plan.scratch_bytes < apart.plan.scratch_bytes
    for run in (apart, few):
        run.execute()
    assert torch.equal(found.x, found_apart.x)
    torch.testing.assert_close(found.weight, found_apart.weight, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.bias, found_apart.bias, rtol=1e-4, atol=1e-4)


def test_small_shared_memory() -> None:
    """Tiles of wide kernels in float64 that fit a GPU of 64 KiB."""
    case = Case(1, 40, 70, 64, torch.float64, channels_last=True)
    tensors = Tensors.random(case)
    grad, _ = _grads(case, tensors)
    run, found = backward_run(case, tensors, grad, None, T4)
    assert run.plan.launches[0].shared_bytes <= T4.shared_budget(2)
    run.execute()
    exact = tensors.double()
    (expected,) = torch.autograd.grad(reference(exact, True), [exact.x], grad.double())
    check_close(found.x, expected, 128)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_gradients_of_x_alone(channels_last: bool) -> None:
    case = Case(2, 4, 50, 4, channels_last=channels_last)
    tensors = Tensors.random(case)
    grad, _ = _grads(case, tensors)
    runs = [backward_run(case, tensors, grad, None, parameters=one) for one in (True, False)]
    for run, _ in runs:
        run.execute()
    assert len(runs[1][0].plan.launches) == 1
    assert torch.equal(runs[0][1].x, runs[1][1].x)


@pytest.mark.parametrize("case", CASES[:16:3], ids=str)
def test_results_depend_on_what_they_read_alone(case: Case) -> None:
    """Loud values in other channels, later positions and other sequences change no bit."""
    tensors = Tensors.random(case)
    quiet, y = forward_run(case, tensors)
    quiet.execute()
    half, channel = case.length // 2, case.dim // 2
    loud = Tensors.random(case)
    loud.x[:, :, half + 1 :] *= 2.0**10
    loud.x[:, channel + 1 :] = torch.nan
    loud.x[case.batch // 2 + 1 :] = torch.nan
    run, after = forward_run(case, loud)
    run.execute()
    kept = (slice(case.batch // 2 + 1), slice(channel + 1), slice(half + 1))
    assert torch.equal(y[kept], after[kept])


@pytest.mark.parametrize("case", CASES[:16:3], ids=str)
def test_gradients_depend_on_what_they_read_alone(case: Case) -> None:
    tensors = Tensors.random(case)
    grad, _ = _grads(case, tensors)
    run, before = backward_run(case, tensors, grad, None)
    run.execute()
    half, channel = case.length // 2, case.dim // 2
    # Positions before the half are read by the activation's slope, width - 1 before it.
    first = max(0, half - case.width + 1)
    loud, loud_grad = Tensors.random(case), grad.clone()
    loud.x[:, :, :first] *= 2.0**10
    loud.x[:, channel + 1 :] = torch.nan
    loud_grad[:, :, :half] *= 2.0**10
    loud_grad[:, channel + 1 :] = torch.nan
    run, after = backward_run(case, loud, loud_grad, None)
    run.execute()
    assert torch.equal(before.x[:, : channel + 1, half:], after.x[:, : channel + 1, half:])
    assert not after.weight[: channel + 1].isnan().any()
    assert not after.bias[: channel + 1].isnan().any()


def test_infinite_inputs_stay_with_the_taps_that_read_them() -> None:
    """The last input is read by the last tap alone, though it lies in the window of others."""
    case = Case(1, 2, 10, 4, silu=False)
    for layout in (case, replace(case, channels_last=True)):
        tensors = Tensors.random(layout)
        tensors.x[:, :, -1] = torch.inf
        grad, _ = _grads(layout, tensors)
        run, found = backward_run(layout, tensors, grad, None)
        run.execute()
        assert found.weight[:, 3].isinf().all()
        assert found.weight[:, :3].isfinite().all()


# --- Faults ---------------------------------------------------------------------------------------

FAULTS = {
    "the tap of a position beyond the end": (
        Case(1, 2, 10, 4, silu=False),
        Fault("causal/backward.cuh", "if (e < count) add(", "if (e <= count) add("),
    ),
    "a position too few for the states": (
        Case(1, 2, 10, 4, states=True),
        Fault("causal/backward.cuh", "t <= state &&", "t < state &&"),
    ),
    "the first channel's states": (
        Case(1, 8, 10, 4, channels_last=True, states=True),
        Fault(
            "causal/tile.cuh", "state_at(states, channel + v, p)", "state_at(states, channel, p)"
        ),
    ),
    "the gradient of another sequence": (
        Case(1, 2, 40, 4, sequences=True),
        Fault("causal/backward.cuh", "ids[first + i] != ids[e]", "ids[first + i] < 0"),
    ),
    "the input of another sequence": (
        Case(1, 2, 40, 4, channels_last=True, sequences=True),
        Fault("causal/tile.cuh", "ids[q * kRun + i] != own[e]", "ids[q * kRun + i] < 0"),
    ),
    "a segment's sums left out": (
        Case(1, 8, 40, 4, channels_last=True),
        Fault("causal/backward.cuh", "run < kRuns; run += kSegments", "run < 1; run += kSegments"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    """All accesses are in bounds: the comparison with float64 finds these faults."""
    case, fault = FAULTS[name]
    tensors = Tensors.random(case, seed=3)
    tensors.x[:, :, -1] = torch.inf if fault.new.startswith("if (e <= count)") else 1.0
    exact = tensors.double()
    grad, _ = _grads(case, tensors)
    wanted = [one for one in (exact.x, exact.weight, exact.initial_states) if one is not None]
    expected = torch.autograd.grad(reference(exact, case.silu), wanted, grad.double())
    differs = []
    for is_faulty in (False, True):
        run, found = backward_run(case, tensors, grad, None)
        if is_faulty:
            run = run._replace(plan=with_fault(run.plan, fault))
        run.execute()
        results = (found.x, found.weight, found.initial_states)
        close = [
            torch.allclose(one.double(), other, rtol=1e-4, atol=1e-4)
            for one, other in zip(results, expected, strict=False)
        ]
        differs.append(not all(close))
    assert differs == [False, True]


# --- Updates --------------------------------------------------------------------------------------

UPDATES = [
    (2, 3, 1, 4, 3, torch.bfloat16, torch.float32),
    (1, 130, 1, 4, 4, torch.float16, torch.float16),
    (2, 3, 3, 4, 3, torch.float32, torch.bfloat16),
    (2, 3, 7, 3, 5, torch.float64, torch.float64),
    (2, 5, 2, 1, 1, torch.float32, torch.float32),
    (1, 2, 2, 64, 63, torch.float32, torch.float32),
    (1, 2, 1, 20, 40, torch.bfloat16, torch.bfloat16),
]


def _id(value: object) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize("circular", [False, True], ids=["shifted", "circular"])
@pytest.mark.parametrize("indexed", [False, True], ids=["all states", "chosen states"])
@pytest.mark.parametrize(
    ("batch", "dim", "steps", "width", "states", "dtype", "weight_dtype"), UPDATES, ids=_id
)
def test_update(
    batch: int, dim: int, steps: int, width: int, states: int,
    dtype: torch.dtype, weight_dtype: torch.dtype, circular: bool, indexed: bool,
) -> None:  # fmt: skip
    case = Case(batch, dim, steps, width, dtype, weight_dtype, channels_last=indexed, gap=1)
    x, weight, bias, *_ = Tensors.random(case).arguments
    assert x is not None
    entries = batch + 2 if indexed else batch
    memory = torch.full((entries, states, dim + 1), torch.nan, dtype=dtype)
    state = (
        memory.transpose(1, 2)[:, :dim] if indexed else torch.empty(batch, dim, states).to(dtype)
    )
    state.copy_(torch.randn(entries, dim, states))
    seen = torch.tensor([11, 4], dtype=torch.int32)[:batch] if circular else None
    indices = torch.tensor([batch, -1], dtype=torch.int32)[:batch] if indexed else None
    expected_state = state.clone()
    expected = fastconv.causal_conv1d_update(x, expected_state, weight, bias, "silu", seen, indices)
    y = torch.full(x.shape, torch.nan, dtype=dtype)
    described = launches.Steps.of(x, state, weight, True, circular).planned_for
    given = (x, state, weight, bias, seen, indices, y)
    Run(plan.update(described), dict(zip(launches.UPDATE, given, strict=False))).execute()
    check_close(y, expected.double(), width)
    assert torch.equal(state, expected_state)


# --- The backend ----------------------------------------------------------------------------------


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has the CUDA backend's launches run in the emulator, on tensors of the CPU."""

    def loaded(made: Plan, names: tuple[str, ...], index: int) -> SimpleNamespace:
        def run(*tensors: Tensor | None) -> None:
            Run(made, dict(zip(names, tensors, strict=False))).execute()

        return SimpleNamespace(run=run)

    monkeypatch.setattr(launches, "_loaded", loaded)
    monkeypatch.setattr(cuda, "gpu", lambda index: H200)
    cached = (launches._ready_forward, launches._ready_backward, launches._ready_update)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


# Ways in which x may lie; kernels read the first four as they are.
PLACES = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.mT.contiguous().mT,
    "half of the channels": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "half of the channels, channels last": lambda x: (
        torch.cat((x, x), 1).mT.contiguous().mT[:, : x.shape[1]]
    ),
    "every second position": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "batch innermost": lambda x: x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "one position": lambda x: x[:, :, :1],
}


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("place", PLACES)
def test_operators_take_any_layout(place: str) -> None:
    """The operators' kernels for GPUs give the results, shapes and strides of those for CPUs."""
    plain = Tensors.random(Case(2, 6, 24, 4, states=True)).arguments
    x = PLACES[place](plain[0])
    inputs = (x, plain[1].t().contiguous().t(), *plain[2:], True)
    found, expected = causal._forward_cuda(*inputs, True), causal._forward_cpu(*inputs, True)
    torch.testing.assert_close(found, expected, check_stride=True)
    grad = torch.randn(6, 1).expand(x.shape)  # as of a sum: not in the layout of x
    final = torch.randn(3, 6, 2).permute(2, 1, 0)
    found = causal._backward_cuda(grad, final, *inputs, True, True)
    expected = causal._backward_cpu(grad, final, *inputs, True, True)
    torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.usefixtures("_emulated")
def test_operators_compute_no_gradient_that_is_not_wanted() -> None:
    inputs = (*Tensors.random(Case(2, 6, 24, 4, states=True)).arguments, False)
    grad = torch.randn(2, 6, 24)
    found = causal._backward_cuda(grad, None, *inputs, False, False)
    expected = causal._backward_cpu(grad, None, *inputs, False, False)
    torch.testing.assert_close(found, expected)
    assert [len(one) for one in found[1:]] == [0, 0, 0]


@pytest.mark.usefixtures("_emulated")
def test_updates_by_the_operator() -> None:
    x, weight, bias, *_ = Tensors.random(Case(2, 5, 3, 4)).arguments
    states = [torch.ones(2, 5, 4), torch.ones(2, 4, 5).mT]
    seen = torch.tensor([[5, 2], [7, 7]], dtype=torch.int32)[:, 0]
    outputs = [
        call(x, state, weight, bias, seen, None, True)
        for call, state in zip((causal._update_cpu, causal._update_cuda), states, strict=True)
    ]
    torch.testing.assert_close(*outputs)
    assert torch.equal(*states)

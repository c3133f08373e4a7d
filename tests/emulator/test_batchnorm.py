"""The kernels of batch normalization, emulated: all types, layouts and options, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batchnorm_cases import EPS, Case, Tensors, check_close, random_cases, reference
from causal_cases import ROUNDINGS
from emulator.batchnorm_passes import Run, backward_run, forward_run, output_run
from emulator.driver import EmulatorError
from emulator.faults import Fault, with_fault
from fastconv.backends.batchnorm.launches import Gradients
from fastconv.kernels.gpus import GPUS, H200

SMALL = replace(GPUS["sm_90a"], sm_count=1)  # so that blocks have many rows

CASES = [
    # Wide planes, whose vectors are whole or not, with several segments.
    Case(2, 3, (32, 33), torch.bfloat16, activation="identity"),
    Case(3, 2, (53, 101), torch.float16, residual=True, activation="silu", offset=1),
    Case(2, 3, (33, 33), residual=True, activation="relu"),
    Case(3, 2, (27, 41), torch.bfloat16, mixed=True, residual=True),
    Case(1, 3, (33, 33), torch.float64, activation="gelu"),
    # Several tiles of channels, some of which have fewer channels.
    Case(3, 50, (7, 7), torch.bfloat16, residual=True),
    Case(2, 300, (2, 2), torch.bfloat16, channels_last=True),
    Case(70, 24, (), activation="leaky_relu", residual=True),
    *random_cases(12, 3),
]


def _wanted(case: Case) -> Gradients:
    return Gradients(True, True, case.affine, case.residual)


def _found(case: Case, tensors: Tensors, run: Run) -> list[Tensor]:
    """The gradients that a backward pass has left, in the order of ``Tensors.leaves``."""
    names = ["grad_x", *(["grad_residual"] if case.residual else [])]
    names += ["grad_weight", "grad_bias"] if case.affine else []
    found = [run.tensors[name] for name in names]
    return [tensors.grad if one is None else one for one in found]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_are_those_of_float64(case: Case) -> None:
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    forward = forward_run(case, tensors)
    forward.execute()
    expected = reference(exact, case.activation)
    y = forward.tensors["y"]
    assert y is not None
    check_close(y, expected, case.dtype, "y")
    check_close(tensors.running_mean, exact.running_mean, case.dtype, "running mean")
    check_close(tensors.running_var, exact.running_var, case.dtype, "running variance")
    if not case.residual:
        again = output_run(case, tensors, forward)
        again.execute()
        assert torch.equal(again.tensors["y"], y)  # type: ignore[arg-type]

    backward = backward_run(case, tensors, forward, _wanted(case))
    backward.execute()
    gradients = torch.autograd.grad(expected, exact.leaves, exact.grad)
    # Where the gradient before a curved activation is stored, or computed from the stored output,
    # what follows from it is rounded twice.
    curved = case.residual and case.activation not in ("identity", "relu", "relu6", "leaky_relu")
    bound = 256 + (8 * ROUNDINGS[case.dtype] / ROUNDINGS[torch.float32] if curved else 0)
    for found, gradient in zip(_found(case, tensors, backward), gradients, strict=True):
        check_close(found, gradient, case.dtype, "gradient", bound)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("plane", [(3, 5), (41, 27)], ids=["narrow", "wide"])
def test_blocks_with_many_rows(channels_last: bool, plane: tuple[int, ...]) -> None:
    """A GPU with one SM has a few large blocks, a large one many small blocks."""
    case = Case(20 if plane == (3, 5) else 3, 5, plane, channels_last=channels_last, residual=True)
    outputs = []
    for gpu in (SMALL, H200):
        tensors = Tensors.random(case)
        forward = forward_run(case, tensors, gpu)
        forward.execute()
        backward = backward_run(case, tensors, forward, _wanted(case), gpu)
        backward.execute()
        outputs.append((forward.tensors["y"], *_found(case, tensors, backward)))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("plane", [(4, 4), (40, 31)], ids=["narrow", "wide"])
def test_means_of_ten_thousand_deviations(channels_last: bool, plane: tuple[int, ...]) -> None:
    case = Case(4, 6, plane, channels_last=channels_last, activation="identity", mean=1e4)
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    run = forward_run(case, tensors, SMALL)
    run.execute()
    means, invstd = run.tensors["mean"], run.tensors["invstd"]
    assert means is not None
    assert invstd is not None
    axes = (0, 2, 3)
    mean, variance = exact.x.mean(axes), exact.x.var(axes, correction=0)
    assert ((means.double() - mean).abs() <= 2 * ROUNDINGS[torch.float32] * mean.abs()).all()
    torch.testing.assert_close(invstd.double(), (variance + EPS).rsqrt(), rtol=1e-5, atol=0.0)


def test_a_first_element_unlike_all_others() -> None:
    """Differences are counted from an element that is far from the mean."""
    case = Case(64, 4, (4, 4), activation="identity")
    tensors = Tensors.random(case)
    tensors.x[0, :, 0, 0] = 1e3
    run = forward_run(case, tensors, SMALL)
    run.execute()
    invstd = run.tensors["invstd"]
    assert invstd is not None
    variance = tensors.x.double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(invstd.double(), (variance + EPS).rsqrt(), rtol=1e-4, atol=0.0)


def test_equal_elements_have_no_variance() -> None:
    case = Case(5, 3, (7, 7), affine=False, activation="identity")
    tensors = Tensors.random(case)
    tensors.x.fill_(123.456)
    run = forward_run(case, tensors)
    run.execute()
    assert torch.equal(run.tensors["y"], torch.zeros_like(tensors.x))  # type: ignore[arg-type]


def test_running_statistics_as_averages_of_all_batches() -> None:
    case = Case(5, 3, (7, 7))
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    forward_run(case, tensors, batches=torch.tensor(4)).execute()
    reference(exact, "relu", momentum=0.25)
    check_close(tensors.running_mean, exact.running_mean, case.dtype, "running mean")
    check_close(tensors.running_var, exact.running_var, case.dtype, "running variance")


def test_a_batch_is_counted() -> None:
    case = Case(5, 19, (7, 7))
    tensors, others, counted = Tensors.random(case), Tensors.random(case), torch.tensor(2**40)
    run, other = forward_run(case, tensors), forward_run(case, others)
    run.tensors["counted"] = counted
    run.execute()
    other.execute()
    assert int(counted) == 2**40 + 1
    assert torch.equal(tensors.running_var, others.running_var)


def test_given_statistics() -> None:
    """Gradients of an evaluation, whose statistics do not depend on x."""
    case = Case(5, 8, (7, 7), activation="gelu")
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    forward = forward_run(case, tensors)
    forward.tensors["mean"] = tensors.running_mean.clone()
    forward.tensors["invstd"] = (tensors.running_var + EPS).rsqrt()
    run = forward._replace(plan=replace(forward.plan, launches=forward.plan.launches[2:]))
    run.execute()
    expected = reference(exact, "gelu", training=False)
    check_close(run.tensors["y"], expected, case.dtype, "y")  # type: ignore[arg-type]
    backward = backward_run(case, tensors, run, Gradients(False, True, True, False))
    backward.execute()
    gradients = torch.autograd.grad(expected, exact.leaves, exact.grad)
    for found, gradient in zip(_found(case, tensors, backward), gradients, strict=True):
        check_close(found, gradient, case.dtype, "gradient", 256)


@pytest.mark.parametrize("case", CASES[:8:2], ids=str)
def test_channels_depend_on_themselves_alone(case: Case) -> None:
    """NaN and loud numbers in all other channels change no bit."""
    kept = case.channels // 2
    results = []
    for is_loud in (False, True):
        tensors = Tensors.random(case)
        if is_loud:
            for one in (tensors.x, tensors.grad):
                one[:, :kept] = torch.nan
                one[:, kept + 1 :] *= 1024
        forward = forward_run(case, tensors)
        forward.execute()
        backward = backward_run(case, tensors, forward, _wanted(case))
        backward.execute()
        found = [forward.tensors["y"], tensors.running_var, *_found(case, tensors, backward)]
        results.append(
            [one.movedim(min(1, one.dim() - 1), 0)[kept] for one in found if one is not None]
        )
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["NaN", "infinity"])
def test_what_is_not_finite_spreads_to_its_channel(value: float) -> None:
    for channels_last in (False, True):
        case = Case(3, 4, (3, 3), channels_last=channels_last)
        tensors = Tensors.random(case)
        tensors.x[1, 2, 1, 1] = value
        run = forward_run(case, tensors)
        run.execute()
        y = run.tensors["y"]
        assert y is not None
        assert y[:, 2].isnan().all()
        assert y[:, [0, 1, 3]].isfinite().all()
        assert tensors.running_var[2].isnan()


def test_gradients_that_the_activation_drops_may_be_infinite() -> None:
    case = Case(3, 4, (3, 3))
    tensors, exact = Tensors.random(case), Tensors.random(case).double()
    dropped = reference(exact, "relu") == 0
    tensors.grad[dropped] = torch.inf
    forward = forward_run(case, tensors)
    forward.execute()
    backward = backward_run(case, tensors, forward, _wanted(case))
    backward.execute()
    assert all(one.isfinite().all() for one in _found(case, tensors, backward))


# --- Faults ---------------------------------------------------------------------------------------

NARROW = Case(9, 24, (3, 3), residual=True)
WIDE = Case(3, 2, (33, 33), residual=True)
FAULTS = {
    "the neighbour's columns": (
        NARROW, Fault("batchnorm/walk.cuh", "(column + i) / sizes.plane", "column / sizes.plane")
    ),
    "rows of a block left out": (
        NARROW, Fault("batchnorm/sums.cuh", "row < sizes.at_once", "row < 1")
    ),
    "elements before the plane": (
        WIDE, Fault("batchnorm/walk.cuh", "max_of(0, -at)", "0")
    ),
    "missing elements counted": (
        WIDE, Fault("batchnorm/statistics.cuh", "kEdges ? firsts[0] :", "")
    ),
    "warps left out": (WIDE, Fault("batchnorm/sums.cuh", "warp < warps", "warp < 2")),
    "shares not shifted": (
        NARROW, Fault("batchnorm/finish.cuh", "own[0] - first,", "own[0],")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str) -> None:
    """All accesses are in bounds: results differ from float64, or between orders of blocks."""
    case, fault = FAULTS[name]
    differs = []
    for is_faulty in (False, True):
        tensors, exact = Tensors.random(case), Tensors.random(case).double()
        run = forward_run(case, tensors)
        if is_faulty:
            run = run._replace(plan=with_fault(run.plan, fault))
        try:
            run.execute()
        except EmulatorError as error:
            differs.append("depends on the order" in str(error))
            continue
        y = run.tensors["y"]
        assert y is not None
        expected = reference(exact, case.activation)
        differs.append(not torch.allclose(y.double(), expected, rtol=1e-4, atol=1e-4))
    assert differs == [False, True]

"""Results of exported files, whose kernels run in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch

import exported_file
import fastconv
from emulator import corpus
from emulator.pass_cases import SCALARS
from exported_launches import compare, emulate
from exports import narrow, small
from fastconv.exporter.parts import portable

__all__ = ["narrow", "small"]  # Tests below use these fixtures by their names.


@pytest.mark.parametrize(
    ("architecture", "shared_kib", "tf32", "tolerance", "expected"),
    [
        ("sm_90a", 227, False, 1e-6, {"hopper/few_outputs/kernel.cuh", "direct/wgrad/kernel.cuh"}),
        ("sm_90a", 227, True, 1e-3, {"hopper/few_outputs/kernel.cuh", "direct/wgrad/kernel.cuh"}),
        ("sm_100", 227, False, 1e-6, {"ampere/halo/kernel.cuh", "ampere/wgrad_halo/kernel.cuh"}),
        ("sm_89", 99, True, 1e-3, {"ampere/halo/kernel.cuh", "ampere/wgrad_halo/kernel.cuh"}),
    ],
)
def test_tuned_results(
    small: Path,
    architecture: str,
    shared_kib: int,
    tf32: bool,
    tolerance: float,
    expected: set[str],
) -> None:
    module = exported_file.load(small)
    sources = emulate(module, architecture, shared_kib)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        compare(module, module.ModelNew(bias=True), torch.randn(2, 8, 12, 40), tolerance)
    assert expected <= set(sources)


@pytest.mark.parametrize(
    ("architecture", "shared_kib"), [("sm_90a", 227), ("sm_87", 163), ("sm_120", 99)]
)
def test_results_of_narrow_groups(narrow: Path, architecture: str, shared_kib: int) -> None:
    """The result has full precision, whatever PyTorch's setting."""
    module = exported_file.load(narrow)
    sources = emulate(module, architecture, shared_kib)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        compare(module, module.ModelNew(bias=True), torch.randn(2, 6, 12, 20), 1e-6)
    assert set(sources) == {
        "depthwise/fma/planes.cuh", "depthwise/wgrad/planes.cuh", "direct/bias_grad.cuh"
    }  # fmt: skip


def test_results_of_a_first_layer(tmp_path: Path) -> None:
    """All residues of the input gradient are channels of one layer."""
    path = tmp_path / "first.py"
    fastconv.export(shape="2x3x19x22 24x3x7x7 stride=2,2 padding=3,3", output=path)
    module = exported_file.load(path)
    sources = emulate(module, "sm_90a", 227)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        compare(module, module.ModelNew(bias=True), torch.randn(2, 3, 19, 22), 1e-3)
    # The forward and the backward pass launch a packing kernel and a convolution each.
    assert sources.count("hopper/halo/kernel.cuh") == 4


def test_tuned_plans_take_only_what_they_are_for(small: Path) -> None:
    module = exported_file.load(small)
    sources = emulate(module, "sm_90a")
    model = module.ModelNew()
    x = torch.randn(2, 8, 12, 40)
    aligned = torch.empty(x.numel() + 1)
    unaligned = aligned[1:].view(x.shape).copy_(x)
    for other in (x[:1], unaligned, x.to(memory_format=torch.channels_last)):
        with torch.no_grad():
            torch.testing.assert_close(model(other), module.pytorch_twin(model)(other))
    assert set(sources) == {"direct/forward/kernel.cuh"}


TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# The arguments of ModelNew, the input's shape, the type, and whether channels come last.
GEOMETRIES = {
    "plain": ((8, 16, 3, 1, 1, 1, 1, True), (2, 8, 12, 16), torch.float32, False),
    "pointwise": ((20, 40, 1), (2, 20, 5, 8), torch.float16, False),
    "strided": ((6, 12, (3, 2), (2, 3), (1, 2), 1, 1, True), (2, 6, 11, 13), torch.float32, False),
    "both": ((2, 3, 3, (4, 2), (3, 1), (2, 4)), (1, 2, 28, 27), torch.bfloat16, True),
    "grouped": ((6, 9, (3, 2), (2, 3), 1, (2, 1), 3, True), (2, 6, 9, 11), torch.float16, True),
    "depthwise": ((8, 8, 5, 1, 2, 1, 8, True), (2, 8, 16, 16), torch.bfloat16, False),
    "wide kernel": ((2, 3, (3, 35), 1, (1, 17)), (1, 2, 5, 40), torch.float32, False),
    "far apart": ((1, 2, (1, 3), (1, 500), 0, (1, 4000)), (1, 1, 2, 9100), torch.float32, False),
    "many channels": ((40, 140, (2, 1)), (1, 40, 4, 4), torch.float32, True),
    "few taps": ((4, 6, (2, 1), (5, 3), (1, 2)), (2, 4, 9, 11), torch.float16, False),
    "stride beyond": ((2, 3, 3, (90, 10**7), 1), (1, 2, 5, 6), torch.float32, True),
    "column of taps": ((64, 4, (9, 1), 1, (4, 0)), (1, 64, 12, 20), torch.float32, False),
}  # fmt: skip


@pytest.mark.parametrize("name", GEOMETRIES)
def test_portable_results(small: Path, name: str) -> None:
    arguments, shape, dtype, channels_last = GEOMETRIES[name]
    module = exported_file.load(small)
    sources = emulate(module, "sm_75")
    # ModelNew's defaults are those of the exported convolution.
    arguments = (*arguments, *(1, 0, 1, 1, False)[len(arguments) - 3 :])
    x = torch.randn(shape).to(dtype)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    compare(module, module.ModelNew(*arguments).to(dtype), x, TOLERANCE[dtype])
    assert all(source.startswith("direct/") for source in sources)


def test_portable_plans_fit_every_gpu() -> None:
    for geometry, operands in (*map(_random_geometry, range(300)), *_drawn_geometries()):
        for which in ("forward", "input_grad", "weight_grad", "bias_grad"):
            plan = portable.portable_plan(which, geometry, operands, sms=7)
            for launch in plan.launches:
                assert launch.shared_bytes <= 48 * 1024, (which, geometry)
                assert 0 < launch.grid < 2**31
                assert 0 < launch.block <= 1024


def _drawn_geometries() -> Iterator[tuple[portable.Geometry, portable.Operands]]:
    """Problems with the same padding on both sides, the only ones that exported files take."""
    draw = Random(0)
    for work in (corpus.drawn(draw) for _ in range(600)):
        problem = work.conv.problem
        stride, sides, dilation, groups = problem.geometry
        if work.dtype == torch.float64 or sides[::2] != sides[1::2]:
            continue
        others = (stride, sides[::2], dilation, groups)
        yield (
            portable.Geometry(problem.input_shape, problem.weight_shape, *others),
            portable.Operands(*SCALARS[work.dtype], work.channels_last, work.aligned),
        )


def test_portable_sizes_that_kernels_cannot_count_are_named() -> None:
    geometry = portable.Geometry((2**31, 1, 1, 1), (1, 1, 1, 1), (1, 1), (0, 0), (1, 1), 1)
    operands = portable.Operands("float", 4, False, True)
    for which in ("forward", "input_grad", "weight_grad", "bias_grad"):
        with pytest.raises(ValueError, match=r"images.* below 2147418112 .* but got 2147483648"):
            portable.portable_plan(which, geometry, operands, sms=7)


def _random_geometry(seed: int) -> tuple[portable.Geometry, portable.Operands]:
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: int) -> int:
        return values[int(torch.randint(len(values), (1,), generator=generator))]

    groups = one_of(1, 1, 2, 64)
    kernel = (one_of(1, 3, 5, 31), one_of(1, 2, 7, 16, 17, 45))
    dilation = (one_of(1, 2, 7), one_of(1, 2, 30, 5000))
    geometry = portable.Geometry(
        (one_of(1, 16), groups * one_of(1, 3, 64), 300, 500 + dilation[1] * kernel[1]),
        (groups * one_of(1, 7, 256), one_of(1, 3, 64), *kernel),
        (one_of(1, 2, 5), one_of(1, 2, 3, 400)),
        (one_of(0, 2), one_of(0, 1, 8)),
        dilation,
        groups,
    )
    geometry = geometry._replace(
        input=(geometry.input[0], groups * geometry.weight[1], *geometry.input[2:])
    )
    size = one_of(2, 4)
    scalar = "float" if size == 4 else "fastconv::float16"
    return geometry, portable.Operands(scalar, size, one_of(0, 1) == 1, one_of(0, 1, 1) == 1)

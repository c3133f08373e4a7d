"""Plans of causal convolutions: legal for every GPU, and their kernels compile for all of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest

import nvrtc
from fastconv.kernels.causal import plan
from fastconv.kernels.causal.plan import Convolution, Layout, Update
from fastconv.kernels.family import Gpu, Plan
from fastconv.kernels.gpus import GPUS, H200

SCALARS = {"float": 4, "double": 8, "fastconv::float16": 2, "fastconv::bfloat16": 2}


def _convolution(
    scalar: str,
    shape: tuple[int, int, int],
    width: int,
    channels_last: bool,
    sequences: bool = False,
    silu: bool = True,
    weight_scalar: str | None = None,
) -> Convolution:
    batch, dim, length = shape
    row = dim if channels_last else length
    return Convolution(
        scalar, SCALARS[scalar], weight_scalar or scalar, batch, dim, length, width,
        channels_last, silu, sequences, Layout(dim * length, row),
    )  # fmt: skip


def _plans(conv: Convolution, gpu: Gpu) -> list[Plan]:
    return [
        plan.forward(conv, gpu),
        plan.backward(conv, conv.x, True, gpu),
        plan.backward(conv, conv.x, False, gpu),
    ]


def _drawn(draw: Random) -> Convolution:
    def size(most: int) -> int:
        return max(1, int(most ** draw.random()))

    scalar = draw.choice(list(SCALARS))
    shape = (size(64), size(20000), size(300000))
    width = draw.choice((1, 2, 3, 4, 5, 8, 16, 17, 31, 64))
    return _convolution(scalar, shape, width, draw.random() < 0.5, draw.random() < 0.3)


@pytest.mark.parametrize("arch", GPUS)
def test_plans_are_legal(arch: str) -> None:
    gpu, draw = GPUS[arch], Random(5)
    for _ in range(300):
        conv = _drawn(draw)
        for made in _plans(conv, gpu):
            for launch in made.launches:
                assert launch.shared_bytes <= gpu.shared_bytes_per_block, conv
                assert launch.block in (32, 64, 128, 256), conv
                assert 0 < launch.grid[0] < 2**31, conv
            assert made.scratch_bytes <= 2**26 + 32 * conv.width * conv.dim * (
                1 + conv.batch * conv.length // 32
            ), conv


def test_two_blocks_fit_an_sm() -> None:
    """Blocks do not load and compute at the same time: an SM needs several of them."""
    for scalar, last, width in product(SCALARS, (False, True), (4, 64)):
        for arch in ("sm_75", "sm_86", "sm_90a"):
            for made in _plans(_convolution(scalar, (2, 512, 4096), width, last), GPUS[arch]):
                assert made.launches[0].shared_bytes <= GPUS[arch].shared_budget(2)


# --- Vectors and strides --------------------------------------------------------------------------


def _constants(made: Plan) -> dict[str, object]:
    return dict(made.launches[0].kernel.constants)


@pytest.mark.parametrize(
    ("layout", "load"),
    [
        (Layout(4096, 64), 8),
        (Layout(4096, 64, 8), 4),
        (Layout(4096, 64, 4), 2),
        (Layout(4096, 64, 2), 1),
        (Layout(4096, 68), 4),
        (Layout(4096, 65), 1),
        (Layout(4100, 64), 4),
        (Layout(0, 64), 8),
    ],
)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_loads_are_as_wide_as_alignment_allows(
    layout: Layout, load: int, channels_last: bool
) -> None:
    conv = _convolution("fastconv::bfloat16", (2, 64, 64), 4, channels_last)
    constants = _constants(plan.forward(replace(conv, x=layout), H200))
    assert constants["load_vector"] == load
    assert constants["store_vector"] == (2 if channels_last else 8)
    backward = _constants(plan.backward(conv, layout, True, H200))
    assert (backward["load_vector"], backward["grad_vector"]) == (8, load)


@pytest.mark.parametrize(("length", "store"), [(64, 8), (68, 4), (66, 2), (65, 1)])
def test_stores_are_as_wide_as_rows_allow(length: int, store: int) -> None:
    conv = _convolution("fastconv::float16", (1, 3, length), 4, False)
    assert _constants(plan.forward(conv, H200))["store_vector"] == store


def test_sizes_and_strides_choose_no_code() -> None:
    """Sequences of other lengths and tensors with other gaps run kernels that are compiled."""
    conv = _convolution("fastconv::bfloat16", (1, 256, 4096), 4, False)
    others = (
        replace(conv, length=5000 * 8, batch=7, dim=100),
        replace(conv, x=Layout(1 << 33, 1 << 13)),
    )
    for other in others:
        for one, two in zip(_plans(conv, H200), _plans(other, H200), strict=True):
            assert [a.kernel for a in one.launches] == [b.kernel for b in two.launches]


@pytest.mark.parametrize("stride", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 3 * 2**33 + 5])
def test_strides_of_64_bits(stride: int) -> None:
    conv = _convolution("float", (2, 4, 64), 4, False)
    arguments = plan.forward(replace(conv, x=Layout(stride, 64)), H200).launches[0].arguments
    low, high = arguments[-4:-2]
    assert isinstance(low, int)
    assert isinstance(high, int)
    assert -(2**31) <= low < 2**31
    assert high << 32 | low & 0xFFFFFFFF == stride


def test_sizes_beyond_32_bits_are_refused() -> None:
    conv = _convolution("float", (1, 1, 2**31 - 1), 4, False)
    with pytest.raises(NotImplementedError, match=r"\(1, 1, 2147483647\)"):
        plan.forward(conv, H200)


def test_more_blocks_than_a_grid_has_are_refused() -> None:
    conv = _convolution("float", (2**16, 2**16, 2), 4, False)
    with pytest.raises(NotImplementedError, match=r"below 2\*\*31 blocks.* need 4294967296"):
        plan.forward(conv, H200)


# --- Compiling ------------------------------------------------------------------------------------

# Every type, layout and option, and vectors of all widths.
COMPILED = [
    _convolution("fastconv::bfloat16", (1, 512, 4096), 4, False),
    _convolution("fastconv::bfloat16", (1, 512, 4096), 4, True, weight_scalar="float"),
    _convolution("fastconv::float16", (1, 512, 4097), 3, False, sequences=True),
    _convolution("fastconv::float16", (1, 513, 4096), 5, True, sequences=True, silu=False),
    _convolution("float", (1, 512, 4096), 4, True),
    _convolution("float", (1, 512, 4094), 1, False, silu=False),
    _convolution("double", (1, 512, 4096), 2, False),
    _convolution("double", (1, 512, 4096), 20, True),
]
UPDATES = [
    Update("fastconv::bfloat16", "float", 4, 512, 1, 4, 4, True, False, (512, 1, 0), (2048, 4, 1)),
    Update("double", "double", 4, 512, 3, 8, 9, True, True, (1536, 3, 1), (4096, 1, 512)),
]


@pytest.mark.parametrize("arch", GPUS)
def test_kernels_compile(arch: str) -> None:
    turn = list(GPUS).index(arch)  # each architecture takes a third of them
    chosen = [conv for number, conv in enumerate(COMPILED) if (number + turn) % 3 == 0]
    plans = [made for conv in chosen for made in _plans(conv, GPUS[arch])[:2]]
    plans.append(plan.update(UPDATES[turn % 2]))
    for kernel in {launch.kernel for made in plans for launch in made.launches}:
        compiled = nvrtc.compiled(kernel, arch)
        assert compiled.registers in range(1, 256)
        # Numbers that are needed once for a tile, not those of the loop over taps.
        assert (compiled.spill_bytes or 0) <= 32, kernel


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels last"])
def test_the_widest_taps_stay_in_registers(channels_last: bool) -> None:
    for scalar in ("float", "fastconv::bfloat16"):
        conv = _convolution(scalar, (1, 512, 4096), 64, channels_last)
        for made in _plans(conv, H200)[:2]:
            compiled = nvrtc.compiled(made.launches[0].kernel, "sm_90a")
            assert (compiled.spill_bytes or 0) <= 64

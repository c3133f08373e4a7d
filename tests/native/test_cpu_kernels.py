"""The CPU kernels of the native library against float64, and the plans that choose them."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import oracle
from fastconv import native
from fastconv.backends.cpu import plans
from fastconv.backends.cpu.plans import CpuPlan, Kernel, Pass
from fastconv.native import build
from fastconv.ops import entries
from fastconv.problem import Epilogue, Problem

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the native library is Linux's"),
    pytest.mark.usefixtures("_poisoned_memory"),
]

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAST = torch.channels_last
OPERATORS = torch.ops.fastconv
# The error allowed for a result, relative to the largest one, for sums and then one rounding.
TOLERANCE = {
    torch.float32: 5e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-3
}  # fmt: skip


@pytest.fixture(autouse=True)
def _served_natively(_native_library: Any) -> Iterator[None]:
    native.serve_operators(True)
    yield
    native.serve_operators(False)


def geometry(problem: Problem) -> tuple[Any, ...]:
    stride, padding, dilation, groups = problem.geometry
    return [*stride], [*padding], [*dilation], groups, None


def results(problem: Problem, input: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> Any:
    """The output and all gradients, by the operators."""
    how = geometry(problem)
    output = OPERATORS.forward(input, weight, bias, *how)
    input_grad = OPERATORS.input_grad(grad, weight, [*problem.input_shape[2:]], *how)
    both = OPERATORS.weight_grad(grad, input, [*problem.weight_shape[2:]], *how, True)
    return output, input_grad, *both


def expected(problem: Problem, input: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> Any:
    x, w, b = (t.double().contiguous().requires_grad_() for t in (input, weight, bias))
    sides = [side for axis in problem.axes[::-1] for side in (axis.before, axis.after)]
    convolve = F.conv2d if problem.depth is None else F.conv3d
    stride, _, dilation, groups = problem.geometry
    output = convolve(F.pad(x, sides), w, b, stride, 0, dilation, groups)
    return output.detach(), *torch.autograd.grad(output, (x, w, b), grad.double())


def drawn(draw: random.Random, is_depthwise: bool, is_narrow: bool = False) -> Problem:
    """A depthwise problem, one with groups of few channels, or one with few groups."""

    def pair(*values: int) -> tuple[int, int]:
        return draw.choice(values), draw.choice(values)

    groups = draw.choice((1, 1, 2))
    depth, channels = draw.choice((1, 17, 40)), draw.choice((3, 16, 45))
    if is_depthwise or is_narrow:
        groups, depth, channels = draw.choice((1, 3, 16, 17, 40)), 1, 1
    if is_narrow:
        depth, channels = draw.choice(((4, 4), (8, 8), (1, 2), (3, 1), (8, 5), (2, 7)))
    kernel, stride, dilation = pair(1, 2, 3, 5, 9), pair(1, 1, 2, 3), pair(1, 1, 2, 3)
    padding = tuple(draw.choice((0, 1, 2, 5)) for _ in range(4))
    size = tuple(
        max(1, dilation[i] * (kernel[i] - 1) + 1 - padding[2 * i] - padding[2 * i + 1])
        + draw.randint(0, 35)
        for i in range(2)
    )
    shapes = (draw.randint(1, 2), groups * depth, *size), (groups * channels, depth, *kernel)
    return Problem.of(*shapes, stride, padding, dilation, groups)


def drawn_pointwise(draw: random.Random) -> Problem:
    groups, size = draw.choice((1, 1, 2)), (draw.randint(1, 20), draw.randint(1, 20))
    depth, channels = draw.choice((1, 17, 64, 300)), draw.choice((1, 16, 45, 130))
    shapes = (draw.randint(1, 3), groups * depth, *size), (groups * channels, depth, 1, 1)
    stride = draw.choice((1, 1, 2)), draw.choice((1, 1, 2, 3))
    return Problem.of(*shapes, stride, (0,) * 4, (1, 1), groups)


def drawn_volume(draw: random.Random) -> Problem:
    """A volume for one of the kernels."""

    def triple(*values: int) -> tuple[int, int, int]:
        return draw.choice(values), draw.choice(values), draw.choice(values)

    kind = draw.choice(("direct", "depthwise", "pointwise"))
    groups = draw.choice((3, 17)) if kind == "depthwise" else draw.choice((1, 2))
    depth, channels = (1, 1) if kind == "depthwise" else (draw.choice((1, 17, 40)), 24)
    kernel = (1, 1, 1) if kind == "pointwise" else draw.choice((triple(1, 2, 3), (3, 1, 1)))
    stride, dilation = triple(1, 1, 2), triple(1, 1, 2)
    padding = (0,) * 6
    if kind != "pointwise" and draw.random() < 0.8:
        padding = (*triple(0, 1, 2), *triple(0, 1, 2))
    size = tuple(
        max(1, dilation[i] * (kernel[i] - 1) + 1 - padding[2 * i] - padding[2 * i + 1])
        + draw.randint(0, 7)
        for i in range(3)
    )
    shapes = (draw.randint(1, 3), groups * depth, *size), (groups * channels, depth, *kernel)
    return Problem.of(*shapes, stride, padding, dilation, groups)


def same_in_threads(problem: Problem) -> None:
    given = tensors(problem, torch.float32, [torch.contiguous_format] * 3)
    first = results(problem, *given)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            for own, other in zip(results(problem, *given), first, strict=True):
                assert own.equal(other)
    finally:
        torch.set_num_threads(1)


def same_sized(shape: tuple[int, int, int, int], groups: int) -> Problem:
    """A 3x3 kernel, with as many output channels as there are input channels."""
    channels = shape[1]
    weight = (channels, channels // groups, 3, 3)
    return Problem.of(shape, weight, (1, 1), (1,) * 4, (1, 1), groups)


def tensors(problem: Problem, dtype: torch.dtype, formats: Any) -> tuple[Tensor, ...]:
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    input, weight, grad = (
        torch.randn(shape).to(dtype).contiguous(memory_format=format)
        for shape, format in zip(shapes, formats, strict=True)
    )
    return input, weight, torch.randn(problem.out_channels).to(dtype), grad


class TestResults:
    @pytest.mark.parametrize("kernel", ["direct", "depthwise", "pointwise"])
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_random_problems(self, dtype: torch.dtype, kernel: Kernel) -> None:
        draw, planned = random.Random(f"{dtype} {kernel}"), 0
        for _ in range(12):
            is_pointwise = kernel == "pointwise"
            problem = drawn_pointwise(draw) if is_pointwise else drawn(draw, kernel == "depthwise")
            formats = [draw.choice((torch.contiguous_format, LAST)) for _ in range(3)]
            given = tensors(problem, dtype, formats)
            passes: tuple[Pass, ...] = ("forward", "input_grad", "weight_grad")
            found_plans = [plans.plan(problem, which, dtype) for which in passes]
            planned += sum(isinstance(p, CpuPlan) and p.kernel == kernel for p in found_plans)
            with torch.no_grad():
                found = results(problem, *given)
            for name, own, other in zip(
                ["output", "input", "weight", "bias"], found, expected(problem, *given), strict=True
            ):
                error = (own.double() - other).abs().max() / other.abs().max().clamp(min=1)
                assert error < TOLERANCE[dtype], (name, problem, formats)
        assert planned > 12, "most of them are the kernels'"

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_groups_of_few_channels(self, dtype: torch.dtype) -> None:
        draw = random.Random(f"{dtype} narrow")
        for _ in range(12):
            problem = drawn(draw, False, is_narrow=True)
            formats = [draw.choice((torch.contiguous_format, LAST)) for _ in range(3)]
            given = tensors(problem, dtype, formats)
            for name, own, other in zip(
                ["output", "input", "weight", "bias"],
                results(problem, *given),
                expected(problem, *given),
                strict=True,
            ):
                error = (own.double() - other).abs().max() / other.abs().max().clamp(min=1)
                assert error < TOLERANCE[dtype], (name, problem, formats)
        same_in_threads(problem)

    @pytest.mark.parametrize("format", [torch.contiguous_format, LAST], ids=str)
    def test_chains_of_large_depthwise_kernels(self, format: Any) -> None:
        """Long sums are added up in parts: one chain of 2601 products would lose two digits."""
        problem = Problem.of((1, 16, 60, 200), (16, 1, 51, 51), (1, 1), (25,) * 4, (1, 1), 16)
        input, weight, bias, grad = tensors(problem, torch.float32, [format] * 3)
        given = input.abs(), weight.abs(), bias, grad.abs()
        for own, other in zip(results(problem, *given), expected(problem, *given), strict=True):
            assert ((own - other) / other).abs().max() < 2e-6

    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    def test_random_volumes(self, dtype: torch.dtype) -> None:
        draw, planned = random.Random(f"{dtype} volumes"), 0
        for _ in range(12):
            problem = drawn_volume(draw)
            both = torch.contiguous_format, torch.channels_last_3d
            formats = [draw.choice(both) for _ in range(3)]
            given = tensors(problem, dtype, formats)
            for which in ("forward", "input_grad", "weight_grad"):
                planned += isinstance(plans.plan(problem, which, dtype), CpuPlan)
            with torch.no_grad():
                found = results(problem, *given)
            for name, own, other in zip(
                ["output", "input", "weight", "bias"], found, expected(problem, *given), strict=True
            ):
                error = (own.double() - other).abs().max() / other.abs().max().clamp(min=1)
                assert error < TOLERANCE[dtype], (name, problem, formats)
        assert planned > 24, "most of them are the kernels'"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("groups", [1, 16], ids=["direct", "depthwise"])
    @pytest.mark.parametrize("activation", oracle.ACTIVATIONS)
    def test_epilogues(self, activation: str, groups: int, dtype: torch.dtype) -> None:
        weight = torch.randn(16, 16 // groups, 3, 3).to(dtype)
        slope = 0.01 if activation == "leaky_relu" else 0.0
        for format in (torch.contiguous_format, LAST):
            input = torch.randn(1, 16, 7, 21).to(dtype).contiguous(memory_format=format)
            bias, residual = torch.randn(16).to(dtype), torch.randn_like(input)
            how = ([1, 1], [1] * 4, [1, 1], groups, None, activation, slope)
            found = OPERATORS.fused(input, weight, bias, residual, *how)
            x, w, b, r = (t.double() for t in (input, weight, bias, residual))
            sums = F.conv2d(x, w, b, 1, 1, 1, groups) + r
            other = oracle.ACTIVATIONS[activation](sums)
            assert (found - other).abs().max() < TOLERANCE[dtype] * 20

    def test_views(self) -> None:
        """Strides of any kind: slices, transposed planes, expanded images."""
        problem = Problem.of((2, 16, 9, 11), (16, 16, 3, 2), (1, 2), (1, 0, 2, 1), (1, 1), 1)
        input, weight, bias, grad = tensors(problem, torch.float32, [torch.contiguous_format] * 3)
        for view in (
            lambda t: F.pad(t, (1, 2, 2, 1))[:, :, 2:-1, 1:-2],
            lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
            lambda t: t.repeat_interleave(2, 3)[..., ::2],
            lambda t: t[:1, :1].expand(t.shape),
        ):
            given = view(input), view(weight), bias, view(grad)
            for own, other in zip(results(problem, *given), expected(problem, *given), strict=True):
                assert (own - other).abs().max() < 1e-4

    @pytest.mark.parametrize(
        "shape", [(32, 32, 3, 3), (4, 32, 3, 3), (32, 32, 1, 1), (32, 1, 3, 3)]
    )
    def test_a_bias_with_a_stride(self, shape: tuple[int, ...]) -> None:
        input, weight, bias = torch.randn(1, 32, 9, 9), torch.randn(shape), torch.randn(shape[0])
        strided = torch.stack([bias, torch.full_like(bias, torch.nan)], 1)[:, 0]
        how = ([1, 1], [1] * 4, [1, 1], 32 // shape[1], None)
        found = OPERATORS.forward(input, weight, strided, *how)
        assert found.equal(OPERATORS.forward(input, weight, bias, *how))

    @pytest.mark.parametrize("groups", [1, 144], ids=["one", "depthwise"])
    @pytest.mark.parametrize("kernel", [1, 3], ids="{0}x{0}".format)
    def test_threads_change_no_bit(self, groups: int, kernel: int) -> None:
        weight, pad = (144, 144 // groups, kernel, kernel), (kernel // 2,) * 4
        same_in_threads(Problem.of((3, 144, 13, 30), weight, (1, 1), pad, (1, 1), groups))

    @pytest.mark.parametrize(
        ("input", "weight", "stride"),
        [
            ((1, 3, 90, 90), (64, 3, 7, 7), 2),
            ((8, 128, 7, 7), (128, 128, 3, 3), 1),
            ((1, 32, 6, 20, 20), (64, 32, 3, 3, 3), 1),
        ],
        ids=["shares of tiles", "images in a tile", "volume"],
    )
    def test_cuts_change_no_bit(self, input: Any, weight: Any, stride: int) -> None:
        axes = len(input) - 2
        pad = (weight[-1] // 2,) * (2 * axes)
        same_in_threads(Problem.of(input, weight, (stride,) * axes, pad, (1,) * axes, 1))

    @pytest.mark.parametrize("format", [torch.contiguous_format, LAST], ids=str)
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize(("kernel", "dilation"), [((3, 3), (7, 9)), ((5, 9), (1, 2))])
    def test_padding_is_skipped(
        self, dtype: torch.dtype, format: Any, kernel: Any, dilation: Any
    ) -> None:
        """Register tiles of which a tap reads all, some and none, from one side or from both."""
        before, after = (kernel[0] // 2 * dilation[0], kernel[1] - 1), (1, kernel[1] * dilation[1])
        pad = before[0], after[0], before[1], after[1]
        problem = Problem.of((2, 40, 23, 31), (48, 40, *kernel), (1, 1), pad, dilation, 1)
        is_last, is_16_bit = format is LAST, dtype.itemsize == 2
        passes: tuple[Pass, ...] = ("forward", "input_grad")
        for which in passes:
            found = plans.plan(problem, which, dtype, channels_last=is_last)
            assert isinstance(found, CpuPlan)
            assert found.skips == (is_last or not is_16_bit)
        given = tensors(problem, dtype, [format] * 3)
        for own, other in zip(results(problem, *given), expected(problem, *given), strict=True):
            assert (own.double() - other).abs().max() < TOLERANCE[dtype] * other.abs().max()
        same_in_threads(problem)

    def test_threads_are_pytorchs(self) -> None:
        """No OpenMP library but PyTorch's is loaded, and its threads compute."""
        problem = same_sized((4, 64, 56, 56), 1)
        given = tensors(problem, torch.float32, [torch.contiguous_format] * 3)

        def times() -> tuple[float, float]:
            """Processor times: this thread's, and those of all others."""
            own, all_of_them = time.thread_time(), time.process_time()
            for _ in range(3):
                results(problem, *given)
            own = time.thread_time() - own
            return own, time.process_time() - all_of_them - own

        results(problem, *given)
        alone, _ = times()
        torch.set_num_threads(2)
        try:
            _, others = times()
        finally:
            torch.set_num_threads(1)
        # Time spent waiting is this thread's, so a busy machine changes nothing.
        assert others > alone / 4, "another thread computed about half"
        mapped = Path("/proc/self/maps").read_text()
        assert len(set(re.findall(r"\S*/lib[gi]?omp[^/\s]*\.so\S*", mapped))) == 1

    def test_large_results_have_large_pages(self) -> None:
        """The system is asked for them, as their memory is new: it may still refuse."""
        weight = torch.randn(8, 1, 1, 1)
        result = OPERATORS.forward(
            torch.zeros(1, 8, 1024, 1280), weight, None, [1, 1], [0] * 4, [1, 1], 8, None
        )
        place, flags, is_here = result.data_ptr() + (4 << 20), "", False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                is_here = int(found[1], 16) <= place < int(found[2], 16)
            elif is_here and line.startswith("VmFlags:"):
                flags = line
        if not Path("/sys/kernel/mm/transparent_hugepage").exists():
            pytest.skip("this system has no transparent large pages")
        assert " hg" in flags

    @pytest.mark.parametrize("groups", [1, 16], ids=["direct", "depthwise"])
    @pytest.mark.parametrize("format", [torch.contiguous_format, LAST], ids=str)
    def test_an_infinite_weight(self, groups: int, format: torch.memory_format) -> None:
        """It meets as many zeros beyond a gradient's borders as in Python's backend."""
        problem = same_sized((1, 16, 12, 16), groups)
        _, weight, _, grad = tensors(problem, torch.float32, [format] * 3)
        weight[3, 0, 1, 1] = float("inf")

        def input_grad() -> Tensor:
            found: Tensor = OPERATORS.input_grad(grad, weight, [12, 16], *geometry(problem))
            return found

        own = input_grad()
        native.serve_operators(False)
        torch.testing.assert_close(own, input_grad(), equal_nan=True)
        assert not own.isfinite().all()


class TestPlans:
    def test_what_kernels_do_not_take(self) -> None:
        def reason(dtype: torch.dtype, which: Pass = "forward", **changes: Any) -> object:
            shapes = {
                "input": (2, 32, 20, 20),
                "weight": (32, 32, 3, 3),
                "stride": (1, 1),
                **changes,
            }
            problem = Problem.of(
                shapes["input"], shapes["weight"], shapes["stride"], (1,) * 4, (1, 1), 1
            )
            return plans.plan(problem, which, dtype, changes.get("epilogue", Epilogue()))

        assert isinstance(reason(torch.float32), CpuPlan)
        assert "torch.complex64" in str(reason(torch.complex64))
        assert "silu" in str(reason(torch.float32, epilogue=Epilogue("silu")))
        assert "residues" in str(reason(torch.float32, "input_grad", stride=(5, 5)))
        assert "nothing" in str(reason(torch.float32, input=(0, 32, 20, 20)))

    def test_few_channels(self) -> None:
        """Vectors have columns where a group writes few channels, and other groups' otherwise."""

        def kernels(groups: int, channels: tuple[int, int]) -> list[str]:
            read, written = channels
            shapes = (2, groups * read, 20, 20), (groups * written, read, 3, 3)
            problem = Problem.of(*shapes, (1, 1), (1,) * 4, (1, 1), groups)
            passes: tuple[Pass, ...] = ("forward", "input_grad", "weight_grad")
            found = [plans.plan(problem, which, torch.float32) for which in passes]
            return [plan.kernel for plan in found if isinstance(plan, CpuPlan)]

        assert kernels(1, (32, 3)) == ["narrow", "direct", "direct"]
        assert kernels(1, (3, 32)) == ["direct", "narrow", "direct"]
        assert kernels(32, (4, 4)) == ["narrow", "narrow", "depthwise"]
        assert kernels(32, (8, 8)) == ["narrow", "narrow", "direct"]
        assert kernels(32, (16, 16)) == ["direct"] * 3
        assert kernels(32, (1, 1)) == ["depthwise"] * 3

    def test_far_taps_have_large_tiles(self) -> None:
        """A tile of 64 channels would be a part of a row, with most of what it stages around it."""
        problem = Problem.of(
            (8, 32, 128, 128), (64, 32, 5, 9), (1, 1), (2, 2, 4, 4), (2, 3), 1
        )  # fmt: skip
        with mock.patch.object(plans, "l2_bytes", return_value=1 << 20):
            found = plans.plan(problem, "input_grad", torch.float32)
        assert isinstance(found, CpuPlan)
        assert found.columns == 128
        assert found.depth < 64

    def test_scratch_is_bounded(self) -> None:
        draw = random.Random(0)
        for _ in range(200):
            problem = drawn(draw, draw.random() < 0.5)
            for which in ("forward", "input_grad", "weight_grad"):
                found = plans.plan(problem, which, torch.float64)
                if isinstance(found, CpuPlan):
                    assert min(found[1:]) >= 0
                    assert found.rows * found.columns * found.channels * 8 <= 8 << 20

    def test_entries_have_them(self) -> None:
        input, weight = torch.randn(1, 32, 20, 20), torch.randn(32, 32, 3, 3)
        how = ([1, 1], [1] * 4, [1, 1], 1, None)
        assert entries.make_entry("forward", input, weight, None, *how).cpu_plan is not None
        some = [tensor.to(torch.complex64) for tensor in (input, weight)]
        assert entries.make_entry("forward", *some, None, *how).cpu_plan is None


def test_the_rate_of_multiply_adds() -> None:
    serving = native.conv2d, native.batch_norm_act, native.conv_bn_act
    double = native.multiply_add_rate(torch.float64, 0.1)
    single = native.multiply_add_rate(torch.float32, 0.1)
    assert double is not None
    assert single is not None
    assert 1e8 < 1.2 * double < single, "vectors have twice as many lanes of float32"
    functions = native.conv2d, native.batch_norm_act, native.conv_bn_act
    assert functions == serving, "a measurement changes nothing for other calls"
    with mock.patch.dict(os.environ, FASTCONV_NATIVE="0"):
        assert native.multiply_add_rate(torch.float32, 0.1) is None


class TestFeatures:
    def test_features_of_the_first_cpu(self, tmp_path: Path) -> None:
        """They are in the library's key: a cache folder may be shared by unlike machines."""
        file = tmp_path / "cpuinfo"
        file.write_text("processor\t: 0\nflags\t\t: fpu avx2 abm\n\nprocessor\t: 1\nflags\t: x\n")
        assert build.cpu_features(file) == "abm avx2 fpu"
        file.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
        assert build.cpu_features(file) == "asimd fp"
        assert build.cpu_features(tmp_path / "missing") == ""


class TestUse:
    """On a CPU, the library is used if it is there, and built after some calls."""

    @pytest.mark.parametrize(("is_built", "started_at"), [(True, 1), (False, 64)])
    def test_when_it_starts(self, is_built: bool, started_at: int) -> None:
        with (
            mock.patch.multiple(native, conv2d=None, _started=False, _cpu_passes=0),
            mock.patch.object(build, "is_built", return_value=is_built),
            mock.patch.object(native, "start_build") as start,
        ):
            for call in range(1, 65):
                native.before_cpu_pass()
                assert start.called == (call >= started_at)

    @pytest.mark.parametrize("is_built", [True, False])
    def test_it_can_be_decided_beforehand(self, is_built: bool) -> None:
        """For comparisons of bits: the library begins to be used at once, or not at all."""
        with (
            mock.patch.multiple(native, conv2d=None, _started=False, _cpu_passes=0),
            mock.patch.object(build, "is_built", return_value=is_built),
            mock.patch.object(native, "load_if_built") as load,
            mock.patch.object(native, "start_build") as start,
        ):
            native.decide()
            assert start.called == load.called == is_built
            start.reset_mock()
            for _ in range(200 * (not is_built)):
                native.before_cpu_pass()
            assert not start.called


@pytest.mark.skipif("FASTCONV_SANITIZED" not in os.environ, reason="run by `make sanitize-cpu`")
def test_sanitizers(tmp_path: Path) -> None:
    """Random problems under AddressSanitizer and UBSan, with vectors of the least width."""
    program = tmp_path / "sanitized"
    source = Path(__file__).parent / "cpu_kernels_program.cc"
    flags = ["-std=c++20", "-O1", "-g", "-Wno-psabi", f"-I{build.SOURCES}"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    sources = [source, build.SOURCES / "cpu/kernels.cc"]
    subprocess.check_call(["g++", *flags, *sources, "-o", program])
    problems = os.environ["FASTCONV_SANITIZED"]
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    ended = subprocess.run(
        [program, problems], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout == f"{problems} problems\n"

"""Runs every kind of kernel once, for NVIDIA's compute-sanitizer to watch; see the Makefile.

An argument names a family, "direct", "ampere", "depthwise" or "grouped": then only its kernels and
the portable ones run, with sm_80's shared memory; the last two run only groups. Causal
convolutions and batch normalization, which are not planned with the others, run with "direct". With
"corpus", a problem of the coverage corpus runs for each kernel, direction and format, of images and
of volumes. Two of the tools do not understand everything that the kernels do. initcheck does not
see the bytes that sm_90a's bulk copies write. racecheck reports races where a ring of barriers
orders the accesses, on Hopper and in Ampere's halo-tile kernel (see docs/kernels/ampere-halo.md).

The sanitizer slows kernels down ten to fifty times, so the problems are small, and inputs and
references are computed on the CPU. The exit status is 1 if a result is wrong.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.append(str(Path(__file__).parents[1]))

import batchnorm_cases
import fastconv
import oracle
from causal_cases import Case, Tensors, random_cases
from emulator import corpus
from emulator.pass_cases import PassCase, assert_correct
from emulator.pass_cases import Tensors as PassTensors
from fastconv import native, ops
from fastconv.backends import cuda, left_statistics
from fastconv.kernels import planner, plans
from fastconv.kernels.ampere.halo import plan as ampere_halo
from fastconv.kernels.batchnorm.plan import beside
from fastconv.kernels.family import Declined, Launch, Plan
from fastconv.kernels.gpus import H200
from fastconv.kernels.hopper.halo import plan as hopper_halo
from fastconv.kernels.hopper.wgrad_halo import plan as hopper_weight_grad
from fastconv.kernels.planning import portable
from fastconv.problem import Problem
from gpu.corpus_cases import LONG_SUMS, run_on_gpu

DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
FORMATS = (torch.contiguous_format, torch.channels_last)

# Input and weight shape, stride, padding, dilation, groups.
PROBLEMS = {
    "asymmetric": ((2, 3, 9, 20), (5, 3, 5, 9), (1, 1), (2, 2, 4, 4), (1, 1), 1),
    "dilated": ((1, 5, 15, 16), (9, 5, 3, 4), (1, 1), (2, 1, 4, 3), (2, 3), 1),
    "strided": ((1, 4, 11, 14), (6, 4, 3, 3), (2, 3), (1, 1, 0, 2), (1, 1), 1),
    "stride and dilation": ((1, 2, 13, 17), (3, 2, 3, 3), (4, 2), (3, 0, 1, 2), (2, 4), 1),
    "few taps": ((2, 3, 9, 14), (4, 3, 2, 1), (4, 5), (1, 0, 2, 1), (1, 1), 1),
    "pointwise": ((2, 17, 5, 7), (20, 17, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "depthwise": ((1, 6, 8, 12), (6, 1, 3, 5), (1, 1), (1, 1, 2, 2), (1, 1), 6),
    "grouped": ((1, 8, 6, 10), (12, 4, 3, 3), (1, 1), (1, 0, 0, 1), (1, 1), 2),
    "wide kernel": ((1, 2, 4, 40), (2, 2, 1, 21), (1, 1), (0, 0, 10, 10), (1, 1), 1),
    "many channels": ((1, 20, 6, 8), (40, 20, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "one pixel": ((1, 3, 3, 3), (2, 3, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "far apart": ((1, 1, 2, 9100), (2, 1, 1, 3), (1, 500), (0, 0, 0, 0), (1, 4000), 1),
    # Has enough blocks on any GPU that the weights are packed and the pixels are split.
    "many blocks": ((400, 3, 7, 8), (4, 3, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
}

# Problems for the tensor-core kernels, with the same fields. They cover tiles that roll down the
# image, several rows per tile, rows stacked in one MMA, strides, input gradients by residues and
# with zeros, weights that do not stay in shared memory, blocks of pixels, strips, lines that single
# lanes copy, and TMA boxes with several images.
TENSOR_CORE_PROBLEMS = {
    "rolling": ((1, 16, 7, 130), (32, 16, 3, 2), (1, 1), (1, 1, 1, 0), (1, 1), 1),
    "narrow": ((2, 24, 9, 7), (72, 24, 2, 3), (1, 1), (1, 0, 1, 1), (1, 1), 1),
    "stacked": ((1, 16, 12, 21), (16, 16, 4, 2), (1, 1), (0, 0, 1, 1), (1, 1), 1),
    "strided": ((1, 16, 13, 18), (64, 16, 3, 2), (2, 2), (1, 1, 0, 0), (1, 1), 1),
    "residues": ((1, 64, 9, 16), (24, 64, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    "zeros": ((1, 64, 8, 16), (24, 64, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1),
    "space_to_depth": ((1, 3, 14, 18), (64, 3, 4, 4), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    "blocks": ((1, 16, 12, 64), (64, 16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "deep": ((1, 72, 5, 6), (130, 72, 2, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "strips": ((1, 24, 3, 301), (64, 24, 1, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "grouped": ((1, 32, 6, 20), (64, 16, 3, 2), (1, 1), (1, 1, 0, 0), (1, 1), 2),
    "few outputs": ((1, 40, 20, 66), (6, 40, 3, 4), (1, 1), (1, 2, 2, 1), (1, 1), 1),
    "few inputs": ((2, 5, 24, 70), (72, 5, 3, 3), (1, 1), (0, 0, 0, 0), (2, 1), 1),
    "rows that go on": ((1, 16, 5, 301), (128, 16, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "short lines": ((1, 40, 12, 56), (48, 40, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "boxes": ((8, 12, 5, 44), (70, 12, 2, 3), (1, 1), (1, 0, 1, 1), (1, 1), 1),
    "boxes that are cleared": ((8, 16, 12, 76), (136, 16, 3, 3), (1, 1), (0, 0, 0, 0), (1, 1), 1),
}

# Problems for the implicit-GEMM kernels, with the same fields. They cover tiles across images,
# whole planes, rows of taps, residues of a stride, and zeros.
GEMM_PROBLEMS = {
    "pointwise": ((3, 72, 10, 12), (136, 72, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    "small images": ((5, 72, 7, 7), (72, 72, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
    "rows": ((1, 40, 20, 24), (72, 40, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
    "zeros": ((2, 64, 14, 14), (72, 64, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1),
}
GEMM_KINDS = (
    (torch.float32, torch.contiguous_format, True, "tf32"),
    (torch.bfloat16, torch.channels_last, True, "ieee"),
)

# Problems for narrow groups, with the same fields. They cover small images, several to a block;
# kernels larger than the image, of which a block copies the inside; tiles; strides, dilations and
# both; groups of several channels, and parts of them; long sums; kernel rows that threads or blocks
# share; rows of taps as Toeplitz matrices; pixels that many blocks share; rows with more vectors
# than a block has threads; and images of one column.
NARROW_PROBLEMS = {
    "small images": ((9, 35, 7, 8), (35, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 35),
    "inside": ((5, 6, 7, 7), (6, 1, 13, 13), (1, 1), (6, 6, 6, 6), (1, 1), 6),
    "inside, aligned": ((3, 8, 8, 8), (8, 1, 5, 9), (1, 1), (4, 4, 8, 8), (1, 1), 8),
    "tiles": ((1, 64, 40, 96), (64, 1, 7, 7), (1, 1), (3, 3, 3, 3), (1, 1), 64),
    "strided": ((2, 32, 29, 32), (32, 1, 5, 5), (2, 2), (2, 2, 2, 2), (1, 1), 32),
    "strides differ": ((2, 10, 13, 18), (10, 1, 3, 4), (4, 3), (1, 0, 2, 1), (1, 1), 10),
    "dilated": ((2, 16, 20, 24), (16, 1, 3, 5), (1, 1), (2, 3, 6, 5), (2, 3), 16),
    "stride and dilation": ((1, 4, 15, 16), (4, 1, 3, 3), (2, 3), (1, 2, 3, 0), (4, 2), 4),
    "row of taps": ((2, 16, 6, 64), (16, 1, 1, 21), (1, 1), (0, 0, 10, 10), (1, 1), 16),
    "multiplier": ((2, 5, 9, 16), (15, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 5),
    "large multiplier": ((1, 2, 5, 8), (80, 1, 2, 3), (1, 1), (0, 0, 1, 1), (1, 1), 2),
    "narrow": ((3, 24, 12, 16), (24, 4, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 6),
    "widths differ": ((1, 14, 9, 9), (6, 7, 3, 2), (1, 2), (0, 0, 0, 0), (1, 1), 2),
    "long sums": ((1, 6, 9, 20), (6, 3, 14, 13), (1, 1), (7, 7, 6, 6), (1, 1), 2),
    "tall": ((2, 2, 30, 8), (2, 1, 25, 33), (1, 1), (12, 12, 16, 16), (1, 1), 2),
    "long rows": ((3, 8, 20, 24), (8, 1, 31, 31), (1, 1), (15, 15, 15, 15), (1, 1), 8),
    "long rows, odd image": ((2, 8, 17, 19), (8, 1, 21, 27), (1, 1), (10, 9, 13, 12), (1, 1), 8),
    "long rows, tiles": ((1, 8, 75, 70), (8, 1, 31, 33), (1, 1), (3, 0, 5, 2), (1, 1), 8),
    "one pixel": ((2, 3, 1, 1), (3, 1, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 3),
    "many images": ((64, 4, 14, 16), (4, 1, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 4),
    "in parts": ((2, 4, 1, 1501), (4, 1, 1, 4), (1, 1), (0, 0, 3, 3), (1, 1), 4),
    "one column": ((2, 8, 701, 1), (8, 1, 4, 3), (1, 1), (3, 0, 1, 1), (1, 1), 8),
}
# Problems for groups of 4 to 32 channels, with the same fields. They cover each width, several
# images to a block and parts of images, strides and their residues, dilations, and long sums.
GROUPED_PROBLEMS = {
    "4 channels": ((3, 32, 9, 11), (32, 4, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 8),
    "8 channels": ((2, 48, 10, 17), (48, 8, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 6),
    "16 channels": ((9, 32, 7, 7), (32, 16, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 2),
    "32 channels": ((2, 64, 9, 8), (64, 32, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 2),
    "strided": ((2, 32, 13, 40), (32, 4, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 8),
    "strides differ": ((1, 48, 9, 20), (48, 16, 2, 5), (1, 3), (1, 0, 2, 3), (1, 1), 3),
    "more than four taps": ((1, 16, 9, 20), (16, 4, 2, 6), (3, 1), (1, 0, 2, 3), (1, 1), 4),
    "dilated": ((1, 32, 9, 70), (32, 8, 3, 3), (1, 1), (2, 1, 2, 3), (2, 3), 4),
    "residues without taps": ((1, 32, 9, 20), (32, 8, 1, 2), (2, 3), (0, 1, 2, 1), (1, 1), 4),
}
# memcheck takes a wgmma's matrix for bytes in a row. Where taps are addresses in a TMA box, their
# matrices overlap, and it reports reads beyond the last stage; so these kernels get more memory.
BOXES_WITH_HALO = "hopper/wgrad_implicit_gemm/halo_kernel.cuh"
ROOM = 16 << 10

MODES = (
    (torch.float32, "tf32"),
    (torch.float32, "ieee"),
    (torch.bfloat16, "ieee"),
)


def results(
    problem: Problem, tensors: list[torch.Tensor], precision: str
) -> tuple[torch.Tensor, ...]:
    """The output, and the gradients of input, weight and bias, on the device of the tensors."""
    input, weight, grad_output = tensors
    last = (problem.stride, problem.padding, problem.dilation, problem.groups, precision)
    return (
        ops.forward(input, weight, None, *last),
        ops.input_grad(grad_output, weight, problem.input_size, *last),
        *ops.weight_grad(grad_output, input, problem.kernel_size, *last, True),
    )


def reference(problem: Problem, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of :func:`results` by PyTorch, in float64 on the CPU."""
    *leaves, grad_output = (oracle.exact(tensor) for tensor in tensors)
    top, bottom, left, right = problem.padding
    geometry: dict[str, Any] = {
        "stride": problem.stride,
        "padding": ((top, bottom), (left, right)),
        "dilation": problem.dilation,
        "groups": problem.groups,
    }
    passes = oracle.with_gradients(oracle.conv2d, leaves, grad_output, **geometry)
    return (*passes, grad_output.sum((0, 2, 3)))


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU that begins one element past an aligned address."""
    storage = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype).to("cuda")
    return storage.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def check(
    problem: Problem,
    dtype: torch.dtype,
    memory_format: Any,
    aligned: bool,
    precision: str = "ieee",
    small_rows: int = 0,
) -> bool:
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    on_cpu = [oracle.random(s, dtype).contiguous(memory_format=memory_format) for s in shapes]
    on_cpu[0][:, :, :small_rows] *= 2.0**-50
    if precision == "tf32":  # Clear the bits that TF32 would round away.
        on_cpu = [(tensor.view(torch.int32) & ~0x1FFF).view(dtype) for tensor in on_cpu]
    on_gpu = [tensor.to("cuda") if aligned else misaligned(tensor) for tensor in on_cpu]
    actual = [result.cpu() for result in results(problem, on_gpu, precision)]
    expected = reference(problem, on_cpu)
    sizes = reference(problem, [tensor.abs() for tensor in on_cpu])
    try:
        for name, *values in zip(
            ("output", "input", "weight", "bias"), actual, expected, sizes, strict=True
        ):
            # With TF32, tensor cores truncate the bits that do not fit an accumulator.
            oracle.assert_within_rounding(name, *values, more=2 if precision == "tf32" else 1)
    except AssertionError as error:
        kind = f"{dtype}, {precision}, {memory_format}, aligned={aligned}"
        print(f"wrong: {problem}, {kind}: {error}")
        return False
    return True


def main() -> int:
    torch.manual_seed(0)
    # Plans that are forced here must not be stored.
    plans.find_or_make = lambda plan, *asked: plan(*asked)
    family = sys.argv[1] if len(sys.argv) > 1 else ""
    correct = corpus_checks() if family == "corpus" else family_checks(family)
    print(f"{sum(correct)} of {len(correct)} correct")
    return 0 if all(correct) else 1


def family_checks(family: str) -> list[bool]:
    """The checks of a family, or of all that are planned where it is empty."""
    with planner.only(family, limits="sm_80") if family else nullcontext():
        own = {"depthwise": narrow_checks, "grouped": grouped_checks}
        correct = own[family]() if family in own else checks(PROBLEMS)
        if family in ("", "ampere"):
            correct += tensor_core_checks()
        if family == "":
            correct += gemm_checks()
        if family == "direct":
            # Sequences of one position with gaps are copied by PyTorch, whose kernels are not
            # watched.
            cases = random_cases(24, 1, (4, 2, 9), 300)
            correct += [causal_check(case) for case in cases if case.length > 1]
            correct += [batchnorm_check(case) for case in batchnorm_cases.random_cases(24, 1)]
    return correct


def checks(problems: dict[str, tuple[Any, ...]]) -> list[bool]:
    correct = []
    for index, arguments in enumerate(problems.values()):
        # Each problem runs in both layouts; types and alignments alternate.
        for turn, memory_format in enumerate(FORMATS):
            dtype = DTYPES[(index + turn) % len(DTYPES)]
            aligned = (index + 2 * turn) % 3 != 0
            correct.append(check(Problem.of(*arguments), dtype, memory_format, aligned))
    return correct


def causal_check(case: Case) -> bool:
    """Compares all passes of a causal convolution on the GPU with those on the CPU."""
    tensors = Tensors.random(case).arguments
    on_cpu = (tensors[0] * 0.5, None, *tensors)
    on_gpu = tuple(None if tensor is None else whole_copy(tensor) for tensor in on_cpu)
    results = []
    for grad, final, *inputs in (on_gpu, on_cpu):
        output, _ = torch.ops.fastconv.causal_forward(*inputs, case.silu, False)
        gradients = torch.ops.fastconv.causal_backward(
            grad, final, *inputs, case.silu, True, case.states
        )
        results.append([result.cpu().double() for result in (output, *gradients)])
    return agree(str(case), results, 2e-2)


def agree(what: str, results: list[list[torch.Tensor]], bound: float) -> bool:
    """Whether the GPU's results are those of the CPU, which come second."""
    try:
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=bound, atol=bound)
    except AssertionError as error:
        print(f"wrong: {what}: {error}")
        return False
    return True


def batchnorm_check(case: batchnorm_cases.Case) -> bool:
    """Compares both passes of a batch normalization on the GPU with those on the CPU."""
    tensors, results = batchnorm_cases.Tensors.random(case), []
    for move in (whole_copy, torch.clone):
        x, residual, weight, bias, mean, var, grad = (
            None if one is None else move(one) for one in vars(tensors).values()
        )
        options = (case.activation, case.slope)
        y, *statistics = torch.ops.fastconv.batch_norm_forward(
            x, residual, weight, bias, mean, var, None, True, 0.1, 1e-5, *options
        )
        other = {None: None, "output": y, "residual": residual}[beside(*options, case.residual)]
        gradients = torch.ops.fastconv.batch_norm_backward(
            grad, x, other, weight, bias, *statistics, True, case.residual, *options, True, True,
            case.residual,
        )  # fmt: skip
        results.append([one.cpu().double() for one in (y, mean, var, *gradients)])
    return agree(str(case), results, 3e-2)


def whole_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU with the same strides and gaps, made by no kernel that is not watched."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = tensor.as_strided((count,), (1,), 0).to("cuda")
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def corpus_checks() -> list[bool]:
    return [corpus_check(case) for case in corpus_cases()]


def corpus_cases() -> list[PassCase]:
    """The cheapest problem for each kernel, direction and format, of images and of volumes."""
    found: dict[Any, tuple[float, PassCase]] = {}
    for case in corpus.read_cases():
        if case.gpu.architecture != H200.architecture:
            continue
        kind = (case.direction, case.channels_last, case.conv.problem.depth is not None)
        for launch in case.plan.launches:
            boxes = dict(launch.kernel.constants).get("box_loads", False)
            key = (launch.kernel.source, launch.kernel.entry, boxes, kind)
            if key not in found or corpus.cost(case) < found[key][0]:
                found[key] = (corpus.cost(case), case)
    return list({corpus.line_of(case): case for _, case in found.values()}.values())


def with_room(launch: Launch) -> Launch:
    if launch.kernel.source != BOXES_WITH_HALO:
        return launch
    most = H200.shared_bytes_per_block
    return replace(launch, shared_bytes=min(launch.shared_bytes + ROOM, most))


def roomy(case: PassCase) -> PassCase:
    """The case with memory that the sanitizer believes its kernels to read."""

    def planned(*arguments: Any) -> Plan:
        plan = case.planner(*arguments)
        return replace(plan, launches=tuple(map(with_room, plan.launches)))

    planned.__name__ = case.direction
    return replace(case, planner=planned)


def corpus_check(case: PassCase) -> bool:
    line, tensors, case = corpus.line_of(case), PassTensors.random(case), roomy(case)
    try:
        assert_correct(case, tensors, run_on_gpu(case, tensors), LONG_SUMS[corpus.mode_of(case)])
    except AssertionError as error:
        print(f"wrong: {line}: {error}")
        return False
    return True


def grouped_checks() -> list[bool]:
    """Checks plans for all SMs, and for one, whose blocks have several tiles."""
    last = torch.channels_last
    problems = [Problem.of(*arguments) for arguments in GROUPED_PROBLEMS.values()]
    kinds = list(zip(problems, (torch.bfloat16, torch.float16) * len(problems), strict=False))
    correct = [check(problem, dtype, last, True) for problem, dtype in kinds]
    few = replace(cuda.gpu(torch.cuda.current_device()), sm_count=1)
    cuda._ready.cache_clear()  # Drops the plans for all SMs.
    with mock.patch.object(cuda, "gpu", return_value=few):
        return correct + [check(problem, dtype, last, True) for problem, dtype in kinds]


def narrow_checks() -> list[bool]:
    """Checks plans for all SMs, whose blocks share pixels, and for one: blocks have many planes."""
    correct = checks(NARROW_PROBLEMS)
    few = replace(cuda.gpu(torch.cuda.current_device()), sm_count=1)
    cuda._ready.cache_clear()  # Drops the plans for all SMs.
    with mock.patch.object(cuda, "gpu", return_value=few):
        return correct + checks(NARROW_PROBLEMS)


def tensor_core_checks() -> list[bool]:
    correct = []
    # Plans are made for a GPU with two SMs, so that blocks have several large tiles. The patches
    # keep the planner from giving such small weight gradients to the portable kernels, and let it
    # choose scaled fp16 for such small images.
    few = replace(cuda.gpu(torch.cuda.current_device()), sm_count=2)
    with (
        mock.patch.object(cuda, "gpu", return_value=few),
        mock.patch.object(portable, "wgrad_cycles", return_value=math.inf),
        mock.patch.object(portable, "rate", return_value=0.0),
        mock.patch.object(hopper_halo, "SCALED_FP16_CYCLES", 0.0),
        mock.patch.object(ampere_halo, "SCALED_FP16_CYCLES", 0.0),
    ):
        for index, arguments in enumerate(TENSOR_CORE_PROBLEMS.values()):
            for turn, memory_format in enumerate(FORMATS):
                dtype, precision = MODES[(index + turn) % len(MODES)]
                aligned = (index + turn) % 4 != 3
                problem = Problem.of(*arguments)
                correct.append(check(problem, dtype, memory_format, aligned, precision))
        # Numbers beyond float16's range: the kernels must repair these results.
        for precision, name in (("tf32", "rolling"), ("ieee", "narrow"), ("ieee", "blocks")):
            problem = Problem.of(*TENSOR_CORE_PROBLEMS[name])
            kind = (torch.float32, torch.contiguous_format, True, precision)
            correct.append(check(problem, *kind, small_rows=5))
    return correct


def gemm_checks() -> list[bool]:
    """Checks the implicit-GEMM kernels, also for images so small that others are faster."""
    few = replace(cuda.gpu(torch.cuda.current_device()), sm_count=2)
    with (
        mock.patch.object(cuda, "gpu", return_value=few),
        mock.patch.object(hopper_halo, "image_cycles", return_value=math.inf),
        mock.patch.object(portable, "wgrad_cycles", return_value=math.inf),
        mock.patch.object(hopper_weight_grad, "choose_tile", side_effect=Declined("others")),
    ):
        kinds = product(GEMM_PROBLEMS.values(), GEMM_KINDS)
        correct = [check(Problem.of(*arguments), *kind) for arguments, kind in kinds]
        return correct + statistics_checks()


def statistics_checks() -> list[bool]:
    """Checks blocks whose convolutions leave statistics for their normalization."""
    kinds = product(GEMM_PROBLEMS.values(), left_statistics.TYPES)
    # The native host path is left out, so that it is seen who takes the statistics. Were it still
    # being built, it would come back when it is there.
    native.settle()
    entries = dict.fromkeys(("conv2d", "batch_norm_act", "conv_bn_act"))
    with mock.patch.multiple(native, **entries):
        return [statistics_check(Problem.of(*arguments), dtype) for arguments, dtype in kinds]


def statistics_check(problem: Problem, dtype: torch.dtype) -> bool:
    """Compares a block's output and statistics with those of a float64 one on the CPU."""
    shapes = (problem.input_shape, problem.weight_shape)
    last = torch.channels_last
    on_cpu = [oracle.random(s, dtype).contiguous(memory_format=last) for s in shapes]
    options = {"stride": problem.stride, "padding": problem.padding[0], "training": True}
    found = []
    with mock.patch.object(left_statistics, "new", wraps=left_statistics.new) as asked:
        for input, weight in (
            [tensor.to("cuda") for tensor in on_cpu],
            [tensor.double() for tensor in on_cpu],
        ):
            wide = torch.promote_types(input.dtype, torch.float32)
            mean, var = torch.zeros(2, problem.out_channels, dtype=wide).to(input.device)
            y = fastconv.conv_bn_act(
                input, weight, None, mean, var, None, None, momentum=1.0, **options
            )
            found.append([one.cpu().double() for one in (y, mean, var)])
    what = f"statistics of {problem}, {dtype}"
    if asked.call_args.args[0] == 0:
        print(f"wrong: {what}: the plan leaves none")
        return False
    return agree(what, found, 3e-2)


if __name__ == "__main__":
    sys.exit(main())

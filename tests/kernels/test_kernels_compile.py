"""Every kernel compiles for every architecture that we support; no GPU is needed.

The compilers of three CUDA releases compile a covering set of the portable kernels for all
architectures, and the rest for one. Tensor-core kernels of the benchmark's workloads are compiled
for their own architectures. ``pytest -rA`` shows registers and spills.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, cycle, product
from typing import Any

import pytest
import torch

import nvrtc as other_nvrtc
import small_mmas
import swizzled_mmas
import tensor_maps
from emulator import corpus, forced_plans
from fastconv import jit
from fastconv.jit import compile
from fastconv.jit.pool import compile_jobs
from fastconv.kernels import ampere, direct, gpus, grouped, planner
from fastconv.kernels.family import Declined, Gpu, Kernel, Operands, Plan
from fastconv.kernels.gpus import GPUS
from fastconv.kernels.gpus import H200 as HOPPER
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem
from fastconv.workloads import FOUNDING, SUITES

PASSES = (direct.forward, direct.input_grad, direct.weight_grad)
SCALAR_BYTES = {"float": 4, "double": 8, "fastconv::float16": 2, "fastconv::bfloat16": 2}

# Input shape, weight shape, stride, padding, dilation and groups. A large batch has enough blocks
# on any GPU that its weights are packed; a small one has not.
PROBLEMS = {
    name: Problem.of(*arguments)
    for name, arguments in {
        "few blocks": ((1, 5, 14, 16), (9, 5, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1),
        "pointwise": ((512, 20, 16, 16), (40, 20, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
        "strided": ((512, 6, 33, 30), (12, 6, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
        "dilated": ((2, 16, 24, 32), (8, 16, 3, 5), (1, 1), (2, 2, 6, 6), (2, 3), 1),
        "both": ((512, 2, 28, 28), (3, 2, 3, 3), (4, 2), (3, 0, 1, 2), (2, 4), 1),
        "grouped": ((2, 24, 16, 20), (48, 8, 3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 3),
        "depthwise": ((512, 32, 16, 16), (32, 1, 5, 5), (1, 1), (2, 2, 2, 2), (1, 1), 32),
        "wide kernel": ((1, 4, 9, 64), (4, 4, 3, 31), (1, 1), (1, 1, 15, 15), (1, 1), 1),
        "far apart": ((1, 1, 2, 9100), (2, 1, 1, 3), (1, 500), (0, 0, 0, 0), (1, 4000), 1),
        "vast image": ((1, 2, 40000, 40000), (2, 2, 1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 1),
    }.items()
}


@dataclass(frozen=True)
class Work:
    """A pass of a problem on given kinds of tensors."""

    name: str
    problem: Problem
    plan: Callable[[Problem, Operands, Gpu], Plan]
    scalar: str = "float"
    channels_last: bool = False
    aligned: bool = True
    precision: str = "ieee"
    bias_grad: bool = False
    epilogue: Epilogue = NO_EPILOGUE

    def planned(self, gpu: Gpu) -> Plan:
        return _planned(self, gpu)

    def __str__(self) -> str:
        layout = "NHWC" if self.channels_last else "NCHW"
        alignment = "" if self.aligned else " unaligned"
        scalar = self.scalar.removeprefix("fastconv::")
        mode = f"{scalar} {self.precision}" if scalar == "float" else scalar
        bias = " bias" if self.bias_grad else ""
        residual = " residual" if self.epilogue.residual else ""
        activation = self.epilogue.activation.replace("identity", "")
        words = f"{self.name} {self.plan.__name__} {mode} {layout}{alignment}{bias}{residual}"
        return f"{words} {activation}".rstrip()


@cache
def _planned(work: Work, gpu: Gpu) -> Plan:
    layout = torch.channels_last if work.channels_last else torch.contiguous_format
    weight = torch.empty(work.problem.weight_shape, device="meta", memory_format=layout)
    last = work.channels_last
    operands = Operands(
        work.scalar,
        SCALAR_BYTES[work.scalar],
        last,
        last,
        weight.stride(),
        work.aligned,
        work.precision,
        work.bias_grad,
        work.epilogue,
    )
    return work.plan(work.problem, operands, gpu)


def _works(kinds: Iterable[tuple[str, str, bool, bool]]) -> list[Work]:
    """All passes of each kind: name of a problem, scalar, channels last, aligned."""
    return [
        Work(name, PROBLEMS[name], plan, *kind) for (name, *kind), plan in product(kinds, PASSES)
    ]


# Twelve cases with every dtype, layout and pass, strides, dilations, groups, packed and not.
COVERING = _works(
    (
        ("few blocks", "float", False, True),
        ("strided", "double", True, True),
        ("dilated", "fastconv::float16", False, False),
        ("depthwise", "fastconv::bfloat16", True, True),
    )
)
# Every problem in two kinds that differ as much as possible.
REST = _works(
    (name, scalar, channels_last, aligned)
    for i, name in enumerate(PROBLEMS)
    for scalar, channels_last, aligned in (
        (list(SCALAR_BYTES)[i % 4], i // 4 % 2 == 0, i % 3 != 0),
        (list(SCALAR_BYTES)[(i + 2) % 4], i // 4 % 2 == 1, True),
    )
)
FOUNDING_WORKS = [
    Work(workload.name, workload.problem, plan) for workload in FOUNDING for plan in PASSES
]

# Scalar, channels last, aligned and precision of the tensor-core kernels' measurements.
DENSE = ("founding", "real", "odd")
MODES = [
    (scalar, channels_last, True, precision)
    for scalar, precision in (("float", "tf32"), ("float", "ieee"), ("fastconv::bfloat16", "ieee"))
    for channels_last in (False, True)
]


# Kinds with scaled fp16 in two parts, which takes the most registers.
MOST_REGISTERS = ("float", False, True, "ieee")


ALL = "FASTCONV_COMPILE_ALL" in os.environ
"""Whether to compile everything, as ``make test-compile`` does."""


def _taken(works: Iterable[Work]) -> list[Work]:
    """Those that tensor-core kernels take."""
    return [work for work in works if work.planned(HOPPER).family == "hopper"]


def _half_of_modes(kinds: list[Any], turn: int) -> list[Any]:
    """Of workloads in all modes, every other mode; of the next workload, those between."""
    return [one for number, one in enumerate(kinds) if (number + number // len(MODES)) % 2 == turn]


Compiler = Callable[[Kernel, str], jit.Compiled]


def _name(work: Work, index: int, kernel: Kernel) -> str:
    return f"{work}: {index} {kernel.entry}"


def _compile(works: list[Work], gpu: Gpu, compiler: Compiler) -> dict[str, jit.Compiled]:
    """Compiles all that the works need, and reports on each kernel."""
    kernels = {}
    for work in works:
        for index, launch in enumerate(work.planned(gpu).launches):
            assert launch.shared_bytes <= gpu.shared_bytes_per_block, str(work)
            kernels[_name(work, index, launch.kernel)] = launch.kernel
    # Kernels of one file with the same constants share a translation unit, compiled once.
    units = {kernel.text: kernel for kernel in kernels.values()}
    with ThreadPoolExecutor(compile_jobs()) as threads:
        results = threads.map(lambda kernel: compiler(kernel, gpu.architecture), units.values())
        units_compiled = dict(zip(units, results, strict=True))
    compiled = {}
    for name, kernel in kernels.items():
        unit = units_compiled[kernel.text]
        compiled[name] = this = jit.Compiled(kernel.entry, unit.cubin, unit.log)
        print(
            f"{gpu.architecture:8} {this.registers:4} registers {this.spill_bytes:5} spilled {name}"
        )
    return compiled


def _check(compiled: dict[str, jit.Compiled]) -> None:
    for name, kernel in compiled.items():
        assert kernel.cubin.startswith(b"\x7fELF"), name
        assert kernel.registers in range(1, 256), name


def _has_nvrtc_13() -> bool:
    try:
        return jit.nvrtc_version() >= (13, 0)
    except jit.GpuUnavailable:
        return False


needs_nvrtc = pytest.mark.skipif(
    not _has_nvrtc_13(),
    reason="needs NVRTC 13: pip install cuda-bindings 'nvidia-cuda-nvrtc==13.0.*'",
)


@needs_nvrtc
@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch != "sm_70"])
def test_covering_set(arch: str) -> None:
    turn = list(GPUS).index(arch)  # each architecture leaves out some others, to take less time
    works = [work for number, work in enumerate(COVERING) if ALL or (number + turn) % 10 < 3]
    _check(_compile(works, GPUS[arch], jit.compile_kernel))


@pytest.mark.parametrize("major", [11, 12])
def test_covering_set_for_volta(major: int) -> None:
    path = other_nvrtc.find(major)
    if path is None:
        pytest.skip(f"needs NVRTC {major}: pip install nvidia-cuda-nvrtc-cu{major}")
    nvrtc = other_nvrtc.Nvrtc(path)

    def compiler(kernel: Kernel, arch: str) -> jit.Compiled:
        headers, options = compile.included(kernel.text), compile._options(arch)
        return jit.Compiled(kernel.entry, *nvrtc.compile(kernel.text, headers, options))

    _check(_compile(COVERING, GPUS["sm_70"], compiler))


@needs_nvrtc
def test_every_configuration() -> None:
    # Every other one: each problem in all passes, in one kind or the other.
    _check(_compile(REST[:: 1 if ALL else 2], HOPPER, jit.compile_kernel))


@needs_nvrtc
def test_founding_workloads_do_not_spill() -> None:
    compiled = _compile(FOUNDING_WORKS, HOPPER, jit.compile_kernel)
    _check(compiled)
    assert [name for name, kernel in compiled.items() if kernel.spill_bytes] == []


# Bounds the time to compile, which grows with the code, 2 seconds for 100 kB. A bound in seconds
# would depend on how busy a machine is.
MOST_CODE = 200_000  # bytes


def _check_tensor_core_kernels(works: list[Work], most_spilled: int = 0) -> None:
    """Kernels lose most of their speed if accumulators spill, or MMAs wait for one another."""
    compiled = _compile(works, HOPPER, jit.compile_kernel)
    _check(compiled)
    faults = {
        name: fault
        for name, kernel in compiled.items()
        if (fault := _spilled(kernel, most_spilled) or _serialised(kernel.log))
    }
    assert faults == {}
    sizes = {name: len(kernel.cubin) for name, kernel in compiled.items()}
    assert {name: size for name, size in sizes.items() if size > MOST_CODE} == {}
    for work in works:
        for index, launch in enumerate(work.planned(HOPPER).launches):
            of: dict[str, Any] = dict(launch.kernel.constants)
            if launch.kernel.entry in ("convolve", "weight_grad", "implicit_gemm_nchw"):
                # A block that asks for more registers than it is launched with would wait forever.
                wanted = 128 * of["producer_registers"] + 256 * of["consumer_registers"]
                registers = compiled[_name(work, index, launch.kernel)].registers
                assert registers is not None, str(work)
                assert wanted <= launch.block * registers, str(work)


def _spilled(kernel: jit.Compiled, most: int) -> int:
    """The bytes that a thread spills, if they are more than allowed."""
    spilled = max(kernel.spill_bytes or 0, kernel.stack_bytes or 0)
    return spilled if spilled > most else 0


def _serialised(log: str) -> str | None:
    """The compiler's warning that wgmma will be serialized, if any (C7510 to C7520)."""
    found = re.search(r".*\bC75(1\d|20)\b.*", log)
    return found[0] if found else None


@needs_nvrtc
@pytest.mark.parametrize("suite", DENSE)
def test_tensor_core_forward(suite: str) -> None:
    """The founding workloads in half of the modes each; of the others some in one mode, half of
    them the most demanding."""
    all_modes = ALL or suite == "founding"
    one_in = 1 if all_modes else {"real": 4, "odd": 2}[suite]
    others = [mode for mode in MODES if mode != MOST_REGISTERS]
    turns = cycle(chain.from_iterable((MOST_REGISTERS, other) for other in others))
    works = _taken(
        Work(workload.name, workload.problem, planner.forward, *mode)
        for workload, one in zip(SUITES[suite][::one_in], turns, strict=False)
        for mode in (MODES if all_modes else [one])
    )
    if suite == "founding":
        works = works if ALL else _half_of_modes(works, 1)
    taken = {(work.scalar, work.channels_last, work.aligned, work.precision) for work in works}
    assert MOST_REGISTERS in taken
    assert len(taken) >= (len(MODES) if all_modes else 4), taken
    # square3x3's in ieee keeps 24 bytes of what its loaders need once for a stage.
    _check_tensor_core_kernels(works, most_spilled=24)


@needs_nvrtc
def test_tensor_core_input_grad() -> None:
    """The founding workloads in half of the modes each, one in six of the others in one."""
    others = [workload for name in DENSE[1:] for workload in SUITES[name]][:: 1 if ALL else 6]
    founding = [*product(FOUNDING, MODES)]
    founding = founding if ALL else _half_of_modes(founding, 0)
    kinds = [*founding, *zip(others, cycle(MODES), strict=False)]
    works = _taken(
        Work(workload.name, workload.problem, planner.input_grad, *mode) for workload, mode in kinds
    )
    assert len(works) > len(FOUNDING) * len(MODES) // 2
    # asym5x9's in ieee keeps 32 bytes of what its loaders look at once for a few pixels, and the
    # one that spreads keyword20x8's 56.
    _check_tensor_core_kernels(works, most_spilled=56)


# The layers of boxes with a halo, which also sum the gradient of a bias.
BOXES = """\
sm_90a/132 weight_grad bfloat16 nhwc/nhwc bias: 64x128x56x56 128x128x3x3 padding=1,1
sm_90a/132 weight_grad float16 nhwc/nhwc bias: 2x32x64x64x64 32x32x3x3x3 padding=1,1,1
sm_90a/132 weight_grad bfloat16 nhwc/nhwc bias: 64x3x224x224 768x3x16x16 stride=16,16
sm_90a/132 weight_grad*boxes bfloat16 nhwc/nhwc bias: 4x64x60x60 64x64x3x3 stride=1,2 padding=1,1
"""


@needs_nvrtc
@pytest.mark.parametrize("line", BOXES.splitlines())
def test_boxes_with_a_bias_do_not_wait_for_each_mma(line: str) -> None:
    multiply = corpus.case_of(line).plan.launches[0].kernel
    assert "halo_units" in dict(multiply.constants)
    compiled = compile.compile_kernel(multiply, "sm_90a")
    assert _serialised(compiled.log) is None
    assert compiled.spill_bytes == 0


# Constants that few problems have: a bias that is not aligned, and batches of 2^31 pixels.
RARE = {
    "sm_90a/132 forward*gemm bfloat16 nhwc/nhwc: 8x64x56x56 256x64x1x1": {"aligned_bias": False},
    "sm_90a/132 input_grad*gemm bfloat16 nhwc/nhwc: 8x256x56x56 512x256x1x1 stride=2,2": {
        "wide_places": True
    },
    "sm_90a/132 forward bfloat16 nhwc/nhwc: 8x96x56x56 96x1x3x3 padding=1,1 groups=96": {
        "aligned_bias": False
    },
}


@needs_nvrtc
@pytest.mark.parametrize("line", RARE)
def test_rare_constants(line: str) -> None:
    kernel = corpus.case_of(line).plan.launches[-1].kernel
    constants = dict(kernel.constants)
    assert RARE[line].items().isdisjoint(constants.items())
    rare = replace(kernel, constants=tuple({**constants, **RARE[line]}.items()))
    assert not _spilled(jit.compile_kernel(rare, HOPPER.architecture), 0)


# GPUs with tensor cores that the mma.sync kernels take, and what is compiled for them:
# all workloads for each of them, if there is time, or else few.
AMPERE = [arch for arch, gpu in GPUS.items() if gpus.number(gpu) >= 80]
AMPERE_WORKS = [
    Work(workload.name, workload.problem, plan, *mode)
    for workload in (workload for suite in DENSE for workload in SUITES[suite])
    for plan, mode in product((ampere.forward, ampere.input_grad, ampere.weight_grad), MODES)
]
FEW = 2


def _plans(work: Work, gpu: Gpu) -> bool:
    try:
        work.planned(gpu)
    except Declined:
        return False
    return True


@needs_nvrtc
@pytest.mark.parametrize("arch", AMPERE)
def test_mma_sync_kernels(arch: str) -> None:
    works = AMPERE_WORKS
    if not ALL:
        # Of each architecture others; a prime number apart, so of all kinds.
        first = AMPERE.index(arch) * FEW
        works = [works[(first + i) * 37 % len(works)] for i in range(FEW)]
    compiled = _compile([work for work in works if _plans(work, GPUS[arch])], GPUS[arch],
                        jit.compile_kernel)  # fmt: skip
    _check(compiled)
    # On sm_100, flownet7x7's in ieee keep 8 and 16 bytes.
    assert {name: kernel for name, kernel in compiled.items() if _spilled(kernel, 16)} == {}


# Layers with 32 groups, as ResNeXt has them, each in all passes.
GROUPED = [
    Work(f"{width} channels", problem, plan, "fastconv::bfloat16", True)
    for width, stride in ((4, 1), (8, 2), (16, 1), (32, 1), (4, 2), (8, 1), (16, 2), (32, 2))
    for plan in (grouped.forward, grouped.input_grad, grouped.weight_grad)
    for problem in [
        Problem.of(
            (64, 32 * width, 28 * stride, 28 * stride), (32 * width, width, 3, 3),
            (stride, stride), (1, 1, 1, 1), (1, 1), 32,
        )
    ]
]  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("arch", AMPERE)
def test_grouped_kernels(arch: str) -> None:
    works = [work for work in GROUPED if _plans(work, GPUS[arch])]
    assert {(work.name, work.plan.__name__) for work in works} == {
        (work.name, work.plan.__name__) for work in GROUPED
    }
    if not ALL:
        works = works[5 * AMPERE.index(arch) % len(works) :][:1]
    compiled = _compile(works, GPUS[arch], jit.compile_kernel)
    _check(compiled)
    assert {name: kernel for name, kernel in compiled.items() if _spilled(kernel, 0)} == {}


# ResNet-50's downsampling layers; residues that are stored alone, rows between others, and dilated.
STRIDED = {
    name: Problem.of(*arguments)
    for name, arguments in {
        "3x3": ((32, 128, 56, 56), (128, 128, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
        "3x3 deep": ((32, 512, 14, 14), (512, 512, 3, 3), (2, 2), (1, 1, 1, 1), (1, 1), 1),
        "1x1": ((32, 256, 56, 56), (512, 256, 1, 1), (2, 2), (0, 0, 0, 0), (1, 1), 1),
        "stride 3": ((8, 64, 99, 99), (64, 64, 2, 2), (3, 3), (0, 0, 0, 0), (1, 1), 1),
        "stride 2, 1": ((8, 64, 100, 150), (96, 64, 3, 5), (2, 1), (1, 1, 2, 2), (1, 1), 1),
        "dilated": ((8, 64, 96, 96), (64, 64, 3, 3), (2, 2), (3, 3, 3, 3), (3, 3), 1),
        "stride 100": ((8, 64, 500, 500), (128, 64, 1, 1), (100, 100), (0, 0, 0, 0), (1, 1), 1),
    }.items()
}


@needs_nvrtc
@pytest.mark.parametrize("name", STRIDED)
def test_tensor_core_strided_input_grad(name: str) -> None:
    works = [Work(name, STRIDED[name], planner.input_grad, *mode) for mode in MODES]
    assert _taken(works) == works
    turn = list(STRIDED).index(name) % len(MODES)
    _check_tensor_core_kernels(works if ALL else works[turn : turn + 1])


# Layers of ResNet-50 for the implicit GEMM kernels: channels-last images in 16 bits, and planes in
# TF32.
RESNET50 = {
    name: Problem.of(*arguments, (1, 1), 1)
    for name, arguments in {
        "1x1 at 56": ((64, 256, 56, 56), (64, 256, 1, 1), (1, 1), (0, 0, 0, 0)),
        "3x3 at 56": ((64, 64, 56, 56), (64, 64, 3, 3), (1, 1), (1, 1, 1, 1)),
        "1x1 at 28": ((64, 512, 28, 28), (128, 512, 1, 1), (1, 1), (0, 0, 0, 0)),
        "3x3 to 28": ((64, 128, 56, 56), (128, 128, 3, 3), (2, 2), (1, 1, 1, 1)),
        "1x1 to 28": ((64, 256, 56, 56), (512, 256, 1, 1), (2, 2), (0, 0, 0, 0)),
        "1x1 at 14": ((64, 1024, 14, 14), (256, 1024, 1, 1), (1, 1), (0, 0, 0, 0)),
        "3x3 at 14": ((64, 256, 14, 14), (256, 256, 3, 3), (1, 1), (1, 1, 1, 1)),
        "1x1 at 7": ((64, 2048, 7, 7), (512, 2048, 1, 1), (1, 1), (0, 0, 0, 0)),
        "3x3 to 7": ((64, 512, 14, 14), (512, 512, 3, 3), (2, 2), (1, 1, 1, 1)),
        "1x1 to 7": ((64, 1024, 14, 14), (2048, 1024, 1, 1), (2, 2), (0, 0, 0, 0)),
    }.items()
}
GEMM_MODES = {
    "16 bits": ("implicit_gemm_nhwc", "fastconv::bfloat16", True, True, "ieee"),
    "TF32, channels-last": ("implicit_gemm_nhwc", "float", True, True, "tf32"),
    "TF32, contiguous": ("implicit_gemm_nchw", "float", False, True, "tf32"),
}


@needs_nvrtc
@pytest.mark.parametrize("mode", GEMM_MODES)
def test_implicit_gemm(mode: str) -> None:
    """With these kernels, even where another one is faster."""
    entry, *kind = GEMM_MODES[mode]
    works = [
        Work(name, problem, forced_plans.Gemm(direction), *kind)
        for name, problem in RESNET50.items()
        for direction in ("forward", "input_grad")
    ]
    assert {work.planned(HOPPER).launches[-1].kernel.entry for work in works} == {entry}
    # Other layers in each mode, in both directions.
    turn = list(GEMM_MODES).index(mode)
    _check_tensor_core_kernels(works if ALL else works[turn::5])


# What ends a residual network's blocks, and what transformers' and mobile networks' layers have.
RESIDUAL_RELU = Epilogue("relu", residual=True)
GELU = Epilogue("gelu")
EPILOGUES = {
    "sm_75": [
        Work("grouped", PROBLEMS["grouped"], planner.forward, "float", epilogue=RESIDUAL_RELU),
        Work("depthwise", PROBLEMS["depthwise"], planner.forward, "float", epilogue=GELU),
    ],
    "sm_80": [
        Work("3x3 at 14", RESNET50["3x3 at 14"], planner.forward, *mode, epilogue=RESIDUAL_RELU)
        for _, *mode in GEMM_MODES.values()
    ],
    "sm_90a": [
        *(
            Work(
                "1x1 at 56",
                RESNET50["1x1 at 56"],
                forced_plans.Gemm("forward"),
                *mode,
                epilogue=epilogue,
            )
            for (_, *mode), epilogue in product(GEMM_MODES.values(), (RESIDUAL_RELU, GELU))
        ),
        *(
            Work("3x3 at 56", RESNET50["3x3 at 56"], planner.forward, *mode, epilogue=RESIDUAL_RELU)
            for _, *mode in GEMM_MODES.values()
        ),
    ],
}


@needs_nvrtc
@pytest.mark.parametrize("arch", EPILOGUES)
def test_epilogues(arch: str) -> None:
    """Epilogues spill next to nothing, though accumulators leave few registers."""
    compiled = _compile(EPILOGUES[arch], GPUS[arch], jit.compile_kernel)
    _check(compiled)
    # On sm_80, 3x3's as float16 keeps 8 bytes of what it needs once for a tile.
    assert {name: kernel for name, kernel in compiled.items() if _spilled(kernel, 8)} == {}


@needs_nvrtc
def test_tensor_core_weight_grad() -> None:
    """Accumulators leave few registers: what outer loops need, but none of them, may be spilled.

    Of the 5x9 layers as float16, loaders have 56 registers for 32 numbers under way, and consumers
    that sum the bias read some words between MMAs.
    """
    works = _taken(
        Work(workload.name, workload.problem, planner.weight_grad, *mode)
        for workload, mode in product(FOUNDING, MODES)
    )
    assert len(works) == len(FOUNDING) * len(MODES)
    biased = [replace(work, bias_grad=True) for work in works]
    # CI compiles each mode for one layer or two.
    works = works + biased if ALL else [*works[::4], *biased[1::4]]
    _check_tensor_core_kernels(works, most_spilled=272)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_tma_copies(arch: str) -> None:
    """The tests' own kernels for TMA copies compile."""
    launches = [case.launch for case in tensor_maps.cases(0).values()]
    launches += [case.storing_launch for case in tensor_maps.stores(0).values()]
    units = {launch.kernel.text: launch.kernel for launch in launches}
    assert len(units) == 6
    for kernel in units.values():
        assert jit.compile_kernel(kernel, arch).cubin.startswith(b"\x7fELF")


@needs_nvrtc
def test_swizzled_mmas() -> None:
    """The tests' own kernels for ``wgmma`` of swizzled matrices compile for sm_90a."""
    for case in swizzled_mmas.CASES:
        compiled = jit.compile_kernel(case.launch.kernel, "sm_90a")
        assert compiled.spill_bytes == 0


@needs_nvrtc
@pytest.mark.parametrize("arch", [arch for arch in GPUS if arch not in ("sm_70", "sm_75")])
def test_small_mmas(arch: str) -> None:
    """The tests' own kernels for ``mma.sync`` compile for all GPUs since Ampere."""
    for case in (*small_mmas.CASES, *small_mmas.ROUNDS):
        compiled = jit.compile_kernel(case.launch.kernel, arch)
        assert compiled.spill_bytes == 0


@pytest.mark.parametrize("gpu", ["sm_75", "sm_100a"])
def test_kernels_for_volumes(gpu: str) -> None:
    shapes = (2, 4, 7, 9, 11), (6, 2, 3, 2, 3)
    problem = Problem.of(*shapes, (2, 3, 2), (1, 2, 0, 1, 1, 1), (1, 2, 1), 2)
    depthwise = Problem.of((2, 6, 7, 9, 11), (6, 1, 3, 3, 3), (2, 1, 1), (1,) * 6, (1,) * 3, 6)
    weight = torch.empty(shapes[1], device="meta", memory_format=torch.channels_last_3d)
    operands = Operands("fastconv::bfloat16", 2, True, False, weight.stride(), True)
    alike = replace(operands, output_channels_last=True)
    for plan, (one, kind) in product(PASSES, ((problem, operands), (depthwise, alike))):
        for launch in plan(one, kind, gpus.named(gpu)).launches:
            assert compile.build(launch.kernel, gpu)

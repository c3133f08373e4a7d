"""Compiles and launches the kernels, and makes them a differentiable ``nn.Module``."""

import functools
import hashlib
import inspect
import math
import os
import re
import shutil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import cpp_extension

from fastconv.exporter.parts.contents import BINDINGS, LAUNCHER, SOURCES, TARGETS, TUNED
from fastconv.exporter.parts.portable import (
    Argument,
    Constant,
    Constants,
    Geometry,
    Im2colMap,
    Launch,
    Operands,
    Plan,
    TensorMap,
    portable_plan,
)

# The name in device code and the bytes of each type.
SCALARS = {
    torch.float32: ("float", 4),
    torch.float16: ("fastconv::float16", 2),
    torch.bfloat16: ("fastconv::bfloat16", 2),
}

# The CUDA driver's numbers for the parts of tensor maps. For swizzles and L2 promotions, in bytes,
# these are the positions in the lists.
MAPPED_TYPES = {
    "fastconv::float16": 6,
    "float": 7,
    "double": 8,
    "fastconv::bfloat16": 9,
    "tf32": 11,
}
SWIZZLES = (0, 32, 64, 128)
PROMOTIONS = (0, 64, 128, 256)

# The preprocessor condition under which each family's kernels are compiled. Some versions of
# PyTorch also compile for architectures that lack the kernels' instructions.
CONDITIONS = {
    "hopper": "defined(__CUDA_ARCH_FEAT_SM90_ALL)",
    "ampere": "__CUDA_ARCH__ >= 800",
    "depthwise": "__CUDA_ARCH__ >= 800",
}

Kernel = tuple[str, Constants, str]  # source, constants, entry


# --- Compiling -----------------------------------------------------------------------------------


def with_headers(source: str, seen: set[str]) -> str:
    """A device source with the headers that it includes in their places, each once."""
    lines = []
    for line in SOURCES[source].splitlines():
        include = re.match(r'#include "(.*)"', line)
        if include is None:
            lines.append(line)
        elif include[1] not in seen:
            seen.add(include[1])
            lines.append(with_headers(include[1], seen))
    return "\n".join(lines)


def member(name: str, value: Constant) -> str:
    """A constant as a member of the struct ``Config``, from which device code reads it."""
    if isinstance(value, bool):
        return f"  static constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"  static constexpr int {name} = {value};"
    return f"  using {name} = {value};"


def device_code(kernels: tuple[Kernel, ...]) -> str:
    """The device code of the kernels: each source and set of constants in its own namespace."""
    code = []
    for number, (source, constants) in enumerate(configurations(kernels)):
        seen = {"device/scalar.cuh"}
        types = with_headers("device/scalar.cuh", seen)
        members = "\n".join(member(name, value) for name, value in constants)
        text = with_headers(source, seen)
        condition = CONDITIONS.get(source.split("/")[0])
        if condition is not None:
            text = f"#if !defined(__CUDA_ARCH__) || {condition}\n{text}\n#endif"
        space = (
            f"namespace kernels_{number} {{\n{types}\n"
            f"struct Config {{\n{members}\n}};\n{text}\n}}  // namespace kernels_{number}\n"
        )
        for name in ("slabs", "most_registers", "beside"):  # not only constants
            if name in dict(constants):
                macro = f"FASTCONV_{name.upper()}"
                space = f"#define {macro}\n{space}#undef {macro}\n"
        code.append(space)
    return "\n".join(code)


def host_code(kernels: tuple[Kernel, ...]) -> str:
    """The function that launches the kernel of a given number."""
    spaces = configurations(kernels)
    cases = [
        f'    case {number}: return start("{entry}", '
        f"kernels_{spaces.index((source, constants))}::{entry}, sizes, arguments, stream);"
        for number, (source, constants, entry) in enumerate(kernels)
    ]
    return "\n".join((
        "#ifndef __CUDA_ARCH__  // device code may lack kernels of other architectures",
        LAUNCHER,
        "void launch(int kernel, const Numbers& sizes, const Arguments& arguments, int64_t stream)",
        "{",
        "  switch (kernel) {",
        *cases,
        "  }",
        '  throw std::invalid_argument("no kernel " + std::to_string(kernel));',
        "}",
        "#endif",
    ))  # fmt: skip


def configurations(kernels: tuple[Kernel, ...]) -> list[tuple[str, Constants]]:
    """The distinct pairs of a source and constants; several kernels may share a pair."""
    return list(dict.fromkeys((source, constants) for source, constants, _ in kernels))


@functools.cache
def build(kernels: tuple[Kernel, ...], architecture: str) -> Any:
    """The module that launches the kernels, compiled unless PyTorch has cached it."""
    check_compiler()
    code = device_code(kernels) + "\n" + host_code(kernels)
    number = architecture[len("sm_") :]
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    options = {}
    if "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters:
        options["no_implicit_headers"] = True  # PyTorch's headers take ten times as long to compile
    digest = hashlib.sha256(repr((code, BINDINGS, flags, torch.__version__)).encode()).hexdigest()
    return cpp_extension.load_inline(
        name=f"convolution_{digest[:16]}",
        cpp_sources=[BINDINGS],
        cuda_sources=[code],
        extra_cuda_cflags=flags,
        with_cuda=True,
        **options,
    )


def check_compiler() -> None:
    """Raises an error if nvcc is missing."""
    home = cpp_extension.CUDA_HOME
    if home is None or shutil.which("nvcc", path=os.path.join(home, "bin")) is None:
        raise RuntimeError(
            "nvcc is needed to compile this convolution's kernels, but none was found"
            + ("" if home is None else f" in {home}/bin")
            + f": install the CUDA toolkit, version {torch.version.cuda}, and set the environment "
            "variable CUDA_HOME to its folder"
        )


# --- Planning and launching ----------------------------------------------------------------------


class BuiltPlans(NamedTuple):
    """The plans of some passes, and the module that launches their kernels by number."""

    plans: dict[str, Plan]
    module: Any
    kernels: tuple[Kernel, ...]


@functools.lru_cache(maxsize=4096)
def plan_and_build(
    passes: tuple[str, ...], geometry: Geometry, operands: Operands, precision: str, device: int
) -> BuiltPlans:
    """Plans some passes, and compiles their kernels together, once."""
    architecture = gpu_architecture(device)
    made_for = target(architecture, shared_bytes(device))
    plans = {
        which: plan_of(which, geometry, operands, precision, made_for, sm_count(device))
        for which in passes
    }
    launches = (launch for plan in plans.values() for launch in plan.launches)
    kernels = tuple(dict.fromkeys(kernel_of(launch) for launch in launches))
    return BuiltPlans(plans, build(kernels, architecture), kernels)


def plan_of(
    which: str,
    geometry: Geometry,
    operands: Operands,
    precision: str,
    made_for: str,
    sms: int,
) -> Plan:
    """The tuned plan if there is one for these operands, else the portable kernels'."""
    tuned = TUNED.get((made_for, which, geometry, operands.scalar, precision))
    if tuned is None or not operands.aligned or operands.channels_last:
        return portable_plan(which, geometry, operands, sms)
    # Grids whose size is free are scaled from the SMs of the plan's GPU to those of this one.
    return tuned(lambda blocks: max(blocks * sms // TARGETS[made_for].sms, 1))


def target(architecture: str, shared_bytes: int) -> str:
    """The GPU of TARGETS whose plans run on this one; "" if there is none."""
    if architecture == "sm_90a":
        return architecture
    if int(architecture[len("sm_") :]) < 80:
        return ""
    fitting = (gpu for gpu in ("sm_80", "sm_86") if TARGETS[gpu].shared_bytes <= shared_bytes)
    return next(fitting, "")


def kernel_of(launch: Launch) -> Kernel:
    return launch.source, launch.constants, launch.entry


def gpu_architecture(device: int) -> str:
    """The architecture to compile for, for example "sm_80" or "sm_90a"."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, but "
            "this convolution's kernels need 7.0 or newer"
        )
    # Hopper's wgmma needs sm_90a, which nvcc supports since CUDA 12.
    tensor_cores = (major, minor) == (9, 0) and int(str(torch.version.cuda).split(".")[0]) >= 12
    return f"sm_{major}{minor}{'a' if tensor_cores else ''}"


def sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_bytes(device: int) -> int:
    """The most shared memory that a block may use."""
    properties = torch.cuda.get_device_properties(device)
    alike = "sm_80" if (properties.major, properties.minor) in ((8, 0), (8, 7), (9, 0)) else "sm_86"
    # PyTorch has this property since 2.7. Older versions support no other GPU with as much
    # shared memory as sm_80.
    return getattr(properties, "shared_memory_per_block_optin", TARGETS[alike].shared_bytes)


def run(built: BuiltPlans, which: str, tensors: dict[str, Tensor]) -> None:
    """Launches an operation on the current stream of the tensors' device, and does not wait."""
    plan, device = built.plans[which], tensors["output"].device
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    addresses["scratch"] = scratch.data_ptr()
    addresses.update((name, scratch.data_ptr() + at) for name, at in plan.regions.items())
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        for launch in plan.launches:
            built.module.launch(
                built.kernels.index(kernel_of(launch)),
                [launch.grid, launch.block, launch.shared_bytes, int(launch.early)],
                [as_numbers(argument, addresses) for argument in launch.arguments],
                stream,
            )


def as_numbers(argument: Argument, addresses: dict[str, int]) -> list[int]:
    """An argument as the launcher takes it; an absent tensor has address 0."""
    if isinstance(argument, int):
        return [argument]
    if isinstance(argument, str):
        return [addresses.get(argument, 0)]
    return [addresses.get(argument.tensor, 0), *map_numbers(argument)]


def map_numbers(of: TensorMap | Im2colMap) -> list[int]:
    """A tensor map's fields, in the order in which the launcher reads them."""
    tiled = isinstance(of, TensorMap)
    box = of.box if isinstance(of, TensorMap) else (*of.lower, *of.upper, of.channels, of.pixels)
    modes = (SWIZZLES.index(of.swizzle), PROMOTIONS.index(of.promotion))
    layout = (*of.sizes, *of.strides, *of.element_strides)
    return [int(tiled), MAPPED_TYPES[of.scalar], *modes, len(of.sizes), *layout, *box]


# What the file was exported with, "tf32" or "ieee"; None: PyTorch's setting decides.
PRECISION: str | None = None


def float32_precision() -> str:
    """The arithmetic of float32, "tf32" or "ieee": the file's, or PyTorch's setting."""
    if PRECISION is not None:
        return PRECISION
    conv = getattr(torch.backends.cudnn, "conv", None)  # since PyTorch 2.9
    if conv is not None:
        return "tf32" if conv.fp32_precision == "tf32" else "ieee"
    return "tf32" if torch.backends.cudnn.allow_tf32 else "ieee"


# --- The convolution -----------------------------------------------------------------------------


class Convolution(torch.autograd.Function):
    """The convolution and its gradients, for autograd."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Tensor:
        ctx.format = joint_format(input, weight)
        ctx.geometry = geometry
        input, weight = input.contiguous(memory_format=ctx.format), weight.contiguous()
        ctx.save_for_backward(input, weight)
        output = torch.empty(
            geometry.output, dtype=input.dtype, device=input.device, memory_format=ctx.format
        )
        tensors = {"input": input, "weight": weight, "output": output}
        if bias is not None:
            tensors["bias"] = bias.contiguous()
        compute(ctx, {"forward": tensors})
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        grad_output = grad_output.contiguous(memory_format=ctx.format)
        passes, outputs = {}, {}
        if ctx.needs_input_grad[0]:
            outputs["input_grad"] = torch.empty_like(input, memory_format=ctx.format)
            passes["input_grad"] = {"input": grad_output, "weight": weight}
        if ctx.needs_input_grad[1]:
            outputs["weight_grad"] = torch.empty_like(weight)
            passes["weight_grad"] = {"grad_output": grad_output, "input": input}
        if ctx.needs_input_grad[2]:
            outputs["bias_grad"] = weight.new_empty(weight.shape[0])
            passes["bias_grad"] = {"grad_output": grad_output}
        for which, output in outputs.items():
            passes[which]["output"] = output
        compute(ctx, passes)
        wanted = ("input_grad", "weight_grad", "bias_grad")
        return (*(outputs.get(which) for which in wanted), None)


def joint_format(*tensors: Tensor) -> torch.memory_format:
    """Channels-last if one of the tensors is, which are of images or of volumes."""
    last = channels_last(tensors[0].dim())
    return last if any(map(is_channels_last, tensors)) else torch.contiguous_format


def is_channels_last(tensor: Tensor) -> bool:
    last = channels_last(tensor.dim())
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=last)


def channels_last(rank: int) -> torch.memory_format:
    """PyTorch's name of the format for tensors of this rank."""
    return torch.channels_last if rank == 4 else torch.channels_last_3d


def compute(ctx: Any, passes: dict[str, dict[str, Tensor]]) -> None:
    """Computes some passes, each on its tensors by name; their kernels are compiled together."""
    if ctx.geometry.input[0] == 0:
        for tensors in passes.values():  # an empty batch: all sums are empty
            tensors["output"].zero_()
        return
    everything = [tensor for tensors in passes.values() for tensor in tensors.values()]
    if not everything:
        return
    dtype, device = everything[0].dtype, everything[0].device
    operands = Operands(
        *SCALARS[dtype],
        channels_last=ctx.format != torch.contiguous_format,
        aligned=all(tensor.data_ptr() % 16 == 0 for tensor in everything),
    )
    precision = float32_precision() if dtype == torch.float32 else "ieee"
    built = plan_and_build(tuple(passes), ctx.geometry, operands, precision, device.index)
    for which, tensors in passes.items():
        run(built, which, tensors)


class Conv2d(nn.Module):
    """A 2-D convolution with the arguments, parameters and initial values of ``nn.Conv2d``."""

    axes = 2

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        least = min(in_channels, out_channels, groups)
        if least < 1 or in_channels % groups != 0 or out_channels % groups != 0:
            raise ValueError(
                "channels and groups should be at least 1, and groups divide channels, but got "
                f"in_channels={in_channels}, out_channels={out_channels}, groups={groups}"
            )
        if padding_mode != "zeros":
            raise ValueError(f"padding_mode should be 'zeros', but got {padding_mode!r}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = self.each("kernel_size", kernel_size, least=1)
        self.stride = self.each("stride", stride, least=1)
        self.padding = self.each("padding", padding, least=0)
        self.dilation = self.each("dilation", dilation, least=1)
        shape = (out_channels, in_channels // groups, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def each(self, name: str, value: int | tuple[int, ...], least: int) -> tuple[int, ...]:
        """One int for each axis, from a single int or as many."""
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * self.axes
        if len(values) != self.axes or not all(isinstance(v, int) and v >= least for v in values):
            raise ValueError(
                f"{name} should be an int, or {('two', 'three')[self.axes - 2]}, of at least "
                f"{least}, but got {value!r}"
            )
        return values

    def reset_parameters(self) -> None:
        """Draws the parameters as PyTorch does: the same values from the same seed."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(math.prod(self.weight.shape[1:]))
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        geometry = Geometry(
            tuple(x.shape),
            tuple(self.weight.shape),
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )
        if min(geometry.output[2:]) < 1:
            raise ValueError(
                f"the kernel is larger than the padded input: input of shape {geometry.input}, "
                f"kernel_size={self.kernel_size}, padding={self.padding}, "
                f"dilation={self.dilation}"
            )
        return Convolution.apply(x, self.weight, self.bias, geometry)

    def check(self, x: Tensor) -> None:
        """Raises an error if the input cannot be convolved."""
        if x.dim() != 2 + self.axes or x.shape[1] != self.in_channels or 0 in x.shape[2:]:
            sizes = ", ".join(("depth", "height", "width")[-self.axes :])
            raise ValueError(
                f"expected input of shape (batch, {self.in_channels}, {sizes}), but got "
                f"{tuple(x.shape)}"
            )
        if x.dtype not in SCALARS:
            names = ", ".join(str(dtype) for dtype in SCALARS)
            raise TypeError(f"expected input of dtype {names}, but got {x.dtype}")
        if x.dtype != self.weight.dtype:
            raise TypeError(
                f"input and weight should have the same dtype, but got {x.dtype} and "
                f"{self.weight.dtype}"
            )
        check_device(x, self.weight)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"groups={self.groups}, bias={self.bias is not None}"
        )


def missing_gpu() -> str | None:
    """Why there is no GPU to compute on; None if there is one."""
    if torch.version.cuda is None:
        return (
            "this convolution's kernels need an NVIDIA GPU and PyTorch for CUDA, but PyTorch "
            f"{torch.__version__} is built without it"
        )
    if not torch.cuda.is_available():
        return "this convolution's kernels need an NVIDIA GPU, but PyTorch finds none here"
    return None


def check_device(x: Tensor, weight: Tensor) -> None:
    """Raises an error unless both tensors are on the same GPU."""
    missing = missing_gpu()
    if missing is not None:
        raise RuntimeError(missing)
    if not x.is_cuda or x.device != weight.device:
        raise ValueError(
            "input and weight should be on the same CUDA device, but are on "
            f"{x.device} and {weight.device}: move them there with .cuda()"
        )

"""Bad arguments raise the errors that PyTorch raises, with messages that name their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastconv
from fastconv import ops
from fastconv.backends import cuda
from fastconv.kernels import planner
from fastconv.problem import NO_EPILOGUE, Problem

pytestmark = pytest.mark.usefixtures("host_path")

randn = torch.randn
INPUT, WEIGHT = randn(2, 4, 8, 8), randn(6, 4, 3, 3)
ERRORS = (RuntimeError, TypeError, ValueError)


def _both(dtype: torch.dtype) -> dict[str, Any]:
    return {"input": INPUT.to(dtype), "weight": WEIGHT.to(dtype)}


# An argument that replaces a valid one, and a part of the message.
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "input of 2 dimensions": ({"input": randn(4, 4)}, "[4, 4]"),
    "input of 5 dimensions": ({"input": randn(1, 4, 4, 4, 4)}, "[1, 4, 4, 4, 4]"),
    "weight of 3 dimensions": ({"weight": randn(6, 4, 3)}, "[6, 4, 3]"),
    "weight of 5 dimensions": ({"weight": randn(6, 4, 3, 3, 3)}, "[6, 4, 3, 3, 3]"),
    "weight of 3, same": ({"weight": randn(6, 4, 3), "padding": "same"}, "[6, 4, 3]"),
    "channels": ({"input": randn(2, 3, 8, 8)}, "have 4 channels, but got 3 channels"),
    "channels, unbatched": ({"input": randn(3, 8, 8)}, "have 4 channels, but got 3 channels"),
    "channels of groups": ({"groups": 3}, "groups=3, weight of size [6, 4, 3, 3]"),
    "groups do not divide": ({"weight": randn(5, 2, 3, 3), "groups": 2}, "[5, 2, 3, 3]"),
    "more groups than outputs": ({"weight": randn(2, 1, 3, 3), "groups": 4}, "at least 4"),
    "no groups": ({"groups": 0}, "groups=0"),
    "negative groups": ({"groups": -2}, "groups=-2"),
    "no output channels": ({"weight": randn(0, 4, 3, 3)}, "[0, 4, 3, 3]"),
    "empty kernel": ({"weight": randn(6, 4, 0, 3)}, "[6, 4, 0, 3]"),
    "weight dtype": (
        {"weight": WEIGHT.double()},
        "(torch.float32) and weight type (torch.float64)",
    ),
    "complex weight": ({"weight": WEIGHT.cfloat()}, "weight type (torch.complex64)"),
    "bias dtype": ({"bias": randn(6).half()}, "(torch.float32) and bias type (torch.float16)"),
    "bias length": ({"bias": randn(5)}, "6 elements, but got bias of size [5]"),
    "bias rank": ({"bias": randn(6, 1)}, "6 elements, but got bias of size [6, 1]"),
    "scalar bias": ({"bias": randn(())}, "6 elements, but got bias of size []"),
    "negative padding": ({"padding": -1}, "padding=[-1, -1, -1, -1]"),
    "negative padding of one axis": ({"padding": (0, -2)}, "padding=[0, 0, -2, -2]"),
    "no stride": ({"stride": 0}, "stride=[0, 0]"),
    "negative stride": ({"stride": (1, -1)}, "stride=[1, -1]"),
    "no dilation": ({"dilation": 0}, "dilation=[0, 0]"),
    "negative dilation": ({"dilation": (-1, 1)}, "dilation=[-1, 1]"),
    "kernel too high": ({"input": randn(1, 4, 2, 9)}, "(2 x 9). Kernel size: (3 x 3)"),
    "kernel too wide": ({"dilation": (1, 6), "padding": 1}, "(10 x 10). Kernel size: (3 x 13)"),
    "padding unknown": ({"padding": "full"}, "'full'"),
    "same, strided": ({"padding": "same", "stride": (1, 2)}, "stride=(1, 2)"),
    "input not a tensor": ({"input": [1.0]}, "input must be a Tensor, not list"),
    "no weight": ({"weight": None}, "weight must be a Tensor, not NoneType"),
    "bias not a tensor": ({"bias": 1.0}, "bias must be a Tensor, not float"),
    "bool": (_both(torch.bool), "torch.bool"),
    "float8": (_both(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    "uint16": (_both(torch.uint16), "torch.uint16"),
    "padding of one side not an int": ({"padding": ((1, 1.5), (0, 0))}, "padding=1.5"),
    "padding half four-sided": ({"padding": ((1, 2), 1)}, "padding=(1, 2)"),
}
for name in ("stride", "padding", "dilation"):
    for values in ((), (1, 2, 3), [1, 2, 3, 4]):
        REJECTED[f"{name}={values}"] = ({name: values}, f"{name}={list(values)}")
    for value in ((1, 2.0), (None, 1), (True, 1), ("1", 1)):
        offending = next(item for item in value if type(item) is not int)
        REJECTED[f"{name}={value}"] = ({name: value}, f"{name}={offending!r}")
for name in ("stride", "padding", "dilation", "groups"):
    for value in (1.5, True, None):
        REJECTED[f"{name}={value}"] = ({name: value}, f"{name}={value!r}")
for name in ("stride", "padding", "dilation", "groups"):
    for value in (2**63, -(2**63) - 1, 10**30):
        REJECTED[f"{name}={value}"] = ({name: value}, f"{name}={value}")
REJECTED["padding=2**62"] = ({"padding": 2**62}, f"padding={[2**62] * 4}")
REJECTED["padding=(2**62, 1)"] = ({"padding": (2**62, 1)}, f"makes one of {2**63 + 8}")
for name in ("stride", "dilation", "groups"):
    REJECTED[f"{name} is a string"] = ({name: "1"}, f"{name}='1'")


@pytest.mark.parametrize(("changed", "message"), REJECTED.values(), ids=REJECTED)
def test_same_exception_as_pytorch(changed: dict[str, Any], message: str) -> None:
    arguments = {"input": INPUT, "weight": WEIGHT, **changed}
    with pytest.raises(ERRORS) as theirs:
        F.conv2d(**arguments)
    with pytest.raises(theirs.type, match=re.escape(message)) as ours:
        fastconv.conv2d(**arguments)
    assert ours.type is theirs.type


@pytest.mark.parametrize("where", [{"input"}, {"weight"}, {"bias"}, {"input", "weight"}], ids=str)
def test_sparse_tensors(where: set[str]) -> None:
    arguments = {"input": INPUT, "weight": WEIGHT, "bias": randn(6)}
    arguments |= {name: arguments[name].to_sparse() for name in where}
    with pytest.raises(RuntimeError):  # PyTorch raises as well, in its own words.
        F.conv2d(**arguments)
    with pytest.raises(RuntimeError, match=r"(?i)sparse"):
        fastconv.conv2d(**arguments)


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.vmap], ids=["", "vmap"])
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_one_of_two_beyond_64_bits(name: str, transform: Callable[..., Any]) -> None:
    function = transform(lambda input: fastconv.conv2d(input, WEIGHT, **{name: (1, 2**63)}))
    with pytest.raises(ValueError, match=f"{name} should fit in 64 bits, but got {name}={2**63}"):
        function(INPUT)


MISSHAPEN: dict[str, tuple[dict[str, Any], str]] = {
    "channels": ({"input": randn(2, 3, 8, 8)}, "[6, 4, 3, 3], expected input[2, 3, 8, 8] to have"),
    "groups": ({"weight": randn(5, 2, 3, 3), "groups": 2}, "got weight of size [5, 2, 3, 3]"),
    "bias": ({"bias": randn(5)}, "6 elements, but got bias of size [5]"),
    "kernel": ({"input": randn(1, 4, 2, 9)}, "(2 x 9). Kernel size: (3 x 3)"),
}


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("mapped", [["input"], ["weight"], ["bias"], ["input", "weight"]], ids=str)
@pytest.mark.parametrize(("changed", "message"), MISSHAPEN.values(), ids=MISSHAPEN)
def test_mapped_tensors_are_named_by_the_shapes_seen_inside(
    changed: dict[str, Any], message: str, mapped: list[str], size: int
) -> None:
    arguments = {"input": INPUT, "weight": WEIGHT, "bias": randn(6), "groups": 1, **changed}
    groups = arguments.pop("groups")
    for name in mapped:
        arguments[name] = arguments[name].expand(size, *arguments[name].shape)
    in_dims = tuple(0 if name in mapped else None for name in arguments)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        torch.func.vmap(lambda *tensors: fastconv.conv2d(*tensors, groups=groups), in_dims)(
            *arguments.values()
        )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("options", [{}, {"padding": "same"}], ids=str)
@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_nested_tensors(name: str, options: dict[str, Any], layout: torch.layout) -> None:
    parts = [randn(4, 8, 8), randn(3, 8, 8)] if name != "bias" else [randn(3), randn(3)]
    arguments = {"input": INPUT, "weight": WEIGHT, "bias": randn(6)}
    arguments[name] = torch.nested.nested_tensor(parts, layout=layout)
    with pytest.raises(ERRORS):
        F.conv2d(**arguments, **options)
    with pytest.raises(NotImplementedError, match=f"dense tensors, but {name} is a nested one"):
        fastconv.conv2d(**arguments, **options)


def test_unbatched_nested_tensors() -> None:
    with pytest.raises(NotImplementedError, match="input is a nested one"):
        fastconv.conv2d(torch.nested.nested_tensor([randn(8, 8), randn(8, 7)]), WEIGHT)


TOO_LARGE_FOR_GPUS: dict[str, tuple[tuple[Any, ...], str]] = {
    "batch": (((2**31, 1, 1, 1), (1, 1, 1, 1)), f"input of size [{2**31}, 1, 1, 1]"),
    "width": (((1, 1, 1, 2**32), (1, 1, 1, 1)), f"input of size [1, 1, 1, {2**32}]"),
    "output": (((1, 1, 1, 1), (2**31, 1, 1, 1)), f"weight of size [{2**31}, 1, 1, 1]"),
    "stride": (((1, 1, 4, 4), (1, 1, 1, 1), (1, 2**40)), f"stride [1, {2**40}]"),
    "padding": (
        ((1, 1, 4, 4), (1, 1, 1, 1), (2**30, 1), (2**31, 0, 0, 0)),
        f"padding (top, bottom, left, right) [{2**31}, 0, 0, 0]",
    ),
}


@pytest.mark.parametrize("plan", [planner.forward, planner.input_grad, planner.weight_grad])
@pytest.mark.parametrize(
    ("geometry", "message"), TOO_LARGE_FOR_GPUS.values(), ids=TOO_LARGE_FOR_GPUS
)
def test_too_large_for_gpu_kernels(
    geometry: tuple[Any, ...], message: str, plan: planner.Pass
) -> None:
    defaults = ((1, 1), (0, 0, 0, 0), (1, 1), 1)
    problem = Problem.of(*geometry, *defaults[len(geometry) - 2 :])
    layout = (False, False, (1, 1, 1, 1), True, "ieee", False, NO_EPILOGUE, True)
    need = cuda.Need(plan, problem, torch.float32, *layout, 0, planner.EVERY)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=re.escape(f"below 2**31, but got {message}")):
        cuda.ready(need)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantised_tensors() -> None:
    tensors = [
        torch.quantize_per_tensor(tensor, 0.1, 0, dtype)
        for tensor, dtype in ((INPUT, torch.quint8), (WEIGHT, torch.qint8))
    ]
    for function in (F.conv2d, fastconv.conv2d):
        with pytest.raises(NotImplementedError, match=r"(?i)quantized|quint8"):
            function(*tensors)


@pytest.mark.parametrize("name", ["input", "weight", "bias"])
def test_devices_differ(name: str) -> None:
    # PyTorch accepts meta tensors, and reads memory that does not exist.
    arguments = {"input": INPUT, "weight": WEIGHT, "bias": randn(6)}
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(RuntimeError, match=r"same device, but .*\b(cpu|meta) and .*\b(cpu|meta)"):
        fastconv.conv2d(**arguments)


@pytest.mark.parametrize(
    ("padding", "message"),
    [
        (((1, -1), (0, 0)), "padding=[1, -1, 0, 0]"),
        (((0, 0), (0, 0), (0, 0)), "padding=[(0, 0), (0, 0), (0, 0)]"),
    ],
    ids=str,
)
def test_four_sided_padding(padding: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fastconv.conv2d(INPUT, WEIGHT, padding=padding)


@pytest.mark.parametrize(
    "changed",
    [
        {"dtype": torch.int64},
        {"groups": 3},
        {"groups": 0},
        {"out_channels": 5, "groups": 2},
        {"in_channels": -1},
        {"kernel_size": 2.5},
        {"padding": "full"},
        {"padding": "same", "stride": 2},
        {"padding_mode": "mirror"},
    ],
    ids=str,
)
def test_modules_cannot_be_made(changed: dict[str, Any]) -> None:
    arguments = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, **changed}
    with pytest.raises(ERRORS) as theirs:
        torch.nn.Conv2d(**arguments)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))) as ours:
        fastconv.Conv2d(**arguments)
    assert ours.type is theirs.type


GRAD_OUTPUT = randn(2, 6, 6, 6)
GEOMETRY = ((1, 1), (0, 0, 0, 0), (1, 1), 1, None)
STRIDED = ((2, 2), (0, 0, 0, 0), (1, 1), 1, None)
GROUPED = ((1, 1), (0, 0, 0, 0), (1, 1), 3, None)
NO_GROUPS = ((1, 1), (0, 0, 0, 0), (1, 1), 0, None)

# Direct calls of operators, with arguments that conv2d never passes.
MISUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "forward, unbatched": (ops.forward, (INPUT[0], WEIGHT, None, *GEOMETRY), "[4, 8, 8]"),
    "forward, two sides of padding": (
        ops.forward,
        (INPUT, WEIGHT, None, (1, 1), (0, 0), (1, 1), 1, None),
        "padding=[0, 0]",
    ),
    "forward, three strides": (
        ops.forward,
        (INPUT, WEIGHT, None, (1, 1, 1), (0, 0, 0, 0), (1, 1), 1, None),
        "stride=[1, 1, 1]",
    ),
    "input_grad, size": (
        ops.input_grad,
        (GRAD_OUTPUT, WEIGHT, (8, 9), *GEOMETRY),
        "[2, 6, 6, 7], but got grad_output of size [2, 6, 6, 6]",
    ),
    "input_grad, strided size": (
        ops.input_grad,
        (GRAD_OUTPUT, WEIGHT, (8, 8), *STRIDED),
        "[2, 6, 3, 3], but got grad_output of size [2, 6, 6, 6]",
    ),
    "input_grad, channels": (
        ops.input_grad,
        (GRAD_OUTPUT[:, :5], WEIGHT, (8, 8), *GEOMETRY),
        "[2, 6, 6, 6], but got grad_output of size [2, 5, 6, 6]",
    ),
    "input_grad, input too small": (
        ops.input_grad,
        (GRAD_OUTPUT, WEIGHT, (2, 2), *GEOMETRY),
        "(2 x 2). Kernel size: (3 x 3)",
    ),
    "input_grad, unbatched": (
        ops.input_grad,
        (GRAD_OUTPUT[0], WEIGHT, (8, 8), *GEOMETRY),
        "grad_output of size: [6, 6, 6]",
    ),
    "input_grad, weight": (
        ops.input_grad,
        (GRAD_OUTPUT, WEIGHT[0], (8, 8), *GEOMETRY),
        "weight of size: [4, 3, 3]",
    ),
    "input_grad, dtype": (
        ops.input_grad,
        (GRAD_OUTPUT.double(), WEIGHT, (8, 8), *GEOMETRY),
        "grad_output type (torch.float64) and weight type (torch.float32)",
    ),
    "input_grad, device": (
        ops.input_grad,
        (GRAD_OUTPUT, WEIGHT.to("meta"), (8, 8), *GEOMETRY),
        "grad_output is on cpu and weight is on meta",
    ),
    "weight_grad, size": (
        ops.weight_grad,
        (GRAD_OUTPUT, INPUT, (3, 2), *GEOMETRY, True),
        "[2, 6, 6, 7], but got grad_output of size [2, 6, 6, 6]",
    ),
    "weight_grad, batch": (
        ops.weight_grad,
        (GRAD_OUTPUT[:1], INPUT, (3, 3), *GEOMETRY, True),
        "[2, 6, 6, 6], but got grad_output of size [1, 6, 6, 6]",
    ),
    "weight_grad, groups": (
        ops.weight_grad,
        (GRAD_OUTPUT, INPUT, (3, 3), *GROUPED, False),
        "divisible by 3 at dimension 1, but got input of size [2, 4, 8, 8]",
    ),
    "weight_grad, no groups": (
        ops.weight_grad,
        (GRAD_OUTPUT, INPUT, (3, 3), *NO_GROUPS, False),
        "groups=0",
    ),
    "weight_grad, no kernel": (
        ops.weight_grad,
        (GRAD_OUTPUT, INPUT, (0, 3), *GEOMETRY, False),
        "[6, 4, 0, 3]",
    ),
    "weight_grad, unbatched": (
        ops.weight_grad,
        (GRAD_OUTPUT, INPUT[0], (3, 3), *GEOMETRY, False),
        "input of size: [4, 8, 8]",
    ),
    "weight_grad, dtype": (
        ops.weight_grad,
        (GRAD_OUTPUT, INPUT.half(), (3, 3), *GEOMETRY, False),
        "grad_output type (torch.float32) and input type (torch.float16)",
    ),
    "input_grad, sparse": (
        ops.input_grad,
        (GRAD_OUTPUT, WEIGHT.to_sparse(), (8, 8), *GEOMETRY),
        "weight has torch.sparse_coo",
    ),
    "input_grad, memory format": (
        ops.input_grad,
        (GRAD_OUTPUT, WEIGHT, (8, 8), *GEOMETRY, torch.channels_last_3d),
        "memory_format=torch.channels_last_3d",
    ),
    "weight_grad, sparse": (
        ops.weight_grad,
        (GRAD_OUTPUT, INPUT.to_sparse(), (3, 3), *GEOMETRY, False),
        "input has torch.sparse_coo",
    ),
}


@pytest.mark.parametrize(("operator", "arguments", "message"), MISUSED.values(), ids=MISUSED)
def test_operators_misused(
    operator: Callable[..., Any], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        operator(*arguments)

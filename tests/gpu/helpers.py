"""Compilation ahead of time, tensors between NaNs, and random geometries for the GPU tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import fastconv
from emulator import pass_cases
from fastconv import jit, native
from fastconv.backends import cuda as backend
from fastconv.jit import launch
from fastconv.kernels.family import Kernel, Launch
from fastconv.problem import Problem
from strategies import Convolution

CUDA = torch.device("cuda")
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}


def is_hopper() -> bool:
    """Whether the GPU has the tensor cores that ``kernels/hopper`` is for."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def free_memory(needed_bytes: int) -> Iterator[None]:
    """The body of a fixture: skips the test unless the GPU has this much free memory."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes >> 30} GiB of GPU memory")
    yield
    torch.cuda.empty_cache()


# --- Compiling many kernels at once ---------------------------------------------------------------


@contextmanager
def _noting_kernels() -> Iterator[dict[str, Kernel]]:
    """Yields the kernels, by their text, that convolutions would run; they compute nothing."""
    kernels: dict[str, Kernel] = {}

    def load_launches(launches: Sequence[Launch], *_: Any) -> Any:
        kernels.update((launch.kernel.text, launch.kernel) for launch in launches)
        return SimpleNamespace(run=lambda *addresses: None)

    backend._ready.cache_clear()
    by_python = mock.patch.multiple(native, conv2d=None, start_build=lambda: None)
    with mock.patch.object(launch, "load_launches", load_launches), by_python:
        try:
            yield kernels
        finally:
            backend._ready.cache_clear()


def precompile(calls: Iterable[Callable[[], Any]]) -> None:
    """Compiles the kernels of all calls in parallel. The calls alone would compile one by one.

    The calls run, but their results are garbage. The kernels stay in the disk cache.
    """
    with _noting_kernels() as kernels:
        for call in calls:
            call()
    if kernels:
        jit.build_all(list(kernels.values()), jit.architecture(CUDA))


def all_passes(
    tensors: Sequence[Tensor], layout: Callable[[Tensor], Tensor] = torch.clone, **geometry: Any
) -> None:
    """Runs the convolution and its gradients as :func:`oracle.assert_matches` does."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = fastconv.conv2d(*leaves, **geometry)
    grad_output = layout(torch.zeros(output.shape, dtype=output.dtype, device=output.device))
    torch.autograd.grad(output, leaves, grad_output)


# --- Tensors in memory ----------------------------------------------------------------------------


def _among_nans(tensor: Tensor, before: int) -> Tensor:
    """A copy of the tensor with NaNs before and after it, ``before`` of them in front."""
    around = tensor.new_full((before + tensor.numel() + 64,), torch.nan)
    return around.as_strided(tensor.shape, tensor.stride(), before).copy_(tensor)


def _sliced(tensor: Tensor) -> Tensor:
    """A copy in every second element of a larger tensor, with NaN in between."""
    apart = tensor.new_full([2 * side + 1 for side in tensor.shape], torch.nan)
    return apart[tuple(slice(1, None, 2) for _ in tensor.shape)].copy_(tensor)


# Ways to place a tensor in memory. A kernel that reads outside of the tensor reads NaN.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "aligned": lambda tensor: _among_nans(tensor, 64),
    "misaligned": lambda tensor: _among_nans(tensor, 1),
    "sliced": _sliced,
    "channels last": lambda tensor: _among_nans(
        tensor.movedim(-3, -1).contiguous().movedim(-1, -3) if tensor.dim() > 2 else tensor, 64
    ),
}

# --- Geometries -----------------------------------------------------------------------------------

# Bounds the multiplications of a random convolution, so that its float64 reference on the CPU takes
# a fraction of a second.
MOST_PRODUCTS = 2 * 10**7
MOST_CHANNELS = 70


@st.composite
def large_convolutions(draw: st.DrawFn) -> Convolution:
    """Convolutions with many tiles and stages, larger than ``strategies.convolutions``."""

    def pair(values: st.SearchStrategy[Any]) -> tuple[Any, Any]:
        return draw(values), draw(values)

    kernel = pair(st.integers(1, 7) | st.integers(8, 31))
    stride, dilation = pair(st.integers(1, 5)), pair(st.integers(1, 3) | st.integers(1, 12))
    padding = pair(st.tuples(st.integers(0, 16), st.integers(0, 16)))
    extent = tuple(step * (taps - 1) + 1 for step, taps in zip(dilation, kernel, strict=True))
    size = tuple(
        max(1, span - sum(sides)) + draw(st.integers(0, 70))
        for span, sides in zip(extent, padding, strict=True)
    )
    batch = draw(st.integers(1, 4))
    sides = (*padding[0], *padding[1])
    single = Problem.of((batch, 1, *size), (1, 1, *kernel), stride, sides, dilation, 1)
    # The most pairs of an input and an output channel.
    most = max(1, MOST_PRODUCTS * 2 // single.flops)
    kind = draw(st.sampled_from(["dense", "dense", "grouped", "depthwise"]))
    most_groups = {"dense": 1, "grouped": 5, "depthwise": min(most, MOST_CHANNELS)}[kind]
    groups = draw(st.integers(1, most_groups))
    most_depth = 1 if kind == "depthwise" else min(most // groups, MOST_CHANNELS // groups)
    depth = draw(st.integers(1, max(1, most_depth)))
    most_multiplier = min(most // (groups * depth), 2 if kind == "depthwise" else MOST_CHANNELS)
    multiplier = draw(st.integers(1, max(1, most_multiplier)))
    return Convolution(
        input_shape=(batch, groups * depth, *size),
        weight_shape=(groups * multiplier, depth, *kernel),
        bias=draw(st.booleans()),
        batched=batch > 1 or draw(st.booleans()),
        geometry={"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        formats=pair(st.sampled_from(list(FORMATS.values()))),
    )


@st.composite
def tensor_core_convolutions(
    draw: st.DrawFn, strides: Sequence[int] = (1, 1, 1, 2, 3, 4)
) -> Convolution:
    """Convolutions that the tensor-core kernels accept: groups of at least 8 channels."""

    def pair(values: st.SearchStrategy[Any]) -> tuple[Any, Any]:
        return draw(values), draw(values)

    kernel = pair(st.integers(1, 5) | st.integers(6, 11))
    stride = pair(st.sampled_from(strides))
    dilation = pair(st.just(1) | st.integers(1, 6))
    padding = pair(st.tuples(st.integers(0, 8), st.integers(0, 8)))
    more = draw(st.integers(0, 24)), draw(st.integers(0, 40) | st.integers(41, 300))
    size = tuple(
        max(1, step * (taps - 1) + 1 - sum(sides)) + extra
        for step, taps, sides, extra in zip(dilation, kernel, padding, more, strict=True)
    )
    batch, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 1, 2, 3]))
    sides = (*padding[0], *padding[1])
    single = Problem.of((batch, 1, *size), (1, 1, *kernel), stride, sides, dilation, 1)
    # The most pairs of an input and an output channel of a group.
    most = max(64, 5 * MOST_PRODUCTS * 2 // single.flops // groups)
    depth = draw(st.integers(8, min(90, most // 8)))
    multiplier = draw(st.integers(8, max(8, min(200, most // depth))))
    return Convolution(
        input_shape=(batch, groups * depth, *size),
        weight_shape=(groups * multiplier, depth, *kernel),
        bias=draw(st.booleans()),
        batched=True,
        geometry={"stride": stride, "padding": padding, "dilation": dilation, "groups": groups},
        formats=pair(st.sampled_from(list(FORMATS.values()))),
    )


def arguments_of(problem: Problem, precision: str = "ieee") -> tuple[Any, ...]:
    """The last arguments of the operators: the geometry and the precision of float32."""
    axes = problem.axes
    padding = tuple(side for axis in axes for side in (axis.before, axis.after))
    strides = tuple(axis.stride for axis in axes)
    dilations = tuple(axis.dilation for axis in axes)
    return strides, padding, dilations, problem.groups, precision


def format_of(rank: int, memory_format: Any) -> Any:
    """The memory format of tensors of a rank: of images as given, or the same of volumes."""
    return pass_cases.memory_format(memory_format == torch.channels_last, rank)

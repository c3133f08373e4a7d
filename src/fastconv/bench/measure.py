"""Ours and PyTorch on the same data: errors against float64, times taken in turn."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d as torch_conv2d

from fastconv import ops
from fastconv.bench.workloads import Workload

PASSES = ("forward", "input_grad", "weight_grad")
# Bound on ‖ours - float64‖ / ‖float64‖ for float32 results: strict arithmetic lands near 3e-7,
# TF32, whose operands have 10 bits of mantissa, near 3e-4.
ERROR_BOUND = {"ieee": 2e-6, "tf32": 1e-3}


@dataclass(frozen=True)
class Row:
    """What was found for one pass of one workload."""

    workload: Workload
    direction: str
    ours_ms: float
    peer_ms: float
    ours_spread: float  # half the interquartile range, as a share of the median
    peer_spread: float
    ours_error: float
    peer_error: float
    bound: float

    @property
    def speedup(self) -> float:
        return self.peer_ms / self.ours_ms

    @property
    def passed(self) -> bool:
        return self.ours_error <= self.bound  # also false for NaN


def measure(
    workloads: Sequence[Workload], device: torch.device, repeats: int, precision: str
) -> Iterator[Row]:
    """One row for each pass of each workload, as soon as it is measured."""
    for workload in workloads:
        for direction in PASSES:
            yield _measure_pass(workload, direction, device, repeats, precision)


def _measure_pass(
    workload: Workload, direction: str, device: torch.device, repeats: int, precision: str
) -> Row:
    generator = torch.Generator().manual_seed(0)
    problem = workload.problem
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    tensors = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    ours, peer = _ours(workload, direction, precision), _peer(workload, direction)
    reference = peer(*(tensor.double() for tensor in tensors))
    ours_error, peer_error = (_error(compute(*tensors), reference) for compute in (ours, peer))
    del reference
    ours_times, peer_times = _times((ours, peer), tensors, repeats)
    return Row(
        workload,
        direction,
        statistics.median(ours_times),
        statistics.median(peer_times),
        _spread(ours_times),
        _spread(peer_times),
        ours_error,
        peer_error,
        ERROR_BOUND[precision],
    )


def _ours(workload: Workload, direction: str, precision: str) -> Callable[..., Tensor]:
    padding = workload.problem.padding
    geometry = (workload.stride, padding, workload.dilation, workload.groups, precision)

    def compute(input: Tensor, weight: Tensor, grad_output: Tensor) -> Tensor:
        if direction == "forward":
            return ops.forward(input, weight, None, *geometry)
        if direction == "input_grad":
            return ops.input_grad(grad_output, weight, input.shape[2:], *geometry)
        return ops.weight_grad(grad_output, input, weight.shape[2:], *geometry, False)[0]

    return compute


def _peer(workload: Workload, direction: str) -> Callable[..., Tensor]:
    geometry = (workload.stride, workload.padding, workload.dilation)

    def compute(input: Tensor, weight: Tensor, grad_output: Tensor) -> Tensor:
        if direction == "forward":
            return torch_conv2d(input, weight, None, *geometry, workload.groups)
        wanted = (direction == "input_grad", direction == "weight_grad", False)
        grads = torch.ops.aten.convolution_backward(
            grad_output, input, weight, None, *geometry, False, (0, 0), workload.groups, wanted
        )
        return grads[wanted.index(True)]

    return compute


def _error(result: Tensor, reference: Tensor) -> float:
    return float(torch.linalg.vector_norm(result - reference) / torch.linalg.vector_norm(reference))


def _times(
    computations: Sequence[Callable[..., Tensor]], tensors: Sequence[Tensor], repeats: int
) -> list[list[float]]:
    """Milliseconds of each computation, taken in turn, so that the machine's moods hit all."""
    stopwatch = _cuda_ms if tensors[0].is_cuda else _wall_ms
    for compute in computations:
        stopwatch(lambda: compute(*tensors))  # noqa: B023
    return [
        list(times)
        for times in zip(
            *(
                [stopwatch(lambda: compute(*tensors)) for compute in computations]  # noqa: B023
                for _ in range(repeats)
            ),
            strict=True,
        )
    ]


def _wall_ms(run: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def _cuda_ms(run: Callable[[], Tensor]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _spread(times: Sequence[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, median, third = statistics.quantiles(times, n=4)
    return (third - first) / 2 / median

"""Streams, graphs, threads, memory and the disk cache: what happens around the kernels."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastconv
from fastconv import jit, ops
from fastconv.backends import cuda as backend
from fastconv.kernels import direct
from fastconv.kernels.family import Kernel, Launch, Operands
from fastconv.problem import Problem
from fastconv.workloads import FOUNDING
from gpu.helpers import CUDA, arguments_of

_widths = count(40)


def fresh(batch: int = 3) -> Problem:
    """A problem whose kernels no test has used yet."""
    shapes = (batch, 5, 17, next(_widths)), (6, 5, 3, 3)
    return Problem.of(*shapes, (1, 1), (1, 1, 1, 1), (1, 1), 1)


def _tensors(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and the gradient of the output."""
    shapes = (problem.input_shape, problem.weight_shape, problem.output_shape)
    return tuple(torch.randn(shape, device=CUDA) for shape in shapes)  # type: ignore[return-value]


def _run(problem: Problem, input: Tensor, weight: Tensor, grad_output: Tensor) -> list[Tensor]:
    """The results of all three passes."""
    last = arguments_of(problem)
    return [
        ops.forward(input, weight, None, *last),
        ops.input_grad(grad_output, weight, problem.input_size, *last),
        ops.weight_grad(grad_output, input, problem.kernel_size, *last, False)[0],
    ]


def _through_autograd(
    problem: Problem, input: Tensor, weight: Tensor, grad_output: Tensor
) -> list[Tensor]:
    """The results of all three passes; autograd's own thread computes the gradients."""
    leaves = [input.detach().requires_grad_(), weight.detach().requires_grad_()]
    output = ops.forward(*leaves, None, *arguments_of(problem))
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def _assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, *results in zip(("output", "input", "weight"), actual, expected, strict=True):
        assert torch.equal(*results), name


class TestGraphs:
    @pytest.mark.parametrize("run", [_run, _through_autograd])
    @pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
    def test_replays_with_new_data(self, run: Any, warm: bool) -> None:
        problem, other = fresh(), fresh()
        run(other, *_tensors(other))  # Warms up PyTorch, not our kernels.
        static = _tensors(problem)
        if warm:
            run(problem, *static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run(problem, *static)
        for _ in range(3):
            new = _tensors(problem)
            for tensor, values in zip(static, new, strict=True):
                tensor.copy_(values)
            graph.replay()
            _assert_same(captured, run(problem, *new))

    def test_graphed_module(self) -> None:
        module = fastconv.Conv2d(5, 6, 3, padding=1).to(CUDA)
        eager = copy.deepcopy(module)  # make_graphed_callables changes its module in place.
        sample = torch.randn(2, 5, 16, 16, device=CUDA, requires_grad=True)
        graphed = torch.cuda.make_graphed_callables(module, (sample,))
        new = torch.randn_like(sample, requires_grad=True)
        results = []
        for each in (graphed, eager):
            output = each(new)
            leaves = (new, *each.parameters())
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        for actual, expected in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


# Each block adds to what another block wrote in the launch before.
STEPS = 8
SUM = """
#include "device/sm90.cuh"
extern "C" __global__ void __launch_bounds__(128) sum(const float* in, float* out) {
  fastconv::allow_later_launch();
  fastconv::wait_for_earlier_launch();
  const unsigned all = gridDim.x * blockDim.x;
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = in[(i + blockDim.x) % all] + 1;
}
"""


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU on which launches can begin early: compute capability 9.0",
)
class TestEarlyLaunches:
    BLOCKS, THREADS = 2048, 128

    @pytest.fixture
    def prepared(self, tmp_path: Path) -> jit.LoadedLaunches:
        """Launches that each need what the one before wrote, and overwrite what that one read."""
        (tmp_path / "sum.cuh").write_text(SUM)
        kernel = Kernel(str(tmp_path / "sum.cuh"), "sum", ())
        names = ("a", "b")
        launches = [
            Launch(kernel, (self.BLOCKS, 1, 1), self.THREADS, 0, order, early=True)
            for order in (names, names[::-1]) * (STEPS // 2)
        ]
        return jit.load_launches(launches, CUDA, names)

    def _tensors(self) -> tuple[Tensor, Tensor]:
        first = torch.randint(1000, (self.BLOCKS, self.THREADS), device=CUDA).float()
        return first, torch.zeros_like(first)

    def _expected(self, first: Tensor, rounds: int) -> list[Tensor]:
        """What both tensors hold afterwards."""
        steps = rounds * STEPS
        return [first.roll(-steps, 0) + steps, first.roll(1 - steps, 0) + steps - 1]

    def test_each_waits_for_the_one_before(self, prepared: jit.LoadedLaunches) -> None:
        first, second = self._tensors()
        expected = self._expected(first, rounds=50)
        torch.cuda._sleep(SLEEP // 10)  # Keeps the GPU busy until all launches are queued.
        for _ in range(50):
            prepared.run(first.data_ptr(), second.data_ptr())
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])

    def test_in_a_graph(self, prepared: jit.LoadedLaunches) -> None:
        first, second = self._tensors()
        expected = self._expected(first, rounds=30)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                prepared.run(first.data_ptr(), second.data_ptr())
        for _ in range(10):
            graph.replay()
        assert torch.equal(first, expected[0])
        assert torch.equal(second, expected[1])


SLEEP = 10**9  # cycles: about half a second


class TestStreams:
    def test_launches_on_the_current_stream(self) -> None:
        """Launches wait for earlier work of the current stream, and not for other streams."""
        problem = fresh()
        new = _tensors(problem)
        expected = _run(problem, *new)
        old = [torch.zeros_like(tensor) for tensor in new]
        busy, idle = torch.cuda.Stream(), torch.cuda.Stream()
        for stream in (busy, idle):  # PyTorch reserves memory for each stream, which takes time.
            with torch.cuda.stream(stream):
                _run(problem, *new)
        torch.cuda.synchronize()
        with torch.cuda.stream(busy):
            torch.cuda._sleep(SLEEP)
            for tensor, values in zip(old, new, strict=True):
                tensor.copy_(values)
            late = _run(problem, *old)
            done = busy.record_event()
        with torch.cuda.stream(idle):
            early = _run(problem, *new)
        idle.synchronize()
        assert not done.query()
        _assert_same(early, expected)
        busy.synchronize()
        _assert_same(late, expected)

    def test_two_streams_at_once(self) -> None:
        problem = fresh(batch=64)
        inputs = [_tensors(problem) for _ in range(2)]
        expected = [_run(problem, *tensors) for tensors in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        torch.cuda.synchronize()
        results: list[list[list[Tensor]]] = [[], []]
        for _ in range(20):
            for stream, tensors, made in zip(streams, inputs, results, strict=True):
                with torch.cuda.stream(stream):
                    made.append(_run(problem, *tensors))
        torch.cuda.synchronize()
        for made, wanted in zip(results, expected, strict=True):
            for one in made:
                _assert_same(one, wanted)

    @pytest.mark.parametrize("run", [_run, _through_autograd])
    def test_nothing_waits_for_the_gpu(self, run: Any) -> None:
        problem = fresh()
        tensors = _tensors(problem)
        expected = run(problem, *tensors)
        run(problem, *tensors)  # Leaves memory in PyTorch's cache for the next run.
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(SLEEP)
            results = run(problem, *tensors)
            done = torch.cuda.current_stream().record_event()
            assert not done.query()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        _assert_same(results, expected)


def _in_threads(work: Callable[[int], Any], number: int) -> list[Any]:
    """Results of ``work(0)``, ``work(1)``, ..., each in a new thread, all at once."""
    together = threading.Barrier(number)

    def run(index: int) -> Any:
        together.wait()
        return work(index)

    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(run, range(number)))


class TestThreads:
    @pytest.mark.parametrize("warm", [True, False], ids=["warm", "first call"])
    def test_one_that_pytorch_has_not_seen(self, warm: bool) -> None:
        """The thread has no CUDA context, and PyTorch, which has free memory, makes none."""
        problem = fresh()
        tensors = _tensors(problem)
        if warm:
            _run(problem, *tensors)
        (results,) = _in_threads(lambda _: _run(problem, *tensors), 1)
        _assert_same(results, _run(problem, *tensors))

    def test_eight_at_once(self) -> None:
        problem = fresh()
        inputs = [_tensors(problem) for _ in range(8)]
        results = _in_threads(
            lambda index: [_run(problem, *inputs[index]) for _ in range(20)], len(inputs)
        )
        for tensors, made in zip(inputs, results, strict=True):
            expected = _run(problem, *tensors)
            for one in made:
                _assert_same(one, expected)

    def test_eight_with_kernels_of_their_own(self) -> None:
        problems = [fresh() for _ in range(8)]
        inputs = [_tensors(problem) for problem in problems]
        results = _in_threads(lambda i: _through_autograd(problems[i], *inputs[i]), len(problems))
        for problem, tensors, made in zip(problems, inputs, results, strict=True):
            _assert_same(made, _run(problem, *tensors))


class TestMemory:
    @pytest.mark.parametrize("channels_last", [False, True], ids=["nchw", "nhwc"])
    def test_workspace_is_small_and_given_back(self, channels_last: bool) -> None:
        problem = FOUNDING[-1].scaled(2).problem
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        input, weight, grad_output = (
            tensor.to(memory_format=memory_format) for tensor in _tensors(problem)
        )
        last = arguments_of(problem)
        passes: tuple[Callable[[], Any], ...] = (
            lambda: ops.forward(input, weight, None, *last),
            lambda: ops.input_grad(grad_output, weight, problem.input_size, *last),
            lambda: ops.weight_grad(grad_output, input, problem.kernel_size, *last, False)[0],
        )
        for run in passes:
            run()  # Compiles, and reserves memory.
            before, elsewhere = torch.cuda.memory_allocated(), _bytes_elsewhere()
            torch.cuda.reset_peak_memory_stats()
            result = run()
            after = torch.cuda.memory_allocated() - before
            extra = torch.cuda.max_memory_allocated() - before - after
            assert after == pytest.approx(result.nbytes, abs=2 << 20)  # PyTorch rounds up.
            assert extra <= 64 << 20
            assert _bytes_elsewhere() == elsewhere
            del result
            assert torch.cuda.memory_allocated() <= before  # It is less if older garbage was freed.


def _bytes_elsewhere() -> int:
    """Bytes of device memory in use outside of PyTorch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


# A program for a new process. {} is the first use of the runtime in it.
PROGRAM = """
import hashlib, sys, threading, torch, fastconv
from fastconv.jit import compile

def refuse(kernel, arch):
    raise AssertionError(f"compiled {{kernel.entry}} again")

if sys.argv[1:] == ["cached"]:
    compile.compile_kernel = refuse
torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(0)
x, w = (torch.randn(shape, device="cuda") for shape in ((2, 3, 8, 37), (4, 3, 3, 3)))
results = []

def work():
    leaves = [x.requires_grad_(), w.requires_grad_()]
    output = fastconv.conv2d(*leaves, padding=1)
    results.extend([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])

{}
reference = torch.nn.functional.conv2d(x.cpu(), w.cpu(), padding=1)
torch.testing.assert_close(results[0].cpu(), reference)
print(hashlib.sha256(b"".join(r.cpu().numpy().tobytes() for r in results)).hexdigest())
"""
FIRST_USES = {
    "main thread": "work()",
    "another thread": "t = threading.Thread(target=work); t.start(); t.join()",
    "autograd's thread": """
class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            work()
        return grad

Late.apply(torch.ones((), device="cuda", requires_grad=True)).backward()
""",
}


def _digest(how: str, folder: Path, *arguments: str) -> str:
    """The digest of its results that the program prints."""
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(FIRST_USES[how]), *arguments],
        env={**os.environ, "FASTCONV_CACHE_DIR": str(folder)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_first_use_in_a_process_and_the_disk_cache(tmp_path: Path) -> None:
    """The first process compiles; the others do not, and get the same bits."""
    first = _digest("autograd's thread", tmp_path)
    entries = sorted(tmp_path.glob("*.cubin"))
    assert entries
    for how in ("main thread", "another thread"):
        assert _digest(how, tmp_path, "cached") == first
    assert sorted(tmp_path.glob("*.cubin")) == entries


def _launch(problem: Problem) -> Launch:
    strides = torch.empty(problem.weight_shape, device="meta").stride()
    operands = Operands("float", 4, False, False, strides, True)  # type: ignore[arg-type]
    return direct.forward(problem, operands, backend.gpu(0)).launches[-1]


def _attempt(launch: Launch) -> None:
    prepared = jit.load_launches([launch], torch.device("cuda", 0))
    prepared.run(*(0 for _ in prepared.names))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shared_bytes": 10**6}, r"giving 1000000 bytes of shared memory to convolve .*cuda:0"),
        ({"block": 2048}, r"convolve of .* on cuda:0 runs with \d+ threads .* not with 2048"),
        ({"grid": (1, 1 << 17, 1)}, r"convolve of .* a grid has at most .*, not \(1, 131072, 1\)"),
    ],
    ids=["shared memory", "block", "grid"],
)
def test_launches_that_the_driver_refuses(change: dict[str, Any], message: str) -> None:
    problem = fresh()
    with pytest.raises(jit.LaunchError, match=message):
        _attempt(replace(_launch(problem), **change))
    input, weight, _ = _tensors(problem)  # The error does not last.
    torch.testing.assert_close(
        fastconv.conv2d(input, weight, padding=1),
        torch.nn.functional.conv2d(input, weight, padding=1),
    )

"""The library's kernels of ``torch.ops.fastconv.*`` take the place of Python's.

That both compute the same is tested where the operators are: those tests run with both host paths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import conv3d, pad
from torch.profiler import ProfilerActivity, profile

import fastconv
from fastconv import native
from fastconv.ops import autograd, batchnorm, devices
from native.helpers import Compiler, run, tensors

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the native host path is Linux's"),
    pytest.mark.usefixtures("_native_library"),
]

FORWARD = torch.ops.fastconv.forward.default
GEOMETRY = ((1, 1), (1, 1, 1, 1), (1, 1), 1, None)
INPUT, WEIGHT = (2, 4, 7, 6), (6, 4, 3, 3)
PLAIN = ("identity", 0.0)


@pytest.fixture(autouse=True)
def _operators_by_the_library() -> Iterator[None]:
    native.serve_operators(True)
    yield
    native.serve_operators(False)


@pytest.fixture
def python_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that reach Python's kernels, in whatever way."""
    calls: list[str] = []

    def noted(name: str) -> None:
        calls.append(name)

    # The library holds the kernels themselves, so what they call is watched.
    watched = ((autograd, "recorded"), (autograd, "_below_autograd"))
    of_norms = ("recorded", "_below_autograd", "new_forward", "new_backward")
    for file, name in (*watched, *((batchnorm, name) for name in of_norms)):
        function = getattr(file, name)
        monkeypatch.setattr(
            file, name, lambda *a, f=function, n=name, **k: (noted(n), f(*a, **k))[1]
        )
    return calls


def test_python_takes_no_part(python_calls: list[str]) -> None:
    input, weight = tensors(INPUT, WEIGHT)
    native.load()
    FORWARD(input, weight, None, *GEOMETRY)
    output = FORWARD(input, weight.requires_grad_(), None, *GEOMETRY)
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "FastconvConv2dBackward"
    output.sum().backward()
    assert not python_calls


def test_volumes(python_calls: list[str]) -> None:
    input, weight, bias = tensors((2, 4, 3, 6, 5), (6, 4, 2, 3, 3), (6,))
    native.load()
    leaves = [one.requires_grad_() for one in (input, weight, bias)]
    output = FORWARD(*leaves, (1, 2, 1), (1, 0, 1, 1, 0, 2), (1, 1, 2), 1, None)
    expected = conv3d(pad(input, (0, 2, 1, 1, 1, 0)), weight, bias, (1, 2, 1), 0, (1, 1, 2))
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    ours, theirs = (
        torch.autograd.grad(one.square().sum(), leaves) for one in (output, expected)
    )  # fmt: skip
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    up = torch.ops.fastconv.transposed.default(
        expected.detach(), weight, None, None, (0, 1, 0), (1, 2, 1), (0,) * 6, (1, 1, 1), 1, None,
        *PLAIN,
    )  # fmt: skip
    assert up.shape == (2, 4, 4, 8, 5)
    assert not python_calls
    with pytest.raises(RuntimeError, match=r"Expected 3D \(unbatched\) or 4D \(batched\) input"):
        fastconv.conv2d(input, weight)


def test_transposed(python_calls: list[str]) -> None:
    """The library computes all but calls with an epilogue that autograd records."""
    transposed = torch.ops.fastconv.transposed.default
    input, weight, bias = tensors((2, 4, 5, 6), (4, 3, 3, 2), (6,))
    native.load()
    geometry = ((2, 1), (1, 0, 2, 1), (1, 2), 2, None)
    for more in ((0, 0), (1, 0)):
        for residual, *after in ((None, "identity", 0.0), (True, "leaky_relu", 0.5)):
            expected = devices.kernels("transposed")[0](
                input, weight, bias, None, more, *geometry, "identity", 0.0
            )
            added = None if residual is None else torch.randn_like(expected)
            found = transposed(input, weight, bias, added, more, *geometry, *after)
            total = expected if added is None else torch.where(
                expected + added > 0, expected + added, 0.5 * (expected + added)
            )  # fmt: skip
            torch.testing.assert_close(found, total)
    assert not python_calls
    output = transposed(input, weight.requires_grad_(), bias, None, (0, 0), *geometry, *PLAIN)
    assert output.grad_fn is not None
    assert output.grad_fn.name() == "FastconvConvTransposeBackward"
    output.sum().backward()
    assert not python_calls
    transposed(input, weight, bias, None, (0, 0), *geometry, "relu", 0.0).sum().backward()
    assert python_calls


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["", "transposed"])
def test_backward(is_transposed: bool, bias: bool, python_calls: list[str]) -> None:
    """The library computes all gradients in one call, unless autograd records it."""
    backward = torch.ops.fastconv.backward.default
    shapes = ((2, 6, 3, 5), (2, 4, 6, 5), (6, 2, 2, 2))
    grad_output, input, weight = tensors(*shapes)
    if is_transposed:
        grad_output, input = input, grad_output
    args = (grad_output, input, weight, (2, 1), (1, 0, 1, 1), (1, 2), 2, None, is_transposed, bias)
    native.load()
    found = backward(*args)
    for recorded in (grad_output, input, weight):
        recorded.requires_grad_()
        with torch.no_grad():
            assert all(map(torch.equal, backward(*args), found))
        recorded.requires_grad_(False)
    assert not python_calls
    expected = devices.kernels("backward")[0](*args)
    assert all(map(torch.equal, found, expected))
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    gradient = backward(grad_output.requires_grad_(), *args[1:])[0]
    assert gradient.grad_fn is not None
    assert python_calls


NORM = torch.ops.fastconv.batch_norm_forward.default
NORM_GRAD = torch.ops.fastconv.batch_norm_backward.default
NORMS = {
    # The activation, whether it is in training, the gradients that are wanted, and types.
    "relu": ("relu", True, (True, True, True), torch.float32),
    "of x": ("relu", True, (True, False, False), torch.float32),
    "identity": ("identity", True, (True, True, True), torch.bfloat16),
    "nothing": ("silu", False, (False, False, False), torch.float64),
    "evaluation": ("silu", False, (False, True, True), torch.bfloat16),
}


def _norm(
    activation: str, training: bool, wanted: tuple[bool, ...], dtype: torch.dtype, last: bool
) -> list[Tensor]:
    """All results of both operators, with what the first one writes."""
    torch.manual_seed(0)
    x, residual, grad = torch.randn(3, 4, 6, 3, 5, dtype=dtype).unbind()
    if last:
        x = x.to(memory_format=torch.channels_last)
    parameter = torch.promote_types(dtype, torch.float32)
    weight, bias, *running = torch.rand(4, 6, dtype=parameter)
    options = (None, training, 0.1, 1e-5, activation, 0.0)
    y, mean, invstd = NORM(x, residual, weight, bias, *running, *options)
    other = {"relu": y, "silu": residual}.get(activation)
    of_batch = (training, True, activation, 0.0, *wanted)
    grads = NORM_GRAD(grad, x, other, weight, bias, mean, invstd, *of_batch)
    return [y, mean, invstd, *running, *grads]


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, last: bool, python_calls: list[str]) -> None:
    """Bits, types and strides are those of Python's kernels."""
    native.load()
    found = _norm(*NORMS[name], last)
    assert not python_calls
    native.serve_operators(False)
    expected = _norm(*NORMS[name], last)
    assert {"new_forward", "new_backward"} <= set(python_calls)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)


def test_recorded_norms(python_calls: list[str]) -> None:
    native.load()
    x, weight = torch.randn(3, 6, 2, 2, requires_grad=True), torch.rand(6, requires_grad=True)
    running = torch.zeros(6), torch.ones(6)
    plain = (None, True, 0.1, 1e-5, "tanh", 0.0)
    y, mean, invstd = NORM(x, None, weight, None, *running, *plain)
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "FastconvBatchNormBackward"
    assert not mean.requires_grad
    assert not invstd.requires_grad
    assert min(one._version for one in running) > 0
    (found,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert python_calls, "which is differentiated again"
    running = torch.zeros(6), torch.ones(6)
    expected = torch.tanh(torch.nn.functional.batch_norm(x, *running, weight, None, True))
    torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), x)[0])
    before = [one._version for one in running]
    with torch.inference_mode():
        NORM(x, None, weight, None, *running, None, False, *plain[2:])
    assert before == [one._version for one in running]


def test_norms_that_python_takes(python_calls: list[str]) -> None:
    """Strided statistics, no elements, and what is wrong, whose errors are Python's."""
    native.load()
    x, plain = torch.randn(3, 6, 2, 2), (None, True, 0.1, 1e-5)
    strided = [torch.zeros(6, 2)[:, 0] for _ in range(2)]
    NORM(x, None, None, None, *strided, *plain, "relu", 0.0)
    assert python_calls
    assert strided[0].any()
    assert NORM(x[:0], None, None, None, None, None, *plain, "relu", 0.0)[0].shape == (0, 6, 2, 2)
    mean, batches = torch.zeros(6), torch.tensor(1.0)
    wrong: list[tuple[Any, str]] = [
        ((x, None, None, None, None, None, *plain, "swish", 0.0), "activation should be"),
        ((x, None, mean[1:], None, None, None, *plain, "relu", 0.0), "weight should contain 6"),
        ((x, None, None, None, mean, None, *plain, "relu", 0.0), "given together"),
        ((x, None, None, None, mean, mean, batches, *plain[1:], "relu", 0.0), "torch.int64"),
        ((x, x[1:], None, None, None, None, *plain, "relu", 0.0), "residual"),
    ]
    for arguments, words in wrong:
        with pytest.raises((ValueError, RuntimeError), match=words):
            NORM(*arguments)
    with pytest.raises(ValueError, match="mean should have shape"):
        NORM_GRAD(x, x, None, None, None, mean[1:], mean, True, False, "relu", 0.0, *3 * (True,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = NORM(torch.empty(3, 6), None, None, None, None, None, *plain, "relu", 0.0)[0]
    assert isinstance(fake, torch._subclasses.FakeTensor)


def test_nodes_call_one_operator() -> None:
    """A profiler, of which eager calls inform the dispatcher, sees both gradients as one call."""
    native.load()
    shapes = (INPUT, WEIGHT, (6,))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        FORWARD(*tensors(*shapes, requires_grad=True), *GEOMETRY).sum().backward()
    events = {event.key: event for event in recorded.key_averages(group_by_input_shape=True)}
    assert events["fastconv::backward"].input_shapes[1:3] == [list(INPUT), list(WEIGHT)]
    assert not {"fastconv::input_grad", "fastconv::weight_grad"} & events.keys()


def test_python_takes_what_is_not_plain(python_calls: list[str]) -> None:
    input, weight = tensors(INPUT, WEIGHT)
    native.load()
    found, tangent = torch.func.jvp(
        lambda x: FORWARD(x, weight, None, *GEOMETRY), (input,), (input,)
    )
    torch.testing.assert_close(found, tangent)
    assert python_calls
    python_calls.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        FORWARD(torch.empty(INPUT), torch.empty(WEIGHT), None, *GEOMETRY)
    assert python_calls


def test_tests_can_have_python_serve(python_calls: list[str]) -> None:
    input, weight = tensors(INPUT, WEIGHT)
    native.load()
    native.serve_operators(False)
    try:
        FORWARD(input, weight, None, *GEOMETRY)
    finally:
        native.serve_operators(True)
    assert python_calls


def test_kernels_are_handed_over_by_name() -> None:
    for name in ("forward", "input_grad", "weight_grad", "fused", "transposed", "backward"):
        cpu, cuda, recorded = native._kernels[name]
        assert (cpu, cuda) == devices.kernels(name)
        assert recorded is autograd.kernels[name]
    assert native._kernels.items() >= batchnorm.KERNELS.items()


def test_taking_over(fake: Compiler) -> None:
    """Graphs that were compiled before go on, and no call of another thread is lost."""
    program = """
import threading
from torch import Tensor

forward = torch.ops.fastconv.forward.default
geometry = ((1, 1), (1, 1, 1, 1), (1, 1), 1, None)
# Sums of small integers are exact, whoever computes them.
x, w = (torch.randint(-4, 5, shape).float() for shape in ((2, 4, 7, 6), (6, 4, 3, 3)))
w.requires_grad_()

def step(x: Tensor, w: Tensor) -> Tensor:
    return forward(x.neg(), w, None, *geometry).relu()

def norm(x: Tensor) -> Tensor:
    rest = (*6 * (None,), True, 0.1, 1e-5, "relu", 0.0)
    return torch.ops.fastconv.batch_norm_forward(x, *rest)[0]

compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
compiled_norm = torch.compile(norm, backend="aot_eager", fullgraph=True)
expected_norm = compiled_norm(x)

def gradient() -> Tensor:
    return torch.autograd.grad(compiled(x, w).sum(), w)[0]

before, expected, failed, done = gradient(), forward(x, w, None, *geometry), [], []

def call_all_the_time() -> None:
    try:
        while not done:
            assert torch.equal(forward(x, w, None, *geometry), expected)
            assert torch.equal(norm(x), expected_norm)
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=call_all_the_time) for _ in range(3)]
for thread in threads:
    thread.start()
native.start_build()
native.finish()
assert native.conv2d is native.load()
for _ in range(50):
    assert torch.equal(gradient(), before)
    assert torch.equal(compiled_norm(x), expected_norm)
done.append(True)
for thread in threads:
    thread.join()
nodes = forward(x, w, None, *geometry).grad_fn, norm(w).grad_fn
print(failed, *(hasattr(node, "_forward_cls") for node in nodes))
"""
    assert run(program) == ["[] False False"], "a node of Python's has the class"


@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
def test_an_operator_loads_what_is_built(fake: Compiler, mode: str) -> None:
    """A process that calls operators alone, as compiled graphs do, uses the library as well."""
    program = f"""
native.make()
native.start_build()
assert native.conv2d is native._load_at_once
with torch.{mode}():
    x, w = torch.randn(2, 4, 7, 6), torch.randn(6, 4, 3, 3)
    torch.ops.fastconv.forward.default(x, w, None, (1, 1), (0, 0, 0, 0), (1, 1), 1, None)
print(native.conv2d is native.load())
"""
    assert run(program) == ["True"]


def test_an_operator_builds_what_is_required(fake: Compiler) -> None:
    program = """
x, w = torch.randn(2, 4, 7, 6), torch.randn(6, 4, 3, 3)
torch.ops.fastconv.forward.default(x, w, None, (1, 1), (0, 0, 0, 0), (1, 1), 1, None)
print(native._module is not None)
"""
    assert run(program, FASTCONV_NATIVE="1") == ["True"]


def test_words_that_only_python_explains() -> None:
    input, weight = tensors(INPUT, WEIGHT)
    native.load()
    with pytest.raises(ValueError, match="activation should be"):
        torch.ops.fastconv.fused.default(input, weight, None, None, *GEOMETRY, "swish", 0.0)
    wrong: list[Tensor] = [torch.randn(2, 3, 7, 6), torch.randn(4, 7, 6, 1, 1)]
    for tensor in wrong:
        with pytest.raises(RuntimeError, match=r"expected|Expected"):
            FORWARD(tensor, weight, None, *GEOMETRY)

"""1-D and transposed convolutions under PyTorch's autograd, transforms, modes and compilers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.export import Dim
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import fastconv
import oracle
from fastconv import ops
from fastconv.backends import cpu, cuda
from fastconv.problem import NO_EPILOGUE, Epilogue, Problem
from recorder import Recorder

pytestmark = pytest.mark.usefixtures("host_path")

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
GEOMETRY = ((2, 1), (1, 0, 2, 1), (1, 2), 2, None)
PLAIN = ("identity", 0.0)


class Function(NamedTuple):
    """A function with its options, PyTorch's, and the shapes of input, weight and bias."""

    ours: Callable[..., Tensor]
    theirs: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    operators: tuple[str, str, str]  # that compute it and its gradients of input and weight


def conv1d(*tensors: Tensor) -> Tensor:
    return fastconv.conv1d(*tensors, stride=2, padding=((3, 1),), dilation=2, groups=2)


def conv_transpose1d(*tensors: Tensor) -> Tensor:
    return fastconv.conv_transpose1d(
        *tensors, stride=3, padding=((2, 0),), output_padding=1, groups=2, dilation=2
    )


def conv_transpose2d(*tensors: Tensor) -> Tensor:
    return fastconv.conv_transpose2d(
        *tensors, stride=(2, 1), padding=((1, 0), (2, 1)), output_padding=(1, 0), groups=2,
        dilation=(1, 2),
    )  # fmt: skip


def conv1d_reference(*tensors: Tensor) -> Tensor:
    return oracle.conv1d(*tensors, stride=2, padding=((3, 1),), dilation=2, groups=2)


def conv_transpose1d_reference(*tensors: Tensor) -> Tensor:
    return oracle.conv_transpose(
        *tensors, stride=3, padding=((2, 0),), output_padding=1, groups=2, dilation=2
    )


def conv_transpose2d_reference(*tensors: Tensor) -> Tensor:
    return oracle.conv_transpose(
        *tensors, stride=(2, 1), padding=((1, 0), (2, 1)), output_padding=(1, 0), groups=2,
        dilation=(1, 2),
    )  # fmt: skip


ALONG = ("forward", "input_grad", "weight_grad")
TRANSPOSED = ("transposed", "forward", "weight_grad")
FUNCTIONS = {
    "conv1d": Function(conv1d, conv1d_reference, ((2, 4, 9), (6, 2, 3), (6,)), ALONG),
    "conv_transpose1d": Function(
        conv_transpose1d, conv_transpose1d_reference, ((2, 4, 5), (4, 3, 3), (6,)), TRANSPOSED
    ),
    "conv_transpose2d": Function(
        conv_transpose2d,
        conv_transpose2d_reference,
        ((2, 4, 3, 4), (4, 3, 3, 2), (6,)),
        TRANSPOSED,
    ),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def _doubles(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


# --- The operator ---------------------------------------------------------------------------------


def _operator_calls(
    first: torch.memory_format, second: torch.memory_format, **kwargs: Any
) -> Iterator[tuple[Any, ...]]:
    """Arguments of ``transposed`` whose first two tensors have these memory formats."""
    input, weight = (
        torch.randn(shape).to(memory_format=memory_format).to(**kwargs)
        for shape, memory_format in (((2, 4, 3, 4), first), ((4, 3, 3, 2), second))
    )
    bias = torch.randn(6).to(**kwargs)
    yield input, weight, None, None, (1, 0), *GEOMETRY, *PLAIN
    yield input, weight, bias, None, (0, 0), *GEOMETRY, *PLAIN


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
def test_opcheck(memory_format: torch.memory_format, requires_grad: bool) -> None:
    for arguments in _operator_calls(memory_format, memory_format):
        prepared = [
            argument.requires_grad_(requires_grad) if isinstance(argument, Tensor) else argument
            for argument in arguments
        ]
        torch.library.opcheck(ops.transposed, tuple(prepared))


def test_opcheck_of_an_epilogue() -> None:
    input, weight, bias, _, *rest = next(iter(_operator_calls(*FORMATS.values())))
    residual = torch.randn_like(ops.transposed(input, weight, bias, None, *rest))
    arguments = (input, weight, bias, residual, *rest[:-2], "leaky_relu", 0.3)
    torch.library.opcheck(ops.transposed, arguments)


@pytest.mark.parametrize("formats", list(product(FORMATS, FORMATS)), ids="-".join)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_promised_layouts_are_returned(formats: tuple[str, str], dtype: torch.dtype) -> None:
    def describe(result: Tensor) -> Any:
        return result.dtype, result.shape, result.stride()

    for arguments in _operator_calls(*(FORMATS[name] for name in formats), dtype=dtype):
        returned = describe(ops.transposed(*arguments))
        on_meta = (a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
        assert describe(ops.transposed(*on_meta)) == returned
        with FakeTensorMode() as mode:
            fake = (mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments)
            assert describe(ops.transposed(*fake)) == returned


def test_output_padding_of_the_operator() -> None:
    input, weight = torch.randn(2, 4, 3, 4), torch.randn(4, 3, 3, 2)
    with pytest.raises(RuntimeError, match=r"output_padding below the stride.*\[0, 1\]"):
        ops.transposed(input, weight, None, None, (0, 1), *GEOMETRY, *PLAIN)


# --- Derivatives ----------------------------------------------------------------------------------


@functions
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradcheck(function: Function, bias: bool, dtype: torch.dtype) -> None:
    tensors = [
        tensor.requires_grad_() for tensor in _doubles(*function.shapes[: 2 + bias], dtype=dtype)
    ]
    gradcheck(
        function.ours, tensors, fast_mode=True,
        check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
    )  # fmt: skip
    gradgradcheck(
        function.ours, tensors, fast_mode=True,
        check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True,
    )  # fmt: skip


@functions
def test_third_derivatives(function: Function) -> None:
    def size_of_gradients(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        gradients = grad(of, argnums=(0, 1, 2))
        return lambda *tensors: sum(part.square().sum() for part in gradients(*tensors))

    def third(of: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        loss = size_of_gradients(lambda *tensors: of(*tensors).square().sum())
        return grad(size_of_gradients(loss), argnums=(0, 1, 2))

    tensors = _doubles(*function.shapes)
    torch.testing.assert_close(third(function.ours)(*tensors), third(function.theirs)(*tensors))


def _loss(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: of(*tensors).sin().sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, *x: grad(_loss(f), (0, 1, 2))(*x),
    "vjp": lambda f, *x: vjp(f, *x)[1](f(*x).cos()),
    "jvp": lambda f, *x: jvp(f, x, tuple(tensor.cos() for tensor in x)),
    "jacrev": lambda f, *x: jacrev(f, (0, 1, 2))(*x),
    "jacfwd": lambda f, *x: jacfwd(f, (0, 1, 2))(*x),
    "hessian": lambda f, *x: hessian(_loss(f), (0, 1, 2))(*x),
    "jvp of grad": lambda f, *x: jvp(grad(_loss(f), (0, 1, 2)), x, tuple(t.cos() for t in x)),
}


@functions
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_function_transforms(function: Function, transform: Callable[..., Any]) -> None:
    tensors = _doubles(*function.shapes)
    torch.testing.assert_close(
        transform(function.ours, *tensors), transform(function.theirs, *tensors)
    )


@functions
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_only_the_gradients_needed(function: Function, needed: tuple[int, ...]) -> None:
    tensors = _doubles(*function.shapes)
    for index in needed:
        tensors[index].requires_grad_()
    with Recorder() as recorder:
        function.ours(*tensors).sin().sum().backward()
    computed = [operator for i, operator in enumerate(function.operators[1:]) if i in needed]
    if len(computed) == 2:
        computed = ["backward"]
    assert [name for name, _ in recorder.calls] == [function.operators[0], *computed]
    expected = grad(_loss(function.theirs), needed)(*(tensor.detach() for tensor in tensors))
    torch.testing.assert_close(tuple(tensors[index].grad for index in needed), expected)


@functions
def test_many_gradients_at_once(function: Function) -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(*function.shapes)]
    above = torch.randn(3, *function.ours(*tensors).shape, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(of(*tensors), tensors, above, is_grads_batched=True)
        for of in (function.ours, function.theirs)
    )
    torch.testing.assert_close(ours, theirs)


def test_names_of_nodes() -> None:
    function = FUNCTIONS["conv_transpose2d"]
    tensors = [tensor.requires_grad_() for tensor in _doubles(*function.shapes)]
    output = function.ours(*tensors)
    assert output.grad_fn.name() == "FastconvConvTransposeBackward"
    gradients = torch.autograd.grad(output.square().sum(), tensors[:2], create_graph=True)
    assert [gradient.grad_fn.name() for gradient in gradients] == [
        "FastconvConv2dBackward",
        "FastconvWeightGradBackward",
    ]


@functions
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_recording(function: Function, context: Callable[[], Any]) -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(*function.shapes)]
    with context():
        output = function.ours(*tensors)
    assert not output.requires_grad
    torch.testing.assert_close(output, function.theirs(*tensors).detach())


def test_gradients_of_complex32() -> None:
    shapes = ((2, 4, 5, 6), (4, 3, 3, 3), (3,))
    tensors = [oracle.random(shape, torch.complex32) for shape in shapes]

    def gradients(of: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        output = of(*leaves, stride=2)
        return torch.autograd.grad(output, leaves, torch.ones(output.shape, dtype=dtype))

    expected = gradients(F.conv_transpose2d, torch.complex64)
    actual = gradients(fastconv.conv_transpose2d, torch.complex32)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.complex32
        torch.testing.assert_close(ours.to(torch.complex64), theirs, rtol=4e-3, atol=4e-2)


# --- vmap -----------------------------------------------------------------------------------------


def _mapped(shapes: Any, dims: tuple[int | None, ...]) -> list[Tensor]:
    return _doubles(
        *(
            shape if dim is None else (*shape[:dim], 3, *shape[dim:])
            for shape, dim in zip(shapes, dims, strict=True)
        )
    )


def _loop(of: Callable[..., Tensor], dims: tuple[int | None, ...], *tensors: Tensor) -> Tensor:
    """The result of ``vmap(of, dims)(*tensors)``, computed by one call at a time."""
    return torch.stack(
        [
            of(
                *(
                    tensor if dim is None else tensor.select(dim, index)
                    for tensor, dim in zip(tensors, dims, strict=True)
                )
            )
            for index in range(3)
        ]
    )


DIMS = [dims for dims in product((None, 0, 1), repeat=3) if any(d is not None for d in dims)]


@functions
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_vmap(function: Function, dims: tuple[int | None, ...]) -> None:
    tensors = _mapped(function.shapes, dims)
    expected = _loop(function.theirs, dims, *tensors)
    torch.testing.assert_close(vmap(function.ours, dims)(*tensors), expected)


@functions
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (0, 0, 0)], ids=str)
def test_vmap_of_grad(function: Function, dims: tuple[int | None, ...]) -> None:
    tensors = _mapped(function.shapes, dims)
    ours, theirs = (
        vmap(grad(_loss(of), (0, 1, 2)), dims)(*tensors) for of in (function.ours, function.theirs)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dims", [(0, None, None, None), (None, None, None, 0), (0, 0, 0, 0)])
def test_vmap_of_epilogues(dims: tuple[int | None, ...]) -> None:
    function = FUNCTIONS["conv_transpose2d"]
    shape = tuple(function.ours(*_doubles(*function.shapes)).shape)

    def fused(input: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return ops.transposed(
            input, weight, bias, residual, (1, 0), (2, 1), (1, 0, 2, 1), (1, 2), 2, None, "silu",
            0.0,
        )  # fmt: skip

    def reference(input: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return F.silu(function.theirs(input, weight, bias) + residual)

    tensors = _mapped((*function.shapes, shape), dims)
    torch.testing.assert_close(vmap(fused, dims)(*tensors), _loop(reference, dims, *tensors))


# --- Autocast -------------------------------------------------------------------------------------


@functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_autocast(function: Function, dtype: torch.dtype) -> None:
    tensors = [oracle.random(shape, dtype) for shape in function.shapes]
    name, options = function.ours.__name__, {"stride": 2, "padding": 1, "groups": 2}
    both = [partial(getattr(module, name), **options) for module in (fastconv, F)]
    above = oracle.random(both[0](*tensors).shape, dtype)

    def under_autocast(of: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = of(*tensors)
            assert output.dtype == (dtype if dtype == torch.float64 else torch.bfloat16)
            return output.to(dtype)

        return call

    ours, theirs = (oracle.with_gradients(under_autocast(of), tensors, above) for of in both)
    tolerance = 4 * torch.finfo(torch.float64 if dtype == torch.float64 else torch.bfloat16).eps
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=8 * tolerance)


# --- Compilers ------------------------------------------------------------------------------------


def _assert_same(
    compiled: Callable[..., Tensor], eager: Callable[..., Tensor], tensors: list[Tensor]
) -> None:
    above = torch.randn_like(eager(*tensors))
    actual, expected = (oracle.with_gradients(of, tensors, above) for of in (compiled, eager))
    torch.testing.assert_close(actual, expected)
    assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in expected]


@functions
@pytest.mark.parametrize("dynamic", [False, True], ids=["", "dynamic"])
def test_compile(function: Function, dynamic: bool) -> None:
    torch._dynamo.reset()

    def block(*tensors: Tensor) -> Tensor:
        return function.ours(tensors[0].sin(), *tensors[1:])

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for longer in (0, 2):
        (*first, last), *others = function.shapes
        tensors = [torch.randn(shape) for shape in ((*first, last + longer), *others)]
        _assert_same(compiled, block, tensors)


@functions
def test_export(function: Function) -> None:
    class Layer(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return function.ours(*tensors)

    batch, channels, *sizes = function.shapes[0]
    tensors = [torch.randn(shape) for shape in function.shapes]
    dynamic = {0: Dim.AUTO, 2: Dim.AUTO}
    program = torch.export.export(
        Layer(), tuple(tensors), dynamic_shapes={"tensors": (dynamic, None, None)}
    )
    others_too = [torch.randn(batch + 1, channels, sizes[0] + 3, *sizes[1:]), *tensors[1:]]
    expected = function.theirs(*others_too)
    torch.testing.assert_close(program.module()(*others_too), expected)
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert f"fastconv.{function.operators[0]}.default" in operators


@functions
def test_a_subclass_of_tensor(function: Function) -> None:
    class Own(Tensor):
        pass

    tensors = _doubles(*function.shapes)
    output = function.ours(tensors[0].as_subclass(Own), *tensors[1:])
    assert type(output) is Own
    torch.testing.assert_close(output.as_subclass(Tensor), function.theirs(*tensors))


# --- What kernels compute on a GPU ----------------------------------------------------------------

# Geometries, and what their kernels add: nothing, bias and activation, or everything.
KERNELS = {
    "stride 1": ((3, 2), (1, 1), (1, 1), "everything"),
    "stride 2": ((3, 2), (2, 2), (1, 1), "no residual"),
    "stride beyond the kernel": ((3, 1), (1, 2), (1, 1), "nothing"),
    "stride and dilation with a common factor": ((3, 3), (2, 1), (2, 1), "nothing"),
}


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [(torch.float32, "identity"), (torch.float32, "silu"), (torch.complex64, "identity")],
    ids=str,
)
@pytest.mark.parametrize("added", [False, True], ids=["", "residual"])
@pytest.mark.parametrize(("kernel", "stride", "dilation", "adds"), KERNELS.values(), ids=KERNELS)
def test_what_kernels_leave_is_added(
    kernel: Any, stride: Any, dilation: Any, adds: str, activation: str, added: bool,
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The CPU's backend stands in for the kernels."""
    seen: list[tuple[bool, Epilogue]] = []

    def ready(need: cuda.Need) -> Any:
        def run(input: Tensor, weight: Tensor, bias: Any, residual: Any, out: Tensor) -> None:
            seen.append((bias is not None, need.epilogue))
            cpu.input_grad(need.problem, input, weight, out, None, bias, residual, need.epilogue)

        return SimpleNamespace(run=run)

    monkeypatch.setattr(cuda, "ready", ready)
    geometry = (stride, (0, 0, 0, 0), dilation, 1)
    input, weight, bias = (
        oracle.random(shape, dtype) for shape in ((2, 4, 5, 6), (4, 3, *kernel), (3,))
    )
    problem = Problem.of_transposed(input.shape, weight.shape, (0, 0), *geometry)
    residual = oracle.random(problem.input_shape, dtype) if added else None
    epilogue = Epilogue(activation, 0.0, added)
    actual, expected = (torch.empty(problem.input_shape, dtype=dtype) for _ in range(2))
    for backend, out in ((cuda, actual), (cpu, expected)):
        backend.input_grad(problem, input, weight, out, None, bias, residual, epilogue)
    torch.testing.assert_close(actual, expected)
    fits = adds == "everything" or (adds == "no residual" and not added)
    plain = dtype.is_complex  # kernels compute with real numbers, without what follows
    assert seen == [
        (adds != "nothing" and not plain, epilogue if fits and not plain else NO_EPILOGUE)
    ]

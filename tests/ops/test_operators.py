"""The three operators under PyTorch's autograd, transforms, modes and subclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, combinations, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import fastconv
import oracle
from fastconv import ops
from fastconv.ops.schema import gradient_format
from recorder import Recorder

pytestmark = pytest.mark.usefixtures("host_path")

FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
INPUT, WEIGHT, BIAS = (2, 4, 5, 6), (6, 2, 3, 2), (6,)
GRAD_OUTPUT = (2, 6, 2, 7)
OPTIONS = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}
GEOMETRY = ((2, 1), (1, 0, 2, 1), (1, 2), 2, None)


def conv2d(*tensors: Tensor) -> Tensor:
    return fastconv.conv2d(*tensors, **OPTIONS)


def reference(*tensors: Tensor) -> Tensor:
    return oracle.conv2d(*tensors, **OPTIONS)


def input_grad(grad_output: Tensor, weight: Tensor) -> Tensor:
    return ops.input_grad(grad_output, weight, INPUT[2:], *GEOMETRY)


def weight_grad(grad_output: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    return ops.weight_grad(grad_output, input, WEIGHT[2:], *GEOMETRY, True)


def weight_grad_without_bias(grad_output: Tensor, input: Tensor) -> Tensor:
    return ops.weight_grad(grad_output, input, WEIGHT[2:], *GEOMETRY, False)[0]


def backward(grad_output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return ops.backward(grad_output, input, weight, *GEOMETRY, False, True)


def backward_of_transposed(
    grad_output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    return ops.backward(grad_output, input, weight, *GEOMETRY, True, True)


# Differentiable functions of tensors, with the tensors' shapes.
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "conv2d": (conv2d, (INPUT, WEIGHT)),
    "conv2d with bias": (conv2d, (INPUT, WEIGHT, BIAS)),
    "input_grad": (input_grad, (GRAD_OUTPUT, WEIGHT)),
    "weight_grad": (weight_grad_without_bias, (GRAD_OUTPUT, INPUT)),
    "weight_grad with bias": (weight_grad, (GRAD_OUTPUT, INPUT)),
    "backward": (backward, (GRAD_OUTPUT, INPUT, WEIGHT)),
    "backward of transposed": (backward_of_transposed, (INPUT, GRAD_OUTPUT, WEIGHT)),
}
functions = pytest.mark.parametrize(("function", "shapes"), FUNCTIONS.values(), ids=FUNCTIONS)


def _doubles(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def _operator_calls(
    first: torch.memory_format, second: torch.memory_format, **kwargs: Any
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Each operator with arguments whose first two tensors have these memory formats."""

    def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [
            torch.randn(shape).to(memory_format=memory_format).to(**kwargs)
            for shape, memory_format in zip(shapes, (first, second), strict=False)
        ]

    bias = torch.randn(BIAS).to(**kwargs)
    yield ops.forward, (*tensors(INPUT, WEIGHT), None, *GEOMETRY)
    yield ops.forward, (*tensors(INPUT, WEIGHT), bias, *GEOMETRY)
    yield ops.input_grad, (*tensors(GRAD_OUTPUT, WEIGHT), INPUT[2:], *GEOMETRY)
    for bias_too in (False, True):
        arguments = (*tensors(GRAD_OUTPUT, INPUT), WEIGHT[2:], *GEOMETRY, bias_too)
        yield ops.weight_grad, arguments
    for transposed, bias_too in ((False, False), (True, True)):
        ends = (INPUT, GRAD_OUTPUT) if transposed else (GRAD_OUTPUT, INPUT)
        (grad_output, weight), (input,) = tensors(ends[0], WEIGHT), tensors(ends[1])
        yield ops.backward, (grad_output, input, weight, *GEOMETRY, transposed, bias_too)
    for written in FORMATS.values():
        yield ops.input_grad, (*tensors(GRAD_OUTPUT, WEIGHT), INPUT[2:], *GEOMETRY, written)
        yield ops.weight_grad, (*tensors(GRAD_OUTPUT, INPUT), WEIGHT[2:], *GEOMETRY, True, written)


every_format = pytest.mark.parametrize("formats", list(product(FORMATS, FORMATS)), ids="-".join)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("memory_format", FORMATS.values(), ids=FORMATS)
def test_opcheck(
    memory_format: torch.memory_format, dtype: torch.dtype, requires_grad: bool
) -> None:
    for operator, arguments in _operator_calls(memory_format, memory_format, dtype=dtype):
        prepared = [
            argument.requires_grad_(requires_grad) if isinstance(argument, Tensor) else argument
            for argument in arguments
        ]
        torch.library.opcheck(operator, tuple(prepared))


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_promised_layouts_are_returned(formats: tuple[str, str], dtype: torch.dtype) -> None:
    def describe(results: Any) -> list[Any]:
        results = [results] if isinstance(results, Tensor) else results
        return [(result.dtype, result.shape, result.stride()) for result in results]

    first, second = (FORMATS[name] for name in formats)
    for operator, arguments in _operator_calls(first, second, dtype=dtype):
        results = operator(*arguments)
        returned = describe(results)
        if isinstance(arguments[-1], torch.memory_format):
            result = results if isinstance(results, Tensor) else results[0]
            assert result.is_contiguous(memory_format=arguments[-1])
        on_meta = (a.to("meta") if isinstance(a, Tensor) else a for a in arguments)
        assert describe(operator(*on_meta)) == returned
        with FakeTensorMode() as mode:
            fake = (mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments)
            assert describe(operator(*fake)) == returned


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_backward_is_its_parts(bias: bool, dtype: torch.dtype, formats: tuple[str, str]) -> None:
    """It has their bits and strides, and the memory format that autograd asks them for."""
    (grad_output, weight), (input,) = (
        [torch.randn(shape).to(memory_format=FORMATS[name]).to(dtype) for shape in shapes]
        for name, shapes in zip(formats, ((GRAD_OUTPUT, WEIGHT), (INPUT,)), strict=True)
    )
    last = gradient_format(input, weight)
    found = ops.backward(grad_output, input, weight, *GEOMETRY, False, bias)
    expected = [
        ops.input_grad(grad_output, weight, INPUT[2:], *GEOMETRY, last),
        *ops.weight_grad(grad_output, input, WEIGHT[2:], *GEOMETRY, bias, last),
    ]
    assert all(map(torch.equal, found, expected))
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]

    # The same tensors, as those of a transposed convolution.
    found = ops.backward(input, grad_output, weight, *GEOMETRY, True, bias)
    last = gradient_format(grad_output, weight)
    above = input.contiguous(memory_format=last)
    expected = [
        ops.forward(above, weight, None, *GEOMETRY),
        ops.weight_grad(grad_output, above, WEIGHT[2:], *GEOMETRY, False, last)[0],
        input.sum((0, 2, 3)) if bias else torch.empty(0, dtype=dtype),
    ]
    assert all(map(torch.equal, found, expected))
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in expected]


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 6, 2, 7), (2, 5, 5, 6), WEIGHT), "expected input to have 4 channels"),
        (((2, 6, 2, 7), (4, 5, 6), WEIGHT), "Expected 4D input"),
        (((2, 6, 2, 7), INPUT, WEIGHT[1:]), "Expected 4D weight"),
        (((2, 6, 3, 7), INPUT, WEIGHT), "Expected grad_output of size"),
        (((3, 6, 2, 7), INPUT, WEIGHT), "Expected grad_output of size"),
        (((2, 8, 2, 7), INPUT, WEIGHT), "Expected grad_output of size"),
    ],
)
def test_tensors_of_different_convolutions(shapes: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        ops.backward(*(torch.randn(shape) for shape in shapes), *GEOMETRY, False, True)


@functions
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_gradcheck(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(*shapes, dtype=dtype)]
    gradcheck(
        function, tensors, fast_mode=True,
        check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True,
    )  # fmt: skip
    gradgradcheck(
        function, tensors, fast_mode=True,
        check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True,
    )  # fmt: skip


def test_gradcheck_of_every_element() -> None:
    shapes = ((2, 2, 3, 4), (4, 1, 2, 2), (4,))
    tensors = [tensor.requires_grad_() for tensor in _doubles(*shapes)]
    assert gradcheck(conv2d, tensors, check_forward_ad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_third_derivatives(dtype: torch.dtype) -> None:
    def size_of_gradients(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        gradients = grad(function, argnums=(0, 1, 2))
        return lambda *tensors: sum(part.abs().square().sum() for part in gradients(*tensors))

    def third(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        def loss(*tensors: Tensor) -> Tensor:
            return function(*tensors).abs().square().sum()

        return grad(size_of_gradients(size_of_gradients(loss)), argnums=(0, 1, 2))

    tensors = _doubles(INPUT, WEIGHT, BIAS, dtype=dtype)
    torch.testing.assert_close(third(conv2d)(*tensors), third(reference)(*tensors))


def _loss(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: function(*tensors).sin().sum()


def _partial(
    function: Callable[..., Tensor], which: tuple[int, ...], tensors: list[Tensor]
) -> Callable[..., Tensor]:
    """``function`` of only some of its tensors."""

    def partial(*some: Tensor) -> Tensor:
        given = dict(zip(which, some, strict=True))
        return function(*(given.get(index, tensor) for index, tensor in enumerate(tensors)))

    return partial


def _all(tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    return tuple(range(len(tensors)))


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda f, *x: grad(_loss(f), _all(x))(*x),
    "vjp": lambda f, *x: vjp(f, *x)[1](f(*x).cos()),
    "jvp": lambda f, *x: jvp(f, x, tuple(tensor.cos() for tensor in x)),
    "jacrev": lambda f, *x: jacrev(f, _all(x))(*x),
    "jacfwd": lambda f, *x: jacfwd(f, _all(x))(*x),
    "jvp of grad": lambda f, *x: jvp(grad(_loss(f), _all(x)), x, tuple(t.cos() for t in x)),
}
SUBSETS = list(chain.from_iterable(combinations(range(3), size) for size in (1, 2, 3)))


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("which", SUBSETS, ids=str)
def test_function_transforms(which: tuple[int, ...], transform: Callable[..., Any]) -> None:
    tensors = _doubles(INPUT, WEIGHT, BIAS)
    ours, theirs = (
        transform(_partial(function, which, tensors), *(tensors[index] for index in which))
        for function in (conv2d, reference)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("which", SUBSETS, ids=str)
def test_hessian(which: tuple[int, ...]) -> None:
    tensors = _doubles((2, 2, 3, 3), (2, 1, 2, 2), (2,))
    ours, theirs = (hessian(_loss(function), which)(*tensors) for function in (conv2d, reference))
    torch.testing.assert_close(ours, theirs)


def _dims(count: int) -> list[tuple[int | None, ...]]:
    """Every choice of mapped tensors, and of the mapped dimension: the first or the second."""
    return [
        dims for dims in product((None, 0, 1), repeat=count) if any(d is not None for d in dims)
    ]


def _mapped(*shapes: tuple[int, ...], dims: tuple[int | None, ...]) -> list[Tensor]:
    return _doubles(
        *(
            shape if dim is None else (*shape[:dim], 3, *shape[dim:])
            for shape, dim in zip(shapes, dims, strict=True)
        )
    )


def _loop(function: Callable[..., Any], dims: tuple[int | None, ...], *tensors: Tensor) -> Any:
    """The result of ``vmap(function, dims)(*tensors)``, computed by one call at a time."""
    results = [
        function(
            *(
                tensor if dim is None else tensor.select(dim, index)
                for tensor, dim in zip(tensors, dims, strict=True)
            )
        )
        for index in range(3)
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)
    return tuple(torch.stack(part) for part in zip(*results, strict=True))


MAPPED = [
    pytest.param(function, shapes, dims, id=f"{name}-{dims}")
    for name, (function, shapes) in FUNCTIONS.items()
    for dims in _dims(len(shapes))
]


@pytest.mark.parametrize(("function", "shapes", "dims"), MAPPED)
def test_vmap(function: Callable[..., Any], shapes: Any, dims: tuple[int | None, ...]) -> None:
    tensors = _mapped(*shapes, dims=dims)
    torch.testing.assert_close(vmap(function, dims)(*tensors), _loop(function, dims, *tensors))


@pytest.mark.parametrize(("function", "shapes", "dims"), MAPPED)
def test_vmap_over_nothing(
    function: Callable[..., Any], shapes: Any, dims: tuple[int | None, ...]
) -> None:
    one = function(*_doubles(*shapes))
    tensors = [
        tensor if dim is None else tensor.narrow(dim, 0, 0)
        for tensor, dim in zip(_mapped(*shapes, dims=dims), dims, strict=True)
    ]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    results = vmap(function, dims)(*leaves)
    results, one = ((r,) if isinstance(r, Tensor) else r for r in (results, one))
    assert [tuple(r.shape) for r in results] == [(0, *o.shape) for o in one]
    sums = sum(result.sum() for result in results)
    gradients = torch.autograd.grad(sums, leaves, materialize_grads=True)
    assert all(not gradient.any() for gradient in gradients)


EMPTY = {
    "no images": ((0, 4, 5, 6), WEIGHT, BIAS),
    "no input channels": ((2, 0, 5, 6), (6, 0, 3, 2), BIAS),
}


@pytest.mark.parametrize("shapes", EMPTY.values(), ids=EMPTY)
@pytest.mark.parametrize("dims", _dims(3), ids=str)
def test_vmap_of_empty_tensors(shapes: Any, dims: tuple[int | None, ...]) -> None:
    tensors = _mapped(*shapes, dims=dims)
    torch.testing.assert_close(vmap(conv2d, dims)(*tensors), _loop(conv2d, dims, *tensors))


@pytest.mark.parametrize("dims", list(product((None, 0), repeat=3))[1:], ids=str)
def test_vmap_of_grad(dims: tuple[int | None, ...]) -> None:
    tensors = _mapped(INPUT, WEIGHT, BIAS, dims=dims)
    ours, theirs = (grad(_loss(function), (0, 1, 2)) for function in (conv2d, reference))
    torch.testing.assert_close(vmap(ours, dims)(*tensors), _loop(theirs, dims, *tensors))


@pytest.mark.parametrize("inner", _dims(2), ids=str)
@pytest.mark.parametrize("outer", [(0, None), (None, 0), (0, 0)], ids=str)
def test_nested_vmap(outer: tuple[int | None, ...], inner: tuple[int | None, ...]) -> None:
    tensors = [
        torch.stack([tensor, -2 * tensor, tensor.sin()]) if dim == 0 else tensor
        for tensor, dim in zip(_mapped(INPUT, WEIGHT, dims=inner), outer, strict=True)
    ]
    torch.testing.assert_close(
        vmap(vmap(conv2d, inner), outer)(*tensors),
        _loop(lambda *some: _loop(reference, inner, *some), outer, *tensors),
    )


def test_per_sample_gradients() -> None:
    module = fastconv.Conv2d(4, 6, 3, padding=1, groups=2, dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    images, targets = _doubles((5, *INPUT[1:]), (5, 6, *INPUT[2:]))

    def loss(parameters: dict[str, Tensor], image: Tensor, target: Tensor) -> Tensor:
        output = torch.func.functional_call(module, parameters, (image,))
        return F.mse_loss(output, target)

    together = vmap(grad(loss), (None, 0, 0))(parameters, images, targets)
    for index, (image, target) in enumerate(zip(images, targets, strict=True)):
        module.zero_grad()
        F.mse_loss(
            F.conv2d(image, module.weight, module.bias, padding=1, groups=2), target
        ).backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(together[name][index], parameter.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype: torch.dtype, to: torch.dtype, device: torch.device) -> None:
    tensors = [oracle.random(shape, dtype, device) for shape in (INPUT, WEIGHT, BIAS)]
    grad_output = oracle.random(GRAD_OUTPUT, dtype, device)

    def under_autocast(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*tensors: Tensor) -> Tensor:
            with torch.autocast(device.type, dtype=to):
                output = function(*tensors)
                with torch.autocast(device.type, enabled=False):
                    untouched = function(*tensors)
            assert (output.dtype, untouched.dtype) == (
                dtype if dtype == torch.float64 else to,
                dtype,
            )
            return output.to(dtype)

        return call

    ours, theirs = (
        oracle.with_gradients(under_autocast(function), tensors, grad_output)
        for function in (conv2d, reference)
    )
    tolerance = 4 * torch.finfo(torch.float64 if dtype == torch.float64 else to).eps
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=8 * tolerance)


def _value(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The sum of what ``function`` returns, as ``grad`` sees it."""
    return lambda *x: torch.func.grad_and_value(lambda *y: function(*y).sum())(*x)[1]


# Transforms, and the indices of tensors that need one more dimension.
AUTOCAST_UNDER: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "vmap": (lambda f: vmap(f, (0, None, None)), (0,)),
    "vmap of the weight": (lambda f: vmap(f, (None, 0, None)), (1,)),
    "vmap of the bias": (lambda f: vmap(f, (None, None, 0)), (2,)),
    "vmap of all": (lambda f: vmap(f, (0, 0, 0)), (0, 1, 2)),
    "vmap of vmap": (lambda f: vmap(vmap(f, (None, 0, None)), (0, None, None)), (0, 1)),
    "vmap of none": (lambda f: lambda *x: vmap(lambda _: f(*x))(torch.ones(3)), ()),
    "grad": (_value, ()),
    "vmap of grad": (lambda f: vmap(_value(f), (0, None, None)), (0,)),
    "grad of vmap": (lambda f: _value(vmap(f, (0, None, None))), (0,)),
    "jvp": (lambda f: lambda *x: jvp(f, x, x)[1], ()),
}


@pytest.mark.parametrize("inside", [False, True], ids=["", "inside"])
@pytest.mark.parametrize(("transform", "mapped"), AUTOCAST_UNDER.values(), ids=AUTOCAST_UNDER)
def test_dtypes_of_autocast_and_transforms(
    transform: Callable[..., Any], mapped: tuple[int, ...], inside: bool
) -> None:
    tensors = [
        torch.randn((3, *shape) if index in mapped else shape)
        for index, shape in enumerate((INPUT, WEIGHT, BIAS))
    ]

    def dtype(function: Callable[..., Tensor]) -> torch.dtype:
        def cast(*some: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return function(*some, groups=2)

        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            return transform(cast if inside else partial(function, groups=2))(*tensors).dtype

    assert dtype(fastconv.conv2d) == dtype(F.conv2d)


def test_autocast_with_mixed_dtypes() -> None:
    input, weight, bias = (torch.randn(shape) for shape in (INPUT, WEIGHT, BIAS))
    tensors = (input.bfloat16(), weight, bias.half())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = conv2d(*tensors), reference(*tensors)
    torch.testing.assert_close(ours, theirs)
    with pytest.raises(RuntimeError, match="should be the same"):
        conv2d(*tensors)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    tensors = _doubles(INPUT, WEIGHT, BIAS)

    def block(*tensors: Tensor) -> Tensor:
        return conv2d(*tensors).sin()

    grad_output = torch.randn(GRAD_OUTPUT, dtype=torch.float64)
    expected = oracle.with_gradients(block, tensors, grad_output)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    output = checkpoint(block, *leaves, use_reentrant=use_reentrant)
    output.backward(grad_output)  # A reentrant checkpoint supports no other call.
    torch.testing.assert_close((output, *(leaf.grad for leaf in leaves)), expected)


@pytest.mark.parametrize("needed", SUBSETS, ids=str)
def test_only_the_gradients_needed(needed: tuple[int, ...]) -> None:
    tensors = _doubles(INPUT, WEIGHT, BIAS)
    for index in needed:
        tensors[index].requires_grad_()
    with Recorder() as recorder:
        conv2d(*tensors).sin().sum().backward()
    gradients = [name for i, name in enumerate(("input_grad", "weight_grad")) if i in needed]
    if len(gradients) == 2:
        gradients = ["backward"]
    assert [name for name, _ in recorder.calls] == ["forward", *gradients]
    expected = grad(_loss(reference), needed)(*(tensor.detach() for tensor in tensors))
    torch.testing.assert_close(tuple(tensors[index].grad for index in needed), expected)
    assert all(tensor.grad is None for i, tensor in enumerate(tensors) if i not in needed)


class _Tagged(Tensor):
    """A subclass whose operators return the same subclass, like FakeTensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(tensor: Tensor) -> _Tagged:
        tagged = Tensor._make_wrapper_subclass(
            _Tagged, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype
        )
        tagged.inner = tensor
        return tagged

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def untag(value: Any) -> Any:
            return value.inner if isinstance(value, cls) else value

        args, kwargs = torch.utils._pytree.tree_map(untag, (args, kwargs or {}))
        return cls.of(func(*args, **kwargs))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["", "requires_grad"])
@pytest.mark.parametrize("which", range(3), ids=["input", "weight", "bias"])
def test_one_tensor_of_a_subclass(which: int, requires_grad: bool) -> None:
    tensors = [tensor.requires_grad_(requires_grad) for tensor in _doubles(INPUT, WEIGHT, BIAS)]
    expected = conv2d(*tensors).detach()
    tensors[which] = _Tagged.of(tensors[which].detach())
    output = conv2d(*tensors)
    assert type(output) is _Tagged
    assert output.inner.equal(expected)
    assert output.requires_grad == requires_grad


@pytest.mark.parametrize("needed", SUBSETS, ids=str)
def test_many_gradients_at_once(needed: tuple[int, ...]) -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(INPUT, WEIGHT, BIAS)]
    leaves = [tensors[index] for index in needed]
    (above,) = _doubles((3, *GRAD_OUTPUT))
    ours, theirs = (
        torch.autograd.grad(function(*tensors), leaves, above, is_grads_batched=True)
        for function in (conv2d, reference)
    )
    torch.testing.assert_close(ours, theirs)


def test_names_of_nodes() -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(INPUT, WEIGHT, BIAS)]
    output = conv2d(*tensors)
    assert output.grad_fn.name() == "FastconvConv2dBackward"
    gradients = torch.autograd.grad(output.square().sum(), tensors[:2], create_graph=True)
    assert [gradient.grad_fn.name() for gradient in gradients] == [
        "FastconvInputGradBackward",
        "FastconvWeightGradBackward",
    ]


def test_backward_twice() -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(INPUT, WEIGHT, BIAS)]
    output = conv2d(*tensors).sum()
    once = torch.autograd.grad(output, tensors, retain_graph=True)
    twice = torch.autograd.grad(output, tensors)
    torch.testing.assert_close(once, twice, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(output, tensors)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_recording(context: Callable[[], Any]) -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(INPUT, WEIGHT, BIAS)]
    with context():
        output = conv2d(*tensors)
    assert not output.requires_grad
    assert output.is_inference() == (context is torch.inference_mode)
    torch.testing.assert_close(output, reference(*tensors).detach())


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_only_input_and_weight_are_saved(bias: bool) -> None:
    tensors = [tensor.requires_grad_() for tensor in _doubles(INPUT, WEIGHT, BIAS)[: 2 + bias]]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
        conv2d(*tensors)
    assert [tensor.data_ptr() for tensor in saved] == [tensor.data_ptr() for tensor in tensors[:2]]


def test_saved_tensors_changed_in_place() -> None:
    input, weight = _doubles(INPUT, WEIGHT)
    output = conv2d(input, weight.requires_grad_())
    input.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()

"""Only the gradients that a backward pass asks for are computed and returned to autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.checkpoint import checkpoint

import fastconv
import oracle
from fastconv import ops
from fastconv.backends import cpu
from fastconv.ops import autograd, entries
from recorder import Recorder

pytestmark = pytest.mark.usefixtures("host_path")

# No other test has these sizes, for which the native library would then know a kernel of its own.
INPUT, WEIGHT, BIAS, OUTPUT = (2, 4, 5, 11), (6, 2, 3, 2), (6,), (2, 6, 2, 12)
OPTIONS = {"stride": (2, 1), "padding": ((1, 0), (2, 1)), "dilation": (1, 2), "groups": 2}
GEOMETRY = ((2, 1), (1, 0, 2, 1), (1, 2), 2, None)


by_python = pytest.mark.parametrize("host_path", ["python"], indirect=True)


@pytest.fixture(autouse=True)
def _always_worth_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autograd, "WORTH_ASKING_FLOPS", (0, 0))


def conv2d(*tensors: Tensor) -> Tensor:
    return fastconv.conv2d(*tensors, **OPTIONS)


def reference(*tensors: Tensor) -> Tensor:
    return oracle.conv2d(*tensors, **OPTIONS)


def _reference_gradients(grad_output: Tensor, **given: Tensor) -> list[Tensor]:
    """Differentiable gradients of PyTorch's convolution for the tensors that are not ``given``.

    A convolution is linear in each of them, so that their values, zeros, do not matter.
    """
    tensors = {"input": INPUT, "weight": WEIGHT, "bias": BIAS}
    values = [
        given[name] if name in given else torch.zeros(shape, dtype=torch.float64).requires_grad_()
        for name, shape in tensors.items()
    ]
    asked = [value for name, value in zip(tensors, values, strict=True) if name not in given]
    return list(torch.autograd.grad(reference(*values), asked, grad_output, create_graph=True))


def input_grad(grad_output: Tensor, weight: Tensor) -> Tensor:
    return ops.input_grad(grad_output, weight, INPUT[2:], *GEOMETRY)


def weight_grad(grad_output: Tensor, input: Tensor) -> tuple[Tensor, Tensor]:
    return ops.weight_grad(grad_output, input, WEIGHT[2:], *GEOMETRY, True)


# Each autograd node: its function, PyTorch's function, the shapes, and the gradients' operators.
NODES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Any, tuple[str, ...]]] = {
    "conv2d": (conv2d, reference, (INPUT, WEIGHT, BIAS), ("input_grad", "weight_grad")),
    "input_grad": (
        input_grad,
        lambda g, w: _reference_gradients(g, weight=w)[0],
        (OUTPUT, WEIGHT),
        ("forward", "weight_grad"),
    ),
    "weight_grad": (
        weight_grad,
        lambda g, x: _reference_gradients(g, input=x),
        (OUTPUT, INPUT),
        ("forward", "input_grad"),
    ),
}


def _subsets(count: int) -> list[tuple[int, ...]]:
    return list(chain.from_iterable(combinations(range(count), n + 1) for n in range(count)))


ASKED = [
    pytest.param(name, asked, id=f"{name}-{asked}")
    for name, (_, _, shapes, _) in NODES.items()
    for asked in _subsets(len(shapes))
]


def _by_grad(**options: Any) -> Callable[..., list[Tensor]]:
    return lambda outputs, above, asked: list(torch.autograd.grad(outputs, asked, above, **options))


def _by_grad_of_many(outputs: Any, above: Any, asked: Any) -> list[Tensor]:
    many = [torch.stack([tensor, -tensor]) for tensor in above]
    gradients = torch.autograd.grad(outputs, asked, many, is_grads_batched=True)
    return [gradient[0] for gradient in gradients]


def _by_backward(outputs: Any, above: Any, asked: Any) -> list[Tensor]:
    torch.autograd.backward(outputs, above, inputs=asked)
    return [tensor.grad for tensor in asked]


def _by_grad_with_anomaly_detection(outputs: Any, above: Any, asked: Any) -> list[Tensor]:
    with torch.autograd.set_detect_anomaly(True):
        return list(torch.autograd.grad(outputs, asked, above))


def _by_edges(outputs: Any, above: Any, asked: Any) -> list[Tensor]:
    edges = [get_gradient_edge(tensor) for tensor in asked]
    return list(torch.autograd.grad(outputs, edges, above))


WAYS = {
    "grad": _by_grad(),
    "retain_graph": _by_grad(retain_graph=True),
    "create_graph": _by_grad(create_graph=True),
    "is_grads_batched": _by_grad_of_many,
    "backward": _by_backward,
    "anomaly detection": _by_grad_with_anomaly_detection,
    "edges": _by_edges,
}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the passes that the CPU backend has computed."""
    names: list[str] = []
    # The native library's kernels would compute these passes without Python.
    monkeypatch.setattr(entries, "plan", lambda *arguments: "passes are counted")

    def noted(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def note(*args: Any) -> None:
            with_bias = name == "weight_grad" and args[4] is not None
            names.append("weight_grad with bias" if with_bias else name)
            function(*args)

        return note

    for name in ("forward", "input_grad", "weight_grad"):
        monkeypatch.setattr(cpu, name, noted(name, getattr(cpu, name)))
    return names


@pytest.fixture(params=[False, True], ids=["", "watched"])
def watched(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Runs with and without a mode that sees all operators: autograd then asks differently."""
    with ExitStack() as stack:
        if request.param:
            stack.enter_context(Recorder())
        yield request.param


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _returned_by(node: Node | None) -> list[tuple[int, ...]]:
    """A list that, each time the node has run, gets the indices of the gradients it returned."""
    returned: list[tuple[int, ...]] = []

    def note(gradients: Sequence[Tensor | None], _: Any) -> None:
        returned.append(tuple(i for i, g in enumerate(gradients) if g is not None))

    assert node is not None
    node.register_hook(note)
    return returned


def _work(asked: tuple[int, ...], names: tuple[str, ...]) -> list[str]:
    work = [name for index, name in enumerate(names) if index in asked]
    return [f"{name} with bias" if name == "weight_grad" and 2 in asked else name for name in work]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "inner"])
@pytest.mark.parametrize(("name", "asked"), ASKED)
def test_only_what_is_asked_for(
    name: str, asked: tuple[int, ...], leaves: bool, way: Any, watched: bool, computed: list[str]
) -> None:
    ours, theirs, shapes, names = NODES[name]
    tensors = _leaves(*shapes)
    if not leaves:
        tensors = [tensor.sin() for tensor in tensors]
    results = ours(*tensors)
    results = [results] if isinstance(results, Tensor) else list(results)
    above = [torch.randn_like(result) for result in results]
    returned = _returned_by(results[0].grad_fn)
    computed.clear()
    gradients = way(results, above, [tensors[index] for index in asked])
    assert returned == [asked]
    # Batched gradients are computed one by one.
    assert list(dict.fromkeys(computed)) == _work(asked, names)
    expected = torch.autograd.grad(theirs(*tensors), [tensors[index] for index in asked], above)
    torch.testing.assert_close(gradients, list(expected))
    # To find out what is wanted, a node records for a moment; the gradients must not be recorded.
    if way is not WAYS["create_graph"]:
        assert not any(gradient.requires_grad for gradient in gradients)


@pytest.mark.parametrize("asked", _subsets(3), ids=str)
@pytest.mark.parametrize("inner", _subsets(3)[:-1], ids=str)
def test_leaves_beside_inner_tensors(
    inner: tuple[int, ...], asked: tuple[int, ...], watched: bool, computed: list[str]
) -> None:
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    tensors = [leaf.sin() if index in inner else leaf for index, leaf in enumerate(leaves)]
    output = conv2d(*tensors)
    returned = _returned_by(output.grad_fn)
    computed.clear()
    # The leaves lie behind inner tensors, which have gradients only on the way to a wanted leaf.
    wanted = [leaves[index] for index in asked]
    gradients = torch.autograd.grad(output.sin().sum(), wanted, retain_graph=True)
    assert returned == [asked]
    assert computed == _work(asked, ("input_grad", "weight_grad"))
    expected = torch.autograd.grad(reference(*tensors).sin().sum(), wanted)
    torch.testing.assert_close(gradients, expected)


def test_everything_of_an_ordinary_backward(watched: bool, computed: list[str]) -> None:
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    tensors = [leaves[0].sin(), leaves[1], leaves[2]]
    loss = conv2d(*tensors).sin().sum()
    expected = torch.autograd.grad(reference(*tensors).sin().sum(), leaves, retain_graph=True)
    for times in (1, 2):
        computed.clear()
        loss.backward(retain_graph=True)
        assert computed == ["input_grad", "weight_grad with bias"]
        accumulated = [times * gradient for gradient in expected]
        torch.testing.assert_close([leaf.grad for leaf in leaves], accumulated)


def test_gradient_of_the_output(watched: bool, computed: list[str]) -> None:
    """``backward`` runs the node of the tensor that it stops at, and drops its results."""
    output = conv2d(*_leaves(INPUT, WEIGHT, BIAS))
    returned = _returned_by(output.grad_fn)
    computed.clear()
    torch.autograd.grad(output.sin().sum(), output, retain_graph=True)
    output.sin().sum().backward(inputs=[output])
    torch.testing.assert_close(output.grad, output.cos())
    assert not computed
    assert not any(returned)


@pytest.mark.parametrize("asked", _subsets(3), ids=str)
def test_gradient_penalty(asked: tuple[int, ...], watched: bool, computed: list[str]) -> None:
    leaves = _leaves(INPUT, WEIGHT, BIAS)

    def penalty(function: Callable[..., Tensor]) -> list[Tensor]:
        loss = function(*leaves).sin().sum()
        (gradient,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        wanted = [leaves[index] for index in asked]
        return list(torch.autograd.grad(gradient.square().sum(), wanted))

    gradients = penalty(conv2d)
    # The weight has a gradient through the input's gradient, and one through the output.
    of_gradient = ["forward", *(["weight_grad"] if 1 in asked else [])]
    of_output = _work(asked, ("input_grad", "weight_grad"))
    assert computed == ["forward", "input_grad", *of_gradient, *of_output]
    torch.testing.assert_close(gradients, penalty(reference))


def test_weight_penalty(watched: bool, computed: list[str]) -> None:
    leaves = _leaves(INPUT, WEIGHT, BIAS)

    def penalty(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        loss = function(*leaves).sin().sum()
        of_weight, of_bias = torch.autograd.grad(loss, leaves[1:], create_graph=True)
        return torch.autograd.grad(of_weight.square().sum() + of_bias.sin().sum(), leaves[1])

    gradient = penalty(conv2d)
    assert computed == ["forward", "weight_grad with bias", "forward", "weight_grad"]
    torch.testing.assert_close(gradient, penalty(reference))


@pytest.mark.parametrize("asked", _subsets(3), ids=str)
@pytest.mark.parametrize("way", ["grad", "backward"])
@pytest.mark.parametrize("inner", [False, True], ids=["leaves", "inner"])
def test_hooks_see_what_they_see_in_pytorch(
    inner: bool, way: str, asked: tuple[int, ...], watched: bool, computed: list[str]
) -> None:
    values = _leaves(INPUT, WEIGHT, BIAS)

    def seen(function: Callable[..., Tensor]) -> list[Any]:
        leaves = [value.detach().clone().requires_grad_() for value in values]
        tensors = [leaf.sin() for leaf in leaves] if inner else leaves
        events: dict[str, Tensor] = {}
        for index, (leaf, tensor) in enumerate(zip(leaves, tensors, strict=True)):
            tensor.register_hook(partial(events.__setitem__, f"gradient {index}"))
            leaf.register_post_accumulate_grad_hook(partial(events.__setitem__, f"leaf {index}"))
            if inner:
                tensor.retain_grad()
        computed.clear()
        output = function(*tensors)
        gradients = WAYS[way](
            [output], [output.detach().cos()], [tensors[index] for index in asked]
        )
        return [gradients, events, [tensor.grad for tensor in tensors]]

    ours = seen(conv2d)
    assert computed == ["forward", *_work(asked, ("input_grad", "weight_grad"))]
    torch.testing.assert_close(ours, seen(reference))


@pytest.mark.parametrize("asked", _subsets(3), ids=str)
def test_below_torch_func(asked: tuple[int, ...], computed: list[str]) -> None:
    """Of two nested passes, the inner one wants the input gradient, the outer one others."""
    leaves = _leaves(INPUT, WEIGHT, BIAS)

    def outer(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def loss(*tensors: Tensor) -> Tensor:
            return function(*tensors).sin().sum()

        size = torch.func.grad(loss)(*leaves).square().sum()
        return torch.autograd.grad(size, [leaves[index] for index in asked])

    ours = outer(conv2d)
    assert computed.count("weight_grad with bias") == (1 in asked and 2 in asked)
    assert ("weight_grad" in computed) == (1 in asked)
    torch.testing.assert_close(ours, outer(reference))


@pytest.mark.parametrize("asked", _subsets(3), ids=str)
def test_within_torch_func(asked: tuple[int, ...]) -> None:
    tensors = [leaf.detach() for leaf in _leaves(INPUT, WEIGHT, BIAS)]

    def size(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def size(*tensors: Tensor) -> Tensor:
            pull_back = torch.func.vjp(function, *tensors)[1]
            return sum(pull_back(tensors[2][:, None, None].expand(OUTPUT))[i].sum() for i in asked)

        return size

    ours, theirs = (torch.func.grad(size(f), (0, 1, 2))(*tensors) for f in (conv2d, reference))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("asked", _subsets(3), ids=str)
def test_within_a_checkpoint(asked: tuple[int, ...], watched: bool, computed: list[str]) -> None:
    leaves = _leaves(INPUT, WEIGHT, BIAS)

    def gradients(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        output = checkpoint(lambda *t: function(*t).sin(), *leaves, use_reentrant=False)
        return torch.autograd.grad(output.square().sum(), [leaves[index] for index in asked])

    ours = gradients(conv2d)
    work = _work(asked, ("input_grad", "weight_grad"))
    assert computed == ["forward", "forward", *work]
    torch.testing.assert_close(ours, gradients(reference))


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_passes_within_a_pass(frozen: bool, watched: bool, computed: list[str]) -> None:
    """A reentrant checkpoint runs a backward pass of all that it recorded inside another pass."""
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    leaves[1].requires_grad_(not frozen)

    def gradients(function: Callable[..., Tensor]) -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        output = checkpoint(lambda *t: function(*t).sin(), *leaves, use_reentrant=True)
        output.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    ours = gradients(conv2d)
    work = ["input_grad"] if frozen else ["input_grad", "weight_grad with bias"]
    assert computed == ["forward", "forward", *work]
    torch.testing.assert_close(ours, gradients(reference))


@pytest.mark.parametrize("outer", _subsets(3), ids=str)
@pytest.mark.parametrize("inner", [*_subsets(3), None], ids=str)
def test_passes_within_hooks(
    inner: tuple[int, ...] | None, outer: tuple[int, ...], watched: bool
) -> None:
    """Passes at once on the same weights want different gradients; ``None`` wants all."""
    leaves = _leaves(INPUT, WEIGHT, BIAS)

    def gradients(function: Callable[..., Tensor]) -> list[Any]:
        for leaf in leaves:
            leaf.grad = None
        nested: list[Any] = []

        def run(_: Tensor) -> None:
            with torch.enable_grad():
                loss = function(*leaves).cos().sum()
            if inner is None:
                loss.backward()
                nested.extend(leaf.grad for leaf in leaves)
            else:
                nested.extend(torch.autograd.grad(loss, [leaves[index] for index in inner]))

        output = function(*leaves)
        output.register_hook(run)
        asked = [leaves[index] for index in outer]
        return [torch.autograd.grad(output.sin().sum(), asked), nested]

    torch.testing.assert_close(gradients(conv2d), gradients(reference))


@by_python  # Nodes in C++ go by the pass that is under way; so do PyTorch's own.
def test_nodes_called_by_hand(watched: bool) -> None:
    """They return all gradients in every pass."""
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    above = torch.randn(OUTPUT, dtype=torch.float64)
    expected = torch.autograd.grad(reference(*leaves), leaves, above)
    node = conv2d(*leaves).grad_fn
    torch.testing.assert_close(node.apply(above)[:3], expected)
    results: list[Any] = []
    output = conv2d(*leaves)
    output.register_hook(lambda _: results.append(node.apply(above)[:3]))
    torch.autograd.grad(output.sum(), leaves[0])
    torch.testing.assert_close(results, [expected])


def test_many_threads() -> None:
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    expected = torch.autograd.grad(reference(*leaves).sin().sum(), leaves)

    def gradients(asked: tuple[int, ...]) -> None:
        output = conv2d(*leaves)
        returned = _returned_by(output.grad_fn)
        found = torch.autograd.grad(output.sin().sum(), [leaves[index] for index in asked])
        assert returned == [asked]
        torch.testing.assert_close(found, tuple(expected[index] for index in asked))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(gradients, 8 * _subsets(3)))


def test_a_leaf_that_has_changed(watched: bool) -> None:
    """Assigning data of another type makes another leaf, but the graph's leaf remains."""
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    output = conv2d(*leaves)
    edge = get_gradient_edge(leaves[2])
    leaves[2].data = leaves[2].data.float()
    (gradient,) = torch.autograd.grad(output, [edge], torch.ones_like(output), retain_graph=True)
    assert gradient.tolist() == 6 * [2 * 2 * 12]
    returned = _returned_by(output.grad_fn)
    leaves[1].requires_grad_(False)
    torch.autograd.grad(output.sum(), leaves[0])
    assert returned == [(0,)]


@by_python
@pytest.mark.parametrize("missing", ["_everything_is_wanted", "_current_node", "_will_execute"])
def test_a_pytorch_that_does_not_tell(
    missing: str, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autograd, missing, None)
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    (ours,) = torch.autograd.grad(conv2d(*leaves).sin().sum(), leaves[0])
    assert computed == ["forward", "input_grad", "weight_grad with bias"]
    (theirs,) = torch.autograd.grad(reference(*leaves).sin().sum(), leaves[0])
    torch.testing.assert_close(ours, theirs)


def test_this_pytorch_says_which_gradients_are_wanted() -> None:
    assert None not in (autograd._everything_is_wanted, autograd._current_node)
    assert autograd._will_execute is not None


@by_python
def test_small_gradients_are_computed_unasked(
    computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asking would take longer."""
    leaves = _leaves(INPUT, WEIGHT, BIAS)
    flops = 2 * torch.Size(OUTPUT).numel() * torch.Size(WEIGHT[1:]).numel()
    for least, expected in (
        (flops, ["input_grad"]),
        (flops + 1, ["input_grad", "weight_grad with bias"]),
    ):
        monkeypatch.setattr(autograd, "WORTH_ASKING_FLOPS", (least, 0))
        computed.clear()
        torch.autograd.grad(conv2d(*leaves).sum(), leaves[0])
        assert computed == ["forward", *expected]

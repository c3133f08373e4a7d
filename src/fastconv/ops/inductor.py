"""What ``torch.compile``'s default backend, Inductor, does with the operators.

Inductor calls the operators as they are. In graphs for GPUs, a pass of ours replaces ``forward``
followed by an addition and an activation by ``fused``, which saves writing and reading the output
once more. ``FASTCONV_FUSE_COMPILED=0`` switches the pass off.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fastconv import problem
from fastconv.backends import epilogue
from fastconv.ops.late import when_imported
from fastconv.ops.schema import OPERATORS, backward, forward, fused

VARIABLE = "FASTCONV_FUSE_COMPILED"
DEVICES = ("cuda",)
"""The types of devices that compute ``fused`` in one kernel."""

_aten = torch.ops.aten
# Where a node has its arguments as eager mode passes them. Inductor gives the arguments of a node
# without this entry any strides, and with those of another format, the convolution is slower.
_STRIDES = "eager_input_vals"
_SLOPE = 0.123456789  # stands for any slope of leaky_relu in a traced graph


def register() -> None:
    when_imported("torch._inductor.lowering", _keep_operators)
    when_imported("torch._inductor.fx_passes.post_grad", _add_pass)


def _keep_operators() -> None:
    """Declares that ``torch.compile`` calls the operators as they are.

    It does so anyway. But if the environment variable ``CI`` is set, it takes an unused
    decomposition for a mistake in PyTorch, and raises an error.
    """
    from torch._inductor import lowering

    for operator in (*(operator.call for operator in OPERATORS.values()), backward):
        lowering.make_fallback(operator, warn=False)


def _add_pass() -> None:
    """Adds our pass before those that the user has set, if there are any.

    Versions of PyTorch that take a single pass keep the user's.
    """
    from torch._inductor import config, custom_graph_pass

    class Fuse(custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            fuse(graph)

        def uuid(self) -> Any:
            # The files that say what is fused.
            files = (__file__, str(epilogue.__file__), str(problem.__file__))
            return custom_graph_pass.get_hash_for_files(files), os.environ.get(VARIABLE)

    theirs = config.post_grad_custom_pre_pass
    # A value that is set holds for the thread that sets it; the default holds for all.
    entries: Any = getattr(config, "_config")  # noqa: B009 - the stubs do not have it
    entries["post_grad_custom_pre_pass"].default = Fuse()
    if theirs is not None and hasattr(custom_graph_pass, "get_custom_graph_passes"):
        # One pass for all would have to know how PyTorch calls and caches each of theirs.
        others = custom_graph_pass.get_custom_graph_passes(theirs)
        config.post_grad_custom_pre_pass = [Fuse(), *others]


def fuse(graph: Graph) -> None:
    """Replaces convolutions and what follows them by ``fused``, wherever a graph allows it."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{VARIABLE} should be 0 or 1, or not set, but got {value!r}")
    if value == "0":
        return
    replaced: set[Node] = set()
    # From the last node to the first: an activation's last operation comes before its others.
    for node in reversed(graph.nodes):
        if node.users and node not in replaced and (tail := _tail(node)) is not None:
            _replace(graph, node, tail)
            replaced.update(tail.nodes)
    # Only nodes of ours are removed: PyTorch keeps other dead nodes at this point, by default.
    for node in reversed(graph.nodes):
        if node in replaced:
            graph.erase_node(node)


class _Tail(NamedTuple):
    """A convolution, and the epilogue whose result is a node of the graph."""

    forward: Node  # the node of the operator
    residual: Node | None
    activation: str
    slope: float
    nodes: frozenset[Node]
    """The convolution and all that the epilogue computes from it: what ``fused`` replaces."""


def _tail(node: Node) -> _Tail | None:
    """Finds the longest tail of a convolution that ends with a node and is used nowhere else."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type not in DEVICES:
        return None
    for activation, match in _activations(node, value.dtype):
        for convolution, residual in _sums(match.argument):
            inside = frozenset((match.argument, *match.nodes))
            nodes = inside | {convolution}
            if (
                convolution.target is forward
                and _are_alike(convolution, node, strides=True)
                and (residual, activation) != (None, "identity")
                and isfinite(match.slope)
                and all(inside.issuperset(one.users) for one in nodes - {node})
                and not _is_mutated_between(convolution, node)
            ):
                return _Tail(convolution, residual, activation, match.slope, nodes)
    return None


def _is_mutated_between(first: Node, last: Node) -> bool:
    """Whether an operation between two nodes writes to a tensor, perhaps one that the first reads.

    ``fused`` takes the place of the last node: it would read what the operation has written.
    """
    node = first.next
    while node is not last:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
        node = node.next
    return False


def _sums(node: Node) -> Iterator[tuple[Node, Node | None]]:
    """Yields the ways to see a node as an output of a convolution plus a residual, or none."""
    if node.target is _aten.add.Tensor and not node.kwargs:
        first, second = node.args
        if (
            isinstance(first, Node)
            and isinstance(second, Node)
            and first is not second  # the convolution would have to be computed for its residual
            and _are_alike(first, second)
        ):
            yield first, second
            yield second, first
    yield node, None


def _are_alike(first: Node, second: Node, strides: bool = False) -> bool:
    """Whether two nodes have the same shape, type and device, and the same strides if asked for."""
    one, other = first.meta.get("val"), second.meta.get("val")
    return (
        isinstance(one, Tensor)
        and isinstance(other, Tensor)
        and (one.dtype, one.device) == (other.dtype, other.device)
        and _expressions(one.shape) == _expressions(other.shape)
        and (not strides or _expressions(one.stride()) == _expressions(other.stride()))
    )


def _expressions(sizes: Sequence[Any]) -> list[Any]:
    """Returns symbolic sizes as expressions: comparing the sizes would add guards to the graph."""
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]


def _replace(graph: Graph, node: Node, tail: _Tail) -> None:
    after = (tail.activation, tail.slope)
    input, weight, bias, *geometry = tail.forward.args
    with graph.inserting_before(node):
        new = graph.call_function(fused, (input, weight, bias, tail.residual, *geometry, *after))
    new.meta.update(node.meta)
    if _STRIDES in tail.forward.meta:
        (input, weight, bias, *geometry), _ = tail.forward.meta[_STRIDES]
        residual = None if tail.residual is None else tail.residual.meta["val"]
        new.meta[_STRIDES] = ((input, weight, bias, residual, *geometry, *after), {})
    node.replace_all_uses_with(new)


# --- Activations, as Inductor decomposes them -----------------------------------------------------


class _Match:
    """Graph nodes that correspond to the nodes of a traced activation."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.argument: Any = None
        self.slope = 0.0
        self._known: dict[Node, Any] = {}

    def takes(self, pattern: Any, found: Any) -> bool:
        """Whether a value of the graph corresponds to one of the pattern."""
        if isinstance(pattern, Node):
            return self._takes_node(pattern, found)
        if isinstance(pattern, (tuple, list)):
            return (
                isinstance(found, (tuple, list))
                and len(pattern) == len(found)
                and all(map(self.takes, pattern, found))
            )
        if pattern == _SLOPE and isinstance(found, float):
            self.slope = found
            return True
        return type(pattern) is type(found) and pattern == found

    def _takes_node(self, pattern: Node, found: Any) -> bool:
        if pattern in self._known:
            return self._known[pattern] is found
        if not isinstance(found, Node):
            return False
        self._known[pattern] = found
        if pattern.op == "placeholder":
            self.argument = found
            return True
        self.nodes.append(found)
        return (
            pattern.target is found.target
            and self.takes(pattern.args, found.args)
            and pattern.kwargs.keys() == found.kwargs.keys()
            and all(self.takes(pattern.kwargs[name], found.kwargs[name]) for name in found.kwargs)
        )


def _activations(node: Node, dtype: torch.dtype) -> Iterator[tuple[str, _Match]]:
    """Yields the activations whose result a node may be; the last is the identity."""
    for activation in problem.ACTIVATIONS if dtype.is_floating_point else ():
        match = _Match()
        if activation != "identity" and match.takes(_traced(activation, dtype), node):
            yield activation, match
    match = _Match()
    match.argument = node
    yield "identity", match


@cache
def _traced(activation: str, dtype: torch.dtype) -> Node:
    """Returns the last node of an activation's graph, with Inductor's decompositions."""
    from torch._inductor.decomposition import select_decomp_table

    form = problem.Epilogue(activation, _SLOPE if activation == "leaky_relu" else 0.0)

    def function(output: Tensor) -> Tensor:
        return epilogue.applied(output, None, form)

    example = torch.empty(2, 2, 2, 2, dtype=dtype)
    graph = make_fx(function, select_decomp_table(), tracing_mode="fake")(example).graph
    (result,) = (node for node in graph.nodes if node.op == "output")
    return result.args[0]

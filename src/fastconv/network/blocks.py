"""Blocks of training: BatchNorms in a graph, the convolutions before them, and what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from fastconv.backends.batchnorm.formulas import sum_type
from fastconv.batchnorm import CONVOLUTIONS, bn_act, conv_of_bn_act
from fastconv.geometry import Activation, activation_of
from fastconv.kernels.batchnorm.plan import beside as needs_beside
from fastconv.network.exchange import is_exact, kind_of
from fastconv.network.sites import (
    IN_PLACE,
    NORMS,
    activation_at,
    added,
    only_reader,
    writes_between,
)
from fastconv.network.tracing import Traced, has_hooks
from fastconv.ops import batchnorm_schema


@dataclass(frozen=True)
class Block:
    """A BatchNorm in a graph, and the nodes around it that are computed with it."""

    norm: Node
    conv: Node | None = None  # its result is read by the BatchNorm alone
    addition: Node | None = None
    residual: Node | None = None
    act: Node | None = None
    activation: Activation | None = None

    @property
    def tip(self) -> Node:
        """The last node, whose result is the block's."""
        return self.act or self.addition or self.norm

    @property
    def nodes(self) -> list[Node]:
        """The nodes that the block computes, the last first."""
        return [node for node in (self.act, self.addition, self.norm) if node is not None]

    @property
    def name(self) -> str:
        """The name of the BatchNorm in the graph's module."""
        return str(self.norm.target)

    @property
    def words(self) -> str:
        """What follows the BatchNorm, for a report: "addition, relu"."""
        activation = self.activation
        name = activation if isinstance(activation, str) else (activation or ("",))[0]
        return ", ".join(filter(None, ("addition" if self.addition else "", name)))

    @property
    def adds_in_place(self) -> bool:
        return self.addition is not None and self.addition.target in IN_PLACE

    def owners(self) -> set[str]:
        """The modules whose ``forward`` calls what the block computes, or runs in between."""
        found = set()
        node = self.conv or self.norm
        while True:
            found.add(_owner(node))
            if node is self.tip:
                return found
            node = node.next


def _owner(node: Node) -> str:
    """The name of the module whose ``forward`` made a node; "" for the graph's own."""
    stack = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    if node.op == "call_module":
        return str(node.target).rpartition(".")[0]
    return stack[-1] if stack else ""


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's BatchNorms, or derived from one."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def reason_to_leave_norm(module: Any) -> str | None:
    """Why a BatchNorm cannot be computed by fastconv, if it cannot."""
    if isinstance(module, nn.SyncBatchNorm):
        return "statistics of several processes, which PyTorch exchanges"
    if type(module) not in NORMS.values():
        return f"of another class, {type(module).__name__}"
    if has_hooks(module):
        return "with hooks, or a forward of their own"
    if module._parameters.keys() != {"weight", "bias"}:
        return "with parameters that are computed"
    return None


def blocks(graph: Traced) -> list[Block]:
    """The blocks of a graph.

    Nodes of a block move to the place of its last one. So none of the nodes in between may write to
    a tensor that was there before, but BatchNorms to their statistics, which no other module has.
    """
    nodes = list(graph.module.graph.nodes)
    modules = dict(graph.module.named_modules(remove_duplicate=False))
    read = {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
    called = Counter(str(node.target) for node in nodes if node.op == "call_module")
    tensors = Counter(
        id(tensor) for module in modules.values() for tensor in module._buffers.values()
    )
    of_norms = {
        name
        for name, module in modules.items()
        if is_norm(module)
        and reason_to_leave_norm(module) is None
        and all(tensors[id(one)] == 1 for one in module._buffers.values() if one is not None)
        and sum(module is other for other in modules.values()) == 1
    }
    writers = {
        node
        for node in graph.writers
        if not (node.op == "call_module" and str(node.target) in of_norms)
    }
    graph = replace(graph, writers=writers)
    found: list[Block] = []
    for node in nodes:
        name = str(node.target)
        is_once = node.op == "call_module" and name in of_norms - read and called[name] == 1
        if is_once and len(node.args) == 1 and not node.kwargs and node in graph.forms:
            taken = {block.addition for block in found}
            found.append(_block(node, graph, modules, taken))
    return [block for block in found if _is_supported(block, graph, modules)]


def _block(
    norm: Node, graph: Traced, modules: Mapping[str, nn.Module], taken: Collection[Node | None]
) -> Block:
    block = Block(norm)
    follower = only_reader(norm, graph)
    if follower is not None and follower not in taken:
        residual = added(follower, norm, graph)
        if residual is not None and not writes_between(norm, follower, graph.writers):
            block = replace(block, addition=follower, residual=residual)
            follower = only_reader(follower, graph)
    if follower is not None:
        activation = activation_at(follower, block.tip, modules)
        if activation is not None:
            followed = replace(block, act=follower, activation=activation)
            block = block if _keeps_what_is_written(followed, graph) else followed
    source = norm.args[0]
    place = block.addition or norm
    if (
        isinstance(source, Node)
        and _is_convolution(source, modules)
        and list(source.users) == [norm]
        and not writes_between(source, place, graph.writers)
    ):
        block = replace(block, conv=source)
    return block


def _keeps_what_is_written(block: Block, graph: Traced) -> bool:
    """Whether a block with an activation keeps a tensor for gradients that is written to later.

    PyTorch's activation keeps its input where a block keeps the output or the residual.
    """
    name, slope = activation_of(block.activation)
    kept = needs_beside(name, slope, block.addition is not None)
    node = {"output": block.act, "residual": block.residual}.get(kept or "")
    return node is not None and graph.is_written_after(node, block.tip)


def _is_convolution(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node is a convolution, not transposed, that is called with its input alone."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = modules[str(node.target)]
    kind = kind_of(module)
    if kind is None or kind.ours not in CONVOLUTIONS:
        return False
    return is_exact(module) and not has_hooks(module)


def _is_supported(block: Block, graph: Traced, modules: Mapping[str, Any]) -> bool:
    """Whether fastconv has the types of a block's tensors."""
    dtype = graph.forms[block.norm].dtype
    norm = modules[block.name]
    tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
    types = {one.dtype for one in tensors if one is not None}
    return dtype in batchnorm_schema.DTYPES and types <= {dtype, sum_type(dtype)}


# --- Fused ----------------------------------------------------------------------------------------


def fused_graph(
    graph: Graph,
    chosen: Iterable[Block],
    modules: Mapping[str, nn.Module],
    recompute: bool = False,
) -> Graph:
    """A copy of a graph in which each of these blocks is one node.

    A convolution becomes part of its block where it is fastconv's. With ``recompute``, it computes
    its input again in the backward pass, where that is the output of another block without a
    residual and nothing else reads it.

    Args:
        graph: the graph of the blocks.
        chosen: the blocks.
        modules: those of the graph, by name.
        recompute: whether outputs of blocks are computed again.
    """
    made = Graph()
    copies: dict[Node, Node] = {}
    output = made.graph_copy(graph, copies)
    made.output(output)
    for block in chosen:
        place = copies[block.addition or block.norm]
        with made.inserting_before(place):
            norm = made.create_node("get_attr", block.name)
            conv = block.conv
            residual = None
            if block.residual is not None:
                own = copies[block.norm]
                (residual,) = (one for one in place.args if one is not own)
            rest = (residual, block.activation, block.adds_in_place)
            (input,) = copies[block.norm].args
            if conv is not None and isinstance(modules[str(conv.target)], CONVOLUTIONS):
                layer = made.create_node("get_attr", str(conv.target))
                (before,) = copies[conv].args
                named: dict[str, Any] = {}
                if recompute and _can_recompute(before):
                    named["recomputes"] = True
                one = made.call_function(conv_of_bn_act, (layer, norm, before, *rest), named)
            else:
                conv = None
                one = made.call_function(bn_act, (norm, input, *rest))
        copies[block.tip].replace_all_uses_with(one)
        for node in (*block.nodes, *filter(None, [conv])):
            made.erase_node(copies[node])
    for node in made.nodes:
        node.type = None
    return made


def _can_recompute(input: Any) -> bool:
    """Whether a convolution's input is a block without a residual that nothing else reads."""
    if not isinstance(input, Node) or input.op != "call_function" or len(input.users) != 1:
        return False
    places = {bn_act: 2, conv_of_bn_act: 3}  # of the residual
    return input.target in places and input.args[places[input.target]] is None

"""Sites: convolutions in a graph, with the nodes behind them that one kernel can compute too."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.nn import functional

from fastconv.geometry import Activation, activation_of
from fastconv.network.calls import Call, is_one_kernel
from fastconv.network.tracing import Traced, has_hooks
from fastconv.problem import ActivationName, Epilogue


@dataclass(frozen=True)
class Site:
    """A convolution in a graph, and the nodes behind it that its kernel can compute too."""

    node: Node
    norm: Node | None = None
    addition: Node | None = None
    residual: Node | None = None
    act: Node | None = None
    activation: Activation | None = None

    @property
    def tip(self) -> Node:
        """The last node, whose result is the site's."""
        return self.act or self.addition or self.norm or self.node

    @property
    def arguments(self) -> tuple[Any, dict[str, Any]]:
        """The convolution's input and, by name, what else it is called with.

        Only transposed layers take more than the input: the output's size.
        """
        input, *others = self.node.args
        return input, {**({"output_size": others[0]} if others else {}), **self.node.kwargs}

    @property
    def words(self) -> str:
        """The nodes that are fused, for a report: "BatchNorm, addition, relu"."""
        name = (
            self.activation if isinstance(self.activation, str) else (self.activation or ("",))[0]
        )
        parts = ("BatchNorm" if self.norm else "", "addition" if self.addition else "", name)
        return ", ".join(filter(None, parts))


def sites(
    graph: Traced, calls: Mapping[str, Call], written: Collection[int] = ()
) -> dict[str, Site]:
    """The sites of layers that are called once and have something behind them to be fused.

    Args:
        graph: the model.
        calls: the layers that are considered, by name, with their calls.
        written: ids of tensors that the model writes to; modules that have such parameters or
            buffers are not fused.
    """
    nodes = list(graph.module.graph.nodes)
    read = {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
    called = [node.target for node in nodes if node.op == "call_module"]
    modules = {
        name: module
        for name, module in graph.module.named_modules(remove_duplicate=False)
        if not any(id(one) in written for one in (*module.parameters(), *module.buffers()))
    }
    found: dict[str, Site] = {}
    for node in nodes:
        name = str(node.target)
        if node.op != "call_module" or name not in calls or name in read or name not in modules:
            continue
        if called.count(name) == 1 and len(node.args) > 0:
            taken = {one.addition for one in found.values()}
            site = _site(node, calls[name], graph, modules, taken)
            if site.tip is not node:
                found[name] = site
    return found


def _site(
    node: Node,
    call: Call,
    graph: Traced,
    modules: Mapping[str, nn.Module],
    taken: Collection[Node | None],
) -> Site:
    """The site of a convolution; additions in ``taken`` belong to other sites."""
    site = Site(node)
    follower = only_reader(site.tip, graph)
    if follower is not None and call.is_batched and _is_foldable(follower, call.axes, modules):
        site = replace(site, norm=follower)
        follower = only_reader(site.tip, graph)
    if follower is not None and follower not in taken:
        residual = _residual(follower, site, graph)
        if residual is not None and is_one_kernel(call, Epilogue(residual=True)):
            site = replace(site, addition=follower, residual=residual)
            follower = only_reader(site.tip, graph)
    if follower is not None:
        activation = activation_at(follower, site.tip, modules)
        epilogue = Epilogue(*activation_of(activation), site.addition is not None)
        if activation is not None and is_one_kernel(call, epilogue):
            site = replace(site, act=follower, activation=activation)
    return site


def only_reader(node: Node, graph: Traced) -> Node | None:
    """The only node that reads another's result, if its own result has that shape and type."""
    readers = list(node.users)
    if len(readers) != 1:
        return None
    mine, other = (graph.forms.get(one) for one in (node, readers[0]))
    alike = mine and other and (mine.shape, mine.dtype) == (other.shape, other.dtype)
    return readers[0] if alike else None


def _is_foldable(node: Node, axes: int, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node is a BatchNorm with constant statistics, for layers of so many axes."""
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module: Any = modules.get(str(node.target))
    return (
        type(module) is NORMS[axes]
        and not module.training
        and module.running_mean is not None
        and module.running_var is not None
        and not has_hooks(module)
    )


def _residual(node: Node, site: Site, graph: Traced) -> Node | None:
    """The other operand of an addition, if the site's kernel can add it."""
    residual = added(node, site.tip, graph)
    # The convolution moves to the place of the addition: its operands must not change before.
    return None if residual is None or writes_between(site.node, node, graph.writers) else residual


def added(node: Node, tip: Node, graph: Traced) -> Node | None:
    """The other operand, if a node adds a tensor of the same size and type to ``tip``."""
    adds = (operator.add, operator.iadd, torch.add) if node.op == "call_function" else ()
    if not (node.target in adds or (node.op == "call_method" and node.target in ("add", "add_"))):
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if node.target in IN_PLACE and first is not tip:
        return None  # it adds in place to the residual, which others may read
    residual = second if first is tip else first
    if not isinstance(residual, Node) or residual is tip:
        return None
    mine, other = (graph.forms.get(one) for one in (tip, residual))
    if not mine or not other or (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return None
    return residual


IN_PLACE = (operator.iadd, "add_")
"""Additions to the first operand in place."""


def writes_between(first: Node, last: Node, writers: Collection[Node]) -> bool:
    """Whether one of the nodes between two writes to a tensor that was there before."""
    between = first.next
    while between is not last:
        if between in writers:
            return True
        between = between.next
    return False


NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_MODULES: dict[type[nn.Module], ActivationName] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Hardswish: "hardswish",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}
_FUNCTIONS: dict[Any, ActivationName] = {
    functional.relu: "relu",
    torch.relu: "relu",
    torch.relu_: "relu",
    functional.relu6: "relu6",
    functional.leaky_relu: "leaky_relu",
    functional.leaky_relu_: "leaky_relu",
    functional.silu: "silu",
    functional.gelu: "gelu",
    functional.hardswish: "hardswish",
    functional.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    torch.sigmoid_: "sigmoid",
    functional.tanh: "tanh",
    torch.tanh: "tanh",
    torch.tanh_: "tanh",
}
_ALSO_METHODS: tuple[ActivationName, ...] = ("relu", "sigmoid", "tanh")
_METHODS = {f"{name}{mark}": name for name in _ALSO_METHODS for mark in ("", "_")}
# The forms of GELU, by the values of its argument "approximate".
_GELUS: dict[Any, ActivationName] = {"none": "gelu", "tanh": "gelu_tanh"}
# The names of an activation function's positional arguments after the input.
_ARGUMENTS = {"leaky_relu": ("negative_slope", "inplace")}


def activation_at(node: Node, source: Node, modules: Mapping[str, nn.Module]) -> Activation | None:
    """The activation that a node applies to its source, if kernels have it."""
    if not node.args or node.args[0] is not source:
        return None
    if node.op == "call_module":
        module = modules.get(str(node.target))
        name = None if module is None or has_hooks(module) else _MODULES.get(type(module))
        options = {key: getattr(module, key, None) for key in ("negative_slope", "approximate")}
        return None if name is None else _specified(name, options)
    names: Mapping[Any, ActivationName] = {
        "call_function": _FUNCTIONS,
        "call_method": _METHODS,
    }.get(node.op, {})
    name = names.get(node.target)
    if name is None:
        return None
    places = _ARGUMENTS.get(name, ("inplace",))
    options = {**dict(zip(places, node.args[1:], strict=False)), **node.kwargs}
    return _specified(name, options)


def _specified(name: ActivationName, options: Mapping[str, Any]) -> Activation | None:
    """An activation with its options as :func:`fastconv.conv2d` takes it."""
    if name == "leaky_relu":
        slope = options.get("negative_slope", 0.01)
        return ("leaky_relu", float(slope)) if isinstance(slope, int | float) else None
    if name == "gelu":
        form = options.get("approximate", "none")
        return _GELUS.get(form) if isinstance(form, str) else None
    return name

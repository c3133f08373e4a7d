"""What follows convolutions in a network for inference, found in its graph and put into them.

A BatchNorm goes into the weights, an addition and an activation into the kernel, where the graph
(``torch.fx``) shows that nothing else reads what lies between.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, Tracer
from torch.nn import Parameter, functional
from torch.utils._pytree import tree_flatten

from fastconv import preparation, tables
from fastconv.calls import Call, Form
from fastconv.functional import Activation
from fastconv.modules import PYTORCHS, Conv2d, FusedConv2d
from fastconv.preparation import tensors_of


class Untraceable(Exception):
    """A model that cannot be fused; says why."""


@dataclass(frozen=True)
class Site:
    """A convolution in a graph, and what of the nodes behind it can be computed with it."""

    node: Node
    norm: Node | None = None
    addition: Node | None = None
    residual: Node | None = None
    act: Node | None = None
    activation: Activation | None = None

    @property
    def tip(self) -> Node:
        """The node whose result is the site's."""
        return self.act or self.addition or self.norm or self.node

    @property
    def words(self) -> str:
        """What is fused, for a report."""
        name = (
            self.activation if isinstance(self.activation, str) else (self.activation or ("",))[0]
        )
        parts = ("BatchNorm" if self.norm else "", "addition" if self.addition else "", name)
        return ", ".join(filter(None, parts))


def has_hooks(module: nn.Module) -> bool:
    """Whether something of the user's runs when the module is called."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


# --- The graph ------------------------------------------------------------------------------------


class _Tracer(Tracer):
    """Leaves modules with hooks whole, so that these go on to run."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, PYTORCHS) or has_hooks(m)
        return whole or super().is_leaf_module(m, module_qualified_name)

    def create_arg(self, a: Any) -> Any:
        """OrderedDicts, in which segmentation models return results, stay what they are."""
        if type(a) is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, (dict(a),), {}).node
        return super().create_arg(a)


@dataclass(frozen=True)
class Traced:
    """A model as a graph, and the form of each node's result."""

    module: GraphModule
    forms: Mapping[Node, Form]


def traced(model: nn.Module, example: Any, named: Any) -> Traced:
    """The model's graph for such arguments; the modules in it are the model's own.

    Raises:
        Untraceable: there is none.
    """
    if has_hooks(model):
        raise Untraceable("the model has hooks")
    try:
        given = inspect.signature(model.forward).bind(*example, **named)
        given.apply_defaults()
        # What is no tensor decides branches: it has to stay what it is.
        fixed = {name: value for name, value in given.arguments.items() if not tensors_of(value)}
        with preparation.unchanged_attributes(model):
            graph = _Tracer().trace(model, fixed)
        _name_placeholders(graph, list(given.signature.parameters))
        module = GraphModule(model, graph, type(model).__name__)
        values = list(given.arguments.values())
        interpreter = _Forms(module)
        preparation.call_without_data(interpreter.run, values, {}, watch=nullcontext())
    except Exception as error:
        raise Untraceable(f"torch.fx cannot trace the model: {tables.error_line(error)}") from error
    return Traced(module, interpreter.forms)


def _name_placeholders(graph: Graph, names: Sequence[str]) -> None:
    """Has arguments be called as the model's own, of which torch.fx renames those that are fixed.

    Annotations that are strings are dropped: no graph that has them can be pickled.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if any(str(node.target).startswith("*") for node in placeholders):
        raise Untraceable("it takes any number of arguments")
    for node, name in zip(placeholders, names, strict=True):
        node.target = name
    for node in graph.nodes:
        if isinstance(node.type, str):
            node.type = None


class _Forms(Interpreter):
    """Notes the form of every tensor that a node results in."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.forms: dict[Node, Form] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor):
            self.forms[n] = Form.of(result)
        return result


# --- What can be fused ----------------------------------------------------------------------------


def sites(graph: Traced, names: Collection[str]) -> dict[str, Site]:
    """Of the layers by these names, those that something can be fused with, called once each."""
    nodes = list(graph.module.graph.nodes)
    read = {str(node.target).rpartition(".")[0] for node in nodes if node.op == "get_attr"}
    called = [node.target for node in nodes if node.op == "call_module"]
    found: dict[str, Site] = {}
    for node in nodes:
        name = str(node.target)
        if node.op != "call_module" or name not in names or name in read:
            continue
        if called.count(name) == 1 and len(node.args) == 1 and not node.kwargs:
            site = _site(node, graph, {one.addition for one in found.values()})
            if site.tip is not node:
                found[name] = site
    return found


def _site(node: Node, graph: Traced, taken: Collection[Node | None]) -> Site:
    """What can be fused; an addition that is taken is another convolution's."""
    site, modules = Site(node), dict(graph.module.named_modules())
    follower = _only_reader(site.tip, graph)
    if follower is not None and _is_foldable(follower, modules):
        site = replace(site, norm=follower)
        follower = _only_reader(site.tip, graph)
    if follower is not None and follower not in taken:
        residual = _residual(follower, site, graph, modules)
        if residual is not None:
            site = replace(site, addition=follower, residual=residual)
            follower = _only_reader(site.tip, graph)
    if follower is not None:
        activation = _activation(follower, site.tip, modules)
        if activation is not None:
            site = replace(site, act=follower, activation=activation)
    return site


def _only_reader(node: Node, graph: Traced) -> Node | None:
    """The node that alone reads another's result, if its own has the same form and type."""
    readers = list(node.users)
    if len(readers) != 1:
        return None
    mine, other = (graph.forms.get(one) for one in (node, readers[0]))
    alike = mine and other and (mine.shape, mine.dtype) == (other.shape, other.dtype)
    return readers[0] if alike else None


def _is_foldable(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
        return False
    module = modules[str(node.target)]
    return (
        type(module) is nn.BatchNorm2d
        and not module.training
        and module.running_mean is not None
        and module.running_var is not None
        and not has_hooks(module)
    )


def _residual(
    node: Node, site: Site, graph: Traced, modules: Mapping[str, nn.Module]
) -> Node | None:
    """The other operand, if the node adds one of the same form that the kernel may read then."""
    adds = (operator.add, operator.iadd, torch.add) if node.op == "call_function" else ()
    if not (node.target in adds or (node.op == "call_method" and node.target in ("add", "add_"))):
        return None
    if len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    if node.target in (operator.iadd, "add_") and first is not site.tip:
        return None  # others may read the residual, into which it is added
    residual = second if first is site.tip else first
    if not isinstance(residual, Node) or residual is site.tip:
        return None
    mine, other = (graph.forms.get(one) for one in (site.tip, residual))
    if not mine or not other or (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return None
    # The convolution moves to where the addition is: what it reads must not change before.
    between = site.node.next
    while between is not node:
        if between is not site.norm and _may_write(between, modules):
            return None
        between = between.next
    return residual


_WRITERS = {
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift, operator.setitem,
}  # fmt: skip


def _may_write(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node may change a tensor that is there already."""
    if node.op == "call_module":
        module = modules[str(node.target)]
        own = type(module) is Conv2d or type(module).__module__.startswith("torch.nn")
        known = own and not has_hooks(module)
        return not known or any(getattr(one, "inplace", False) for one in module.modules())
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
    return (
        node.target in _WRITERS
        or (name.endswith("_") and not name.endswith("__"))
        or "out" in node.kwargs
        or any(value is True for value in (*node.args, *node.kwargs.values()))  # inplace
    )


_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.LeakyReLU: "leaky_relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.Hardswish: "hardswish",
    nn.Sigmoid: "sigmoid",
    nn.Tanh: "tanh",
}
_FUNCTIONS: dict[Any, str] = {
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
_METHODS = {f"{name}{mark}": name for name in ("relu", "sigmoid", "tanh") for mark in ("", "_")}
# What an activation takes beside its input, by place.
_ARGUMENTS = {"leaky_relu": ("negative_slope", "inplace")}


def _activation(node: Node, source: Node, modules: Mapping[str, nn.Module]) -> Activation | None:
    """What the node applies to its source, if it is an activation that kernels have."""
    if not node.args or node.args[0] is not source:
        return None
    if node.op == "call_module":
        module = modules[str(node.target)]
        name = None if has_hooks(module) else _MODULES.get(type(module))
        options = {key: getattr(module, key, None) for key in ("negative_slope", "approximate")}
        return name and _specified(name, options)
    names: Mapping[Any, str] = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(
        node.op, {}
    )
    name = names.get(node.target)
    if name is None:
        return None
    places = _ARGUMENTS.get(name, ("inplace",))
    options = {**dict(zip(places, node.args[1:], strict=False)), **node.kwargs}
    return _specified(name, options)


def _specified(name: str, options: Mapping[str, Any]) -> Activation | None:
    if name == "leaky_relu":
        slope = options.get("negative_slope", 0.01)
        return (name, float(slope)) if isinstance(slope, int | float) else None
    if name == "gelu":
        form = options.get("approximate", "none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(form) if isinstance(form, str) else None
    return name


# --- Fusing ---------------------------------------------------------------------------------------


def with_followers(call: Call, site: Site, graph: Traced) -> Call:
    """The call of a site's layer, with what is computed by the same kernel."""
    bias = call.bias
    if bias is None and site.norm is not None:
        bias = Form(call.weight.shape[:1], (1,), call.weight.dtype)
    residual = None if site.residual is None else graph.forms[site.residual]
    return replace(call, bias=bias, activation=site.activation, residual=residual)


def fuse(graph: Traced, found: Mapping[str, Site], ours: Collection[str]) -> GraphModule:
    """The graph with BatchNorms in weights; and of our layers, with what follows in the kernel."""
    module = graph.module
    for name, site in found.items():
        if name in ours:
            layer = _folded(module, site)
            if site.act is None and site.addition is None:
                layer.__class__ = Conv2d
            else:
                layer.__class__ = FusedConv2d
                layer.activation = site.activation
            module.add_submodule(name, layer)
            _put_together(module.graph, site)
        elif site.norm is not None:
            module.add_submodule(name, _folded(module, site))
            site.norm.replace_all_uses_with(site.node)
            module.graph.erase_node(site.norm)
    module.delete_all_unused_submodules()
    for one in module.modules():
        if type(one) is nn.Module:  # made by torch.fx, to hold others
            one.training = False
    module.graph.lint()
    module.recompile()
    return module


def _put_together(graph: Graph, site: Site) -> None:
    place, operands = site.addition or site.node, site.node.args
    if site.addition is not None:
        # Not site.residual: what was fused meanwhile has another node.
        own = site.norm or site.node
        operands += tuple(one for one in site.addition.args if one is not own)
    with graph.inserting_before(place):
        one = graph.call_module(str(site.node.target), operands)
    site.tip.replace_all_uses_with(one)
    for node in (site.act, site.addition, site.norm, site.node):
        if node is not None:
            graph.erase_node(node)


def _folded(module: GraphModule, site: Site) -> Any:
    """Another layer with the site's geometry, and with its BatchNorm in the weights."""
    layer: Any = module.get_submodule(str(site.node.target))
    made = copy.deepcopy(layer, {id(tensor): tensor for tensor in layer.parameters()})
    if site.norm is None:
        return made
    norm: Any = module.get_submodule(str(site.norm.target))
    weight, bias = layer.weight, layer.bias
    with torch.inference_mode(False), torch.no_grad():
        wide = torch.promote_types(weight.dtype, torch.float32)
        scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight
        shift = -norm.running_mean.to(wide) if bias is None else bias.to(wide) - norm.running_mean
        shift = shift * scale
        if norm.bias is not None:
            shift = shift + norm.bias
        folded = {"weight": weight.to(wide) * scale[:, None, None, None], "bias": shift}
        for name, tensor in folded.items():
            setattr(made, name, Parameter(tensor.to(weight.dtype), weight.requires_grad))
    return made


def disagreement(expected: Any, found: Any, most: float) -> str | None:
    """How two results of a model differ by more than ``most`` of their norm; None if not."""
    (ours, our_tree), (theirs, their_tree) = tree_flatten(found), tree_flatten(expected)
    if our_tree != their_tree:
        return "its graph results in other things than the model"
    for other, mine in zip(theirs, ours, strict=True):
        if not isinstance(other, Tensor):
            continue
        if (mine.shape, mine.dtype) != (other.shape, other.dtype):
            return (
                f"its graph results in {list(mine.shape)}, {mine.dtype} instead of "
                f"{list(other.shape)}, {other.dtype}"
            )
        if other.is_floating_point():
            error = (mine.double() - other.double()).norm() / other.double().norm()
            if error > most:
                return f"its graph's results are {float(error):.1%} off those of the model"
    return None

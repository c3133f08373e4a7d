"""What follows convolutions in a network for inference, found in its graph and put into them.

A BatchNorm goes into the weights, an addition and an activation into the kernel, where the graph
(``torch.fx``) shows that nothing else reads what lies between.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.modules.module as _hooks
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, Tracer
from torch.nn import Parameter, functional
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from fastconv import _frozen, _precision, tables
from fastconv.functional import Activation
from fastconv.modules import PYTORCHS, Conv2d, FusedConv2d
from fastconv.network import preparation
from fastconv.network.agreement import Rounding
from fastconv.network.calls import Call, Form
from fastconv.network.preparation import tensors_of
from fastconv.network.state import State

_Value = TypeVar("_Value")

FOLDED = "_fastconv_folded"  # marks layers that compute what followed another layer as well


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
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


# --- The graph ------------------------------------------------------------------------------------


class _Tracer(Tracer):
    """Leaves modules with hooks whole, so that these go on to run.

    A graph has no ``with``: what a block sets holds while the model is traced, and not when the
    graph is called. So settings that are not those around the model are noted.
    """

    # Called without arguments, too: to unpickle a graph, its tracer's class is called so.
    def __init__(self, devices: Collection[str] = ()) -> None:
        super().__init__()
        self._devices = devices
        self._around = _settings(devices)
        self.lost: str | None = None  # what the model sets for a part of it

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        whole = isinstance(m, PYTORCHS) or has_hooks(m)
        return whole or super().is_leaf_module(m, module_qualified_name)

    def create_arg(self, a: Any) -> Any:
        """OrderedDicts, in which segmentation models return results, stay what they are."""
        if type(a) is OrderedDict:
            return self.create_proxy("call_function", OrderedDict, (dict(a),), {}).node
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> Node:
        node = super().create_node(*args, **kwargs)
        now = _settings(self._devices)
        changed = (name for name, value in self._around.items() if now[name] != value)
        self.lost = self.lost or next(changed, None)
        return node


def _settings(devices: Collection[str]) -> dict[str, object]:
    """What a ``with`` block may set that results or their types depend on, by its name."""
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return {
        "autocast": [
            (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
            for device in sorted({"cpu", "cuda", *devices})
        ],
        "whether gradients are recorded": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "fastconv.precision": _precision.override(),
        "fastconv.frozen_weights": _frozen.active(),
        "torch.backends.cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "the precision of convolutions": _precision.pytorch_setting(),
        "the precision of products": _precision_of_products(),
        "torch.backends.mkldnn": mkldnn.enabled,
        "the kernels of attention": (
            cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the default type": torch.get_default_dtype(),
        "a mode of functions": list(map(id, torch.overrides._get_current_function_mode_stack())),
        "a mode of operators": list(map(id, _get_current_dispatch_mode_stack())),
        "a transform of torch.func": torch._C._functorch.maybe_current_level(),
        "a CUDA stream": _stream(),
    }  # fmt: skip


def _precision_of_products() -> object:
    matmul: Any = torch.backends.cuda.matmul
    reduced = matmul.allow_fp16_reduced_precision_reduction
    return (
        matmul.allow_bf16_reduced_precision_reduction,
        reduced,
        getattr(matmul, "fp32_precision", None),
    )


def _stream() -> object:
    if not torch.cuda.is_initialized():
        return None
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


@dataclass(frozen=True)
class Traced:
    """A model as a graph, and what its nodes do."""

    module: GraphModule
    forms: Mapping[Node, Form]  # of results
    writers: Collection[Node]  # that change tensors which were there before


def traced(model: nn.Module, example: Any, named: Any, before: State) -> Traced:
    """The model's graph for such arguments; the modules in it are the model's own.

    What tracing changes of the model, into which it puts what is no tensor, is put back.

    Raises:
        Untraceable: there is none.
    """
    if has_hooks(model):
        raise Untraceable("the model has hooks, or a forward of its own beside its class's")
    if _hooks._global_forward_hooks or _hooks._global_forward_pre_hooks:
        raise Untraceable("there are hooks of all modules")
    try:
        given = inspect.signature(model.forward).bind(*example, **named)
        given.apply_defaults()
        # What is no tensor decides branches: it has to stay what it is.
        fixed = {name: value for name, value in given.arguments.items() if not tensors_of(value)}
        tracer = _Tracer({one.device.type for one in tensors_of((example, named))})
        try:
            graph = tracer.trace(model, fixed)
            _name_placeholders(graph, list(given.signature.parameters))
            # The tracer makes constants attributes of the model: the graph takes them from there
            # before they are removed again.
            module = GraphModule(model, graph, type(model).__name__)
        finally:
            before.put_back()
        values = list(given.arguments.values())
        watch = _Watch()
        interpreter = _Forms(module, watch)
        preparation.call_without_data(interpreter.run, values, {}, watch=watch)
    except Exception as error:
        raise Untraceable(f"torch.fx cannot trace the model: {tables.error_line(error)}") from error
    if tracer.lost is not None:
        raise Untraceable(f"the model sets {tracer.lost} itself, which torch.fx would lose")
    return Traced(module, interpreter.forms, interpreter.writers)


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
    """Notes the form of every tensor that a node results in, and which nodes write."""

    def __init__(self, module: GraphModule, watch: _Watch) -> None:
        super().__init__(module)
        self._watch = watch
        self.forms: dict[Node, Form] = {}
        self.writers: set[Node] = set()

    def run_node(self, n: Node) -> Any:
        self._watch.begin()
        result = super().run_node(n)
        if self._watch.written:
            self.writers.add(n)
        if isinstance(result, Tensor):
            self.forms[n] = Form.of(result)
        return result


class _Watch(TorchDispatchMode):
    """Notes which tensors operators write to, by what their schemas say of their arguments.

    To a tensor that was made since it began, whoever made it may write. To tell these, all that
    are met are kept, so that none has the address of another; of tensors with data, which take
    memory, ``keep=False`` keeps none and tells of all writing.
    """

    def __init__(self, keep: bool = True) -> None:
        super().__init__()
        self._kept: list[Any] | None = [] if keep else None
        self.begin()

    def begin(self) -> None:
        self._made: set[int] = set()
        self.written: set[int] = set()  # addresses of storages; 0: not known of which

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = getattr(function, "_schema", None)
        if schema is None:  # a higher-order operator, of which it is not known what it writes
            self.written.add(0)
            return function(*args, **kwargs)
        given = set(self._storages((args, kwargs)))
        named = dict(zip((one.name for one in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.update(set(self._storages(named.get(argument.name))) - self._made)
        result = function(*args, **kwargs)
        if self._kept is not None:
            self._made.update(set(self._storages(result)) - given - {0})
        return result

    def _storages(self, values: Any) -> Iterator[int]:
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                yield self._storage(leaf)

    def _storage(self, tensor: Tensor) -> int:
        with suppress(NotImplementedError, RuntimeError):  # it has none, or several
            storage = tensor.untyped_storage()
            if self._kept is not None:
                self._kept.append(storage)
            return storage._cdata
        return 0


def written(model: nn.Module, run: Callable[[], object], before: State) -> set[int]:
    """The ids of a model's parameters and buffers that it writes to, or has others for.

    ``run`` calls it; what comes of that is not to be compared with anything, for some of PyTorch's
    functions take other ways while somebody watches.
    """
    before.put_back()
    tensors = [*model.parameters(), *model.buffers()]
    watch = _Watch(keep=False)
    with watch:
        run()
    # Some operators write to statistics without saying so.
    by_value = before.changed()
    before_run = {id(tensor) for tensor in tensors}
    there = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    by_schema = {id(one) for one in tensors if watch._storage(one) in watch.written - {0}}
    before.put_back()  # the model has those again that are told of
    return by_value | by_schema | (before_run - there)


# --- What can be fused ----------------------------------------------------------------------------


def sites(graph: Traced, names: Collection[str], written: Collection[int] = ()) -> dict[str, Site]:
    """Of the layers by these names, those that something can be fused with, called once each.

    ``written`` are the ids of tensors to which the model writes: what has such parameters or
    buffers is not fused.
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
        if node.op != "call_module" or name not in names or name in read or name not in modules:
            continue
        if called.count(name) == 1 and len(node.args) == 1 and not node.kwargs:
            site = _site(node, graph, modules, {one.addition for one in found.values()})
            if site.tip is not node:
                found[name] = site
    return found


def _site(
    node: Node,
    graph: Traced,
    modules: Mapping[str, nn.Module],
    taken: Collection[Node | None],
) -> Site:
    """What can be fused; an addition that is taken is another convolution's."""
    site = Site(node)
    follower = _only_reader(site.tip, graph)
    if follower is not None and _is_foldable(follower, modules):
        site = replace(site, norm=follower)
        follower = _only_reader(site.tip, graph)
    if follower is not None and follower not in taken:
        residual = _residual(follower, site, graph)
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
    module = modules.get(str(node.target))
    return (
        type(module) is nn.BatchNorm2d
        and not module.training
        and module.running_mean is not None
        and module.running_var is not None
        and not has_hooks(module)
    )


def _residual(node: Node, site: Site, graph: Traced) -> Node | None:
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
        if between in graph.writers:
            return None
        between = between.next
    return residual


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
        module = modules.get(str(node.target))
        name = None if module is None or has_hooks(module) else _MODULES.get(type(module))
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


@dataclass(frozen=True)
class Fused:
    """A graph in which sites have become one node each."""

    module: GraphModule
    compared: Mapping[str, _Compared]  # what stands there, by the layer's name

    def disagreement(self, run: Callable[[nn.Module], _Value]) -> tuple[_Value, str | None]:
        """Calls the graph with the parts that sites are made of, as the model has them.

        At each site, what is to be there is called as well, with the same input.

        Returns:
            What the graph results in, and how a site differs from its parts by more than rounding.
        """
        result = run(self.module)
        said = {name: one.said for name, one in self.compared.items() if one.said is not None}
        if not said:
            return result, None
        name = next(iter(said))
        return result, f"{name} with {self.compared[name].words} gives {said[name]}"

    def finished(self) -> GraphModule:
        """The graph with sites as they are to be."""
        for name, one in self.compared.items():
            self.module.add_submodule(name, one.layer)
        self.module.delete_all_unused_submodules()
        for module in self.module.modules():
            if type(module) is nn.Module:  # made by torch.fx, to hold others
                module.training = False
        self.module.graph.lint()
        self.module.recompile()
        return self.module


class _Compared(nn.Module):
    """A site's parts, whose result it has; and what is to stand there, compared with them."""

    def __init__(self, parts: nn.Module, layer: Any, rounding: Rounding, words: str) -> None:
        super().__init__()
        self.parts, self.layer, self.rounding, self.words = parts, layer, rounding, words
        self.said: str | None = None

    def forward(self, input: Tensor, *residual: Tensor) -> Tensor:
        found = self.layer(input, *residual)
        expected: Tensor = self.parts(input, *residual)
        self.said = self.rounding.disagreement(expected, found, input, *(residual or (None,)))
        return expected


def fuse(
    graph: Traced, found: Mapping[str, Site], ours: Collection[str], calls: Mapping[str, Call]
) -> Fused:
    """The graph with BatchNorms in weights; and of our layers, with what follows in the kernel.

    ``calls`` are those of the sites' layers.
    """
    module = graph.module
    compared: dict[str, _Compared] = {}
    for name, site in found.items():
        if name not in ours:
            site = replace(site, addition=None, residual=None, act=None, activation=None)
            if site.norm is None:
                continue
        parts = GraphModule(module, _parts(site), type(module).__name__)
        layer, shift = _folded(module, site)
        vars(layer)[FOLDED] = True
        if name in ours:
            layer.__class__ = Conv2d
            if site.act is not None or site.addition is not None:
                layer.__class__ = FusedConv2d
                layer.activation = site.activation
        slope = site.activation[1] if isinstance(site.activation, tuple) else 1.0
        rounding = Rounding(layer, shift, calls[name].dtype, slope)
        compared[name] = _Compared(parts, layer, rounding, site.words)
        module.add_submodule(name, compared[name])
        _put_together(module.graph, site)
    module.graph.lint()
    module.recompile()
    return Fused(module, compared)


def _parts(site: Site) -> Graph:
    """The nodes of a site by themselves, as a function of its input and its residual."""
    graph = Graph()
    input = graph.placeholder("input")
    residual = None if site.residual is None else graph.placeholder("residual")
    last = graph.node_copy(site.node, lambda _: input)
    copies = {site.node: last}
    for node in (site.norm, site.addition, site.act):
        if node is not None:
            last = copies[node] = graph.node_copy(node, lambda one: copies.get(one, residual))
    graph.output(last)
    return graph


def _put_together(graph: Graph, site: Site) -> None:
    place, operands = site.addition or site.node, site.node.args
    if site.addition is not None:
        # site.residual may be gone: what was fused since then has another node.
        own = site.norm or site.node
        operands += tuple(one for one in site.addition.args if one is not own)
    with graph.inserting_before(place):
        one = graph.call_module(str(site.node.target), operands)
    site.tip.replace_all_uses_with(one)
    for node in (site.act, site.addition, site.norm, site.node):
        if node is not None:
            graph.erase_node(node)


def _folded(module: GraphModule, site: Site) -> tuple[Any, Tensor | None]:
    """Another layer with the site's geometry, and with its BatchNorm in the weights.

    Returns:
        The layer; and for each channel the magnitudes of what is added to the sums, in all.
    """
    layer: Any = module.get_submodule(str(site.node.target))
    made = copy.deepcopy(layer, {id(tensor): tensor for tensor in layer.parameters()})
    weight, bias = layer.weight, layer.bias
    if site.norm is None:
        return made, None if bias is None else bias.detach().abs()
    norm: Any = module.get_submodule(str(site.norm.target))
    with torch.inference_mode(False), torch.no_grad():
        wide = torch.promote_types(weight.dtype, torch.float32)
        scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
        if norm.weight is not None:
            scale = scale * norm.weight
        shift = -norm.running_mean.to(wide) if bias is None else bias.to(wide) - norm.running_mean
        shift = shift * scale
        added = (norm.running_mean * scale).abs()
        if bias is not None:
            added = added + (bias * scale).abs()
        if norm.bias is not None:
            shift = shift + norm.bias
            added = added + norm.bias.abs()
        folded = {"weight": weight.to(wide) * scale[:, None, None, None], "bias": shift}
        for name, tensor in folded.items():
            setattr(made, name, Parameter(tensor.to(weight.dtype), weight.requires_grad))
    return made, added

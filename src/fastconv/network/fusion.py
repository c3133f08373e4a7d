"""Fusion for inference: what follows a convolution becomes part of it.

A BatchNorm is folded into the weights, an addition and an activation become the kernel's epilogue.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import Parameter

from fastconv.fused import FUSED
from fastconv.network.agreement import Rounding
from fastconv.network.calls import Call, Form
from fastconv.network.exchange import known_kind
from fastconv.network.sites import Site
from fastconv.network.tracing import Traced

_Value = TypeVar("_Value")

FOLDED = "_fastconv_folded"
"""The attribute that marks layers which also compute what followed another layer."""


def with_followers(call: Call, site: Site, graph: Traced) -> Call:
    """The call of a site's layer, with the nodes that its kernel computes too."""
    bias = call.bias
    if bias is None and site.norm is not None:
        bias = Form((call.out_channels,), (1,), call.weight.dtype)
    residual = None if site.residual is None else graph.forms[site.residual]
    return replace(call, bias=bias, activation=site.activation, residual=residual)


@dataclass(frozen=True)
class Fused:
    """A graph in which each site has become one node, which is compared with its parts at first."""

    module: GraphModule
    compared: Mapping[str, _Compared]  # the modules of these nodes, by the layer's name

    def disagreement(self, run: Callable[[nn.Module], _Value]) -> tuple[_Value, str | None]:
        """Runs the graph with the original parts of each site, and compares these with fused ones.

        At each site, the fused layer is called with the same input as the parts.

        Args:
            run: calls a model; gives its result.

        Returns:
            The graph's result, and how a site differs from its parts if by more than rounding.
        """
        result = run(self.module)
        said = {name: one.said for name, one in self.compared.items() if one.said is not None}
        if not said:
            return result, None
        name = next(iter(said))
        return result, f"{name} with {self.compared[name].words} gives {said[name]}"

    def finished(self) -> GraphModule:
        """The graph with the fused layers alone."""
        for name, one in self.compared.items():
            self.module.add_submodule(name, one.layer)
        self.module.delete_all_unused_submodules()
        for module in self.module.modules():
            if type(module) is nn.Module:  # torch.fx makes these to hold submodules
                module.training = False
        self.module.graph.lint()
        self.module.recompile()
        return self.module


class _Compared(nn.Module):
    """Gives the result of a site's parts, and compares that of the fused layer with it."""

    def __init__(self, parts: nn.Module, layer: Any, rounding: Rounding, words: str) -> None:
        super().__init__()
        self.parts, self.layer, self.rounding, self.words = parts, layer, rounding, words
        self.said: str | None = None

    def forward(self, input: Tensor, **named: Any) -> Tensor:
        found = self.layer(input, **named)
        expected: Tensor = self.parts(input, **named)
        self.said = self.rounding.disagreement(expected, found, input, named.get("residual"))
        return expected


def fuse(
    graph: Traced, found: Mapping[str, Site], ours: Collection[str], calls: Mapping[str, Call]
) -> Fused:
    """Fuses a graph's sites.

    BatchNorms are folded into the weights of all of them. Additions and activations become part of
    those layers that are to be fastconv's.

    Args:
        graph: the model; it is changed.
        found: sites by the names of their layers.
        ours: names of layers that are to be fastconv's.
        calls: the calls of the sites' layers.
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
            layer.__class__ = known_kind(layer).ours
            if site.act is not None or site.addition is not None:
                layer.__class__ = FUSED[type(layer)]
                layer.activation = site.activation
                layer.takes_residual = site.addition is not None
        slope = site.activation[1] if isinstance(site.activation, tuple) else 1.0
        call = calls[name]
        rounding = Rounding(layer, shift, call.dtype, slope, call.output_padding)
        compared[name] = _Compared(parts, layer, rounding, site.words)
        module.add_submodule(name, compared[name])
        _replace_nodes(module.graph, site)
    module.graph.lint()
    module.recompile()
    return Fused(module, compared)


def _parts(site: Site) -> Graph:
    """The nodes of a site as a graph of its input, its output size and its residual."""
    graph = Graph()
    input = graph.placeholder("input")
    named: dict[str, Any] = {name: graph.placeholder(name) for name in site.arguments[1]}
    residual = None if site.residual is None else graph.placeholder("residual")
    last = graph.call_module(str(site.node.target), (input,), named)
    copies = {site.node: last}
    for node in (site.norm, site.addition, site.act):
        if node is not None:
            last = copies[node] = graph.node_copy(node, lambda one: copies.get(one, residual))
    graph.output(last)
    return graph


def _replace_nodes(graph: Graph, site: Site) -> None:
    """Puts one node in place of all nodes of a site."""
    place = site.addition or site.node
    input, named = site.arguments
    if site.addition is not None:
        # site.residual may have been replaced, by the fusion of another site.
        own = site.norm or site.node
        (named["residual"],) = (one for one in site.addition.args if one is not own)
    with graph.inserting_before(place):
        one = graph.call_module(str(site.node.target), (input,), named)
    site.tip.replace_all_uses_with(one)
    for node in (site.act, site.addition, site.norm, site.node):
        if node is not None:
            graph.erase_node(node)


def _folded(module: GraphModule, site: Site) -> tuple[Any, Tensor | None]:
    """A copy of the site's layer with the BatchNorm folded into its weights.

    Returns:
        The layer; and for each channel the magnitudes of all that is added to its sums.
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
        folded = {"weight": _scaled(weight.to(wide), scale, layer), "bias": shift}
        for name, tensor in folded.items():
            setattr(made, name, Parameter(tensor.to(weight.dtype), weight.requires_grad))
    return made, added


def _scaled(weight: Tensor, scale: Tensor, layer: Any) -> Tensor:
    """A layer's weight with each output channel multiplied by its scale."""
    taps = (1,) * len(layer.kernel_size)
    if not layer.transposed:
        return weight * scale.view(-1, 1, *taps)
    # A transposed layer's weight has the channels of all groups' inputs, and of one group's output.
    groups = weight.unflatten(0, (layer.groups, -1))
    return (groups * scale.view(layer.groups, 1, -1, *taps)).flatten(0, 1)

"""Regions: the modules of a model whose ``forward`` runs fused blocks in training.

A region is the innermost module whose ``forward`` calls, itself or by modules in it, all that is in
a block. Its graph has these calls, and those of other modules as they are. So what one region does
not understand (a branch on a value, a checkpoint) leaves the others as they are, and each module
outside of blocks runs its own code, with its hooks.
"""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from fastconv.network.blocks import Block, blocks, fused_graph, is_norm
from fastconv.network.calls import Form
from fastconv.network.dry_run import tensors_of
from fastconv.network.forward_code import Unwatchable
from fastconv.network.reachable import ATOMS
from fastconv.network.snapshot import Snapshot
from fastconv.network.tracing import Traced, Untraceable, traced_part
from fastconv.network.training_graph import (
    TrainingGraph,
    Watched,
    attach,
    detach,
    has_blocks,
    reason_to_leave,
    watched_modules,
)


@dataclass(frozen=True)
class _Argument:
    """A tensor that a module was called with, without its data."""

    form: Form
    device: torch.device

    def fake(self) -> Tensor:
        form = self.form
        return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=self.device)


Given = tuple[tuple[Any, ...], dict[str, Any]]
"""What a module was called with, with an ``_Argument`` for each tensor."""


@contextmanager
def watched_arguments(model: nn.Module, seen: dict[str, Given]) -> Iterator[None]:
    """Records what modules with BatchNorms in them are first called with, by name."""

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name not in seen:
            seen[name] = tree_map_only(
                Tensor, lambda one: _Argument(Form.of(one), one.device), (args, kwargs)
            )

    handles = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in model.named_modules()
        if any(map(is_norm, module.modules())) and not is_norm(module)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class Region:
    """A module that is to run a graph with blocks in training."""

    name: str
    module: nn.Module
    graph: Traced
    blocks: Mapping[str, Block]  # by the names of their BatchNorms in the model
    arguments: tuple[tuple[int | str, bool, Any], ...]
    defaults: dict[str, Any]
    inlined: tuple[str, ...]  # modules in it whose forward is part of the graph
    watched: tuple[Watched, ...]

    def full_name(self, node: Node) -> str:
        """The name that the model has for a module that the graph calls."""
        return f"{self.name}.{node.target}" if self.name else str(node.target)

    def training_graph(self, chosen: Collection[str], recompute: bool = False) -> TrainingGraph:
        """The graph that computes the blocks of these BatchNorms by fastconv.

        With ``recompute``, outputs of blocks that only convolutions of blocks read are not kept for
        the backward pass.
        """
        found = [block for name, block in self.blocks.items() if name in chosen]
        modules = dict(self.graph.module.named_modules(remove_duplicate=False))
        graph = fused_graph(self.graph.module.graph, found, modules, recompute)
        for node in graph.nodes:
            if node.op == "placeholder":
                node.args = ()  # all arguments are given
        parts: dict[str, tuple[nn.Module, tuple[str, ...]]] = {}
        for block in found:
            for node in (block.norm, block.act, block.conv):
                if node is not None and node.op == "call_module":
                    part = modules[str(node.target)]
                    options = ("negative_slope", "approximate") if node is block.act else ()
                    present = tuple(one for one in options if hasattr(part, one))
                    parts[str(node.target)] = part, present
        watched = [Watched.of_part(path, *part) for path, part in parts.items()]
        return TrainingGraph.of(graph, self.arguments, self.defaults, [*self.watched, *watched])


def regions(model: nn.Module, given: Mapping[str, Given], left: dict[str, str]) -> list[Region]:
    """The regions of a model.

    Args:
        model: the model, in training mode.
        given: what its modules are called with, by name.
        left: is given reasons for modules whose blocks cannot be fused, by name.
    """
    found: list[Region] = []
    inlined: set[str] = set()
    for name, module in model.named_modules():
        if name not in given or name in inlined or not module.training:
            continue
        try:
            region = _region(name, module, given[name])
        except Untraceable as error:
            left[name or "the model"] = str(error)
            continue
        if region is not None:
            found.append(region)
            prefix = f"{name}." if name else ""
            inlined.update(prefix + one for one in region.inlined)
    return found


def _region(name: str, module: nn.Module, given: Given) -> Region | None:
    """The region of a module; None if no block is the module's own.

    Raises:
        Untraceable: the module has no graph that computes the same in each call.
    """
    try:
        whole = _traced(module, given, None)
    except Untraceable:
        # What its modules call may be untraceable, and its own calls not.
        whole = _traced(module, given, ())
    own = [block for block in blocks(whole) if _meets(block.owners())]
    if not own:
        return None
    reason = reason_to_leave(module)
    if reason is not None:
        raise Untraceable(reason)
    inlined = {part for block in own for owner in block.owners() for part in _upwards(owner)}
    graph = _traced(module, given, inlined)
    prefix = f"{name}." if name else ""
    found = {prefix + block.name: block for block in blocks(graph)}
    if not found:
        return None
    modules = dict(module.named_modules())
    if any(part not in modules or has_blocks(modules[part]) for part in inlined):
        raise Untraceable("a module in it belongs to several")
    called = {str(node.target) for node in graph.module.graph.nodes if node.op == "call_module"}
    try:
        watched = watched_modules(module, inlined, called)
    except Unwatchable as error:
        raise Untraceable(str(error)) from error
    return Region(name, module, graph, found, *_arguments(module, given), tuple(inlined), watched)


def _meets(owners: Collection[str]) -> bool:
    """Whether modules have nothing in common but the outermost one."""
    return "" in owners or len({owner.partition(".")[0] for owner in owners}) > 1


def _upwards(path: str) -> Iterator[str]:
    """A module's name and those of the modules that it is in, but the outermost one."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _arguments(module: nn.Module, given: Given) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call, and the values of those that were not given.

    Raises:
        Untraceable: an argument cannot be compared with those of other calls.
    """
    args, kwargs = given
    both: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for at, value in both:
        if not isinstance(value, _Argument) and type(value) not in ATOMS:
            raise Untraceable(f"its argument {at} is a {type(value).__name__}")
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    there = set(bound.arguments)
    bound.apply_defaults()
    defaults = {name: value for name, value in bound.arguments.items() if name not in there}
    arguments = tuple(
        (at, isinstance(value, _Argument), None if isinstance(value, _Argument) else value)
        for at, value in both
    )
    return arguments, defaults


def _traced(module: nn.Module, given: Given, inlined: Collection[str] | None) -> Traced:
    _arguments(module, given)
    generators = _generators()
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = tree_map_only(_Argument, _Argument.fake, given)
    if not tensors_of((args, kwargs)):
        raise Untraceable("it takes no tensors")
    with _given_momentum(module), _NoValues():
        before = Snapshot()
        before.record({"model": module})
        graph = traced_part(module, args, kwargs, before, inlined, in_place=True)
    if _generators() != generators:
        raise Untraceable("it takes random numbers, of which a graph has constants")
    for node in graph.module.graph.nodes:
        if node.op == "get_attr" and not _is_state(module, str(node.target)):
            raise Untraceable("it makes tensors that depend on no argument")
    return graph


@contextmanager
def _given_momentum(module: nn.Module) -> Iterator[None]:
    """Gives BatchNorms a momentum that have None.

    Without one they look at the number of batches, which a call with fake tensors cannot.
    """
    norms: list[Any] = [one for one in module.modules() if is_norm(one)]
    changed = [one for one in norms if one.momentum is None]
    try:
        for one in changed:
            one.momentum = 0.1
        yield
    finally:
        for one in changed:
            one.momentum = None


def _is_state(module: nn.Module, path: str) -> bool:
    """Whether a module has a parameter or a buffer of this name."""
    owner, _, name = path.rpartition(".")
    try:
        found = module.get_submodule(owner)
    except AttributeError:
        return False
    return name in found._parameters or name in found._buffers


def _generators() -> object:
    """The states of generators of random numbers."""
    numpy: Any = sys.modules.get("numpy")
    of_numpy = numpy and [str(one) for one in numpy.random.get_state()]
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return (
        random.getstate(), of_numpy, [one.tolist() for one in (torch.get_rng_state(), *gpus)]
    )  # fmt: skip


class _NoValues(TorchDispatchMode):
    """Raises where code looks at the numbers of a tensor: a graph would have them as constants."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in _READERS:
            raise Untraceable("it looks at the numbers of tensors")
        return function(*args, **(kwargs or {}))


_READERS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default}


# --- Attached -------------------------------------------------------------------------------------


@contextmanager
def attached(graphs: Mapping[nn.Module, TrainingGraph]) -> Iterator[None]:
    """Has modules run graphs within the block."""
    for module, graph in graphs.items():
        attach(module, graph)
    try:
        yield
    finally:
        for module in graphs:
            detach(module)

"""What ``optimize`` finds in a model: its layers, their calls, and what can be fused with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.modules.module as _hooks
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fastconv import tables
from fastconv.network import agreement, calls
from fastconv.network.blocks import Block, is_norm, reason_to_leave_norm
from fastconv.network.calls import Call
from fastconv.network.dry_run import NeedsData, call_without_data, tensors_of
from fastconv.network.exchange import kind_of, reason_to_leave
from fastconv.network.norm_calls import NormCall, watched_norms
from fastconv.network.preparation import is_gpu
from fastconv.network.regions import Given, Region, attached, regions, watched_arguments
from fastconv.network.sites import Site, sites
from fastconv.network.subject import Subject, cloned
from fastconv.network.tracing import Traced, Untraceable, has_hooks, traced, written_tensors

# By how much a model's results may differ from call to call, as a share of their norm, for its
# graph to be judged by them. Atomic additions make such differences.
_UNSTEADY = 1e-4


@dataclass(frozen=True)
class Inspection:
    """What one process finds in its model."""

    seen: dict[str, list[Call]]  # how each layer is called, by its name
    structure: str  # a hash of the operators that the model calls
    graph: Traced | None = None
    sites: dict[str, Site] = field(default_factory=dict)
    expected: Any = None  # the model's results
    unsteady: float = 0.0  # by how much they differ from call to call
    # For training: BatchNorms with what follows them, by name, and where these blocks are.
    norms: dict[str, nn.Module] = field(default_factory=dict)
    norm_calls: dict[str, list[NormCall]] = field(default_factory=dict)
    regions: list[Region] = field(default_factory=list)
    given: dict[str, Given] = field(default_factory=dict)  # what modules are called with

    @property
    def blocks(self) -> dict[str, Block]:
        return {name: block for region in self.regions for name, block in region.blocks.items()}

    @property
    def block_calls(self) -> dict[str, list[NormCall]]:
        """How the BatchNorms of blocks are called, by name."""
        return {name: self.norm_calls[name] for name in self.blocks}

    @property
    def convolved(self) -> dict[str, str]:
        """The names of the convolutions of blocks, and those of these blocks' BatchNorms."""
        return {
            region.full_name(block.conv): name
            for region in self.regions
            for name, block in region.blocks.items()
            if block.conv is not None
        }


def exchangeable_layers(subject: Subject) -> dict[str, nn.Module]:
    """The layers that can be exchanged, by name; the report gets reasons for all others."""
    layers = {}
    for name, module in subject.model.named_modules():
        if kind_of(module) is not None:
            reason = _reason_to_leave(module)
            if reason is None:
                layers[name] = module
            else:
                subject.left[name] = reason
    if not layers and not subject.left:
        subject.notes.append(
            "the model has no convolutions that fastconv computes: it was left as it was"
        )
    return layers


def _reason_to_leave(module: Any) -> str | None:
    """Why a layer cannot be exchanged or measured, if it cannot."""
    reason = reason_to_leave(module)
    if reason is not None:
        return reason
    if is_parametrized(module):
        return f"of another class, {type(module).__name__}"
    if module._parameters.get("weight") is None:
        return "with a weight that is computed"
    if not is_gpu(module.weight.device):
        return f"on {module.weight.device}"
    return None


def inspected(
    subject: Subject, layers: Mapping[str, nn.Module], fuse: bool, inplace: bool
) -> Inspection:
    """What a model's layers are called with and, if asked for, what can be fused with them.

    A model in training mode stays the same object when it is fused; otherwise a copy is fused.
    """
    of_training = fuse and subject.model.training
    norms = _norms(subject) if of_training else {}
    with subject.timed("inspecting"):
        found = _layer_calls(subject, layers, norms)
    if not fuse or not (found.norm_calls if of_training else found.seen and not inplace):
        return found
    with subject.timed("tracing"):
        try:
            if of_training:
                return _with_blocks(subject, found)
            return _fusable(subject, layers, found)
        except Untraceable as error:
            subject.notes.append(f"not fused: {error}")
            return found
        finally:
            subject.snapshot.put_back()


def _norms(subject: Subject) -> dict[str, nn.Module]:
    """The BatchNorms that fastconv can compute; the report gets reasons for all others."""
    found: dict[str, nn.Module] = {}
    for name, module in subject.model.named_modules():
        if is_norm(module):
            reason = reason_to_leave_norm(module)
            tensors = (*module.parameters(), *module.buffers())
            elsewhere = {one.device for one in tensors if not is_gpu(one.device)}
            if reason is None and elsewhere:
                reason = f"on {next(iter(elsewhere))}"
            if reason is None:
                found[name] = module
            else:
                subject.left[name] = reason
    return found


def _layer_calls(
    subject: Subject, layers: Mapping[str, nn.Module], norms: dict[str, nn.Module]
) -> Inspection:
    """How each layer is called: by a dry run or, where the model needs data, by a real call."""
    seen: dict[str, list[Call]] = {}
    norm_calls: dict[str, list[NormCall]] = {}
    given: dict[str, Given] = {}
    if not layers and not norms:
        return Inspection(seen, "")
    operators = calls.Operators()

    @contextmanager
    def watch() -> Iterator[None]:
        arguments = watched_arguments(subject.model, given) if norms else nullcontext()
        with calls.watched(layers, seen), watched_norms(norms, norm_calls), arguments, operators:
            yield

    try:
        call_without_data(subject.model, subject.example, subject.named, watch=watch())
    except NeedsData as error:
        subject.notes.append(f"the model was called with data to find its layers, as it {error}")
        for one in (seen, norm_calls, given):
            one.clear()
        operators = calls.Operators()
        with watch():
            subject.model(*cloned(subject.example), **cloned(subject.named))
        subject.snapshot.put_back()
    subject.left |= {name: "not called with this example" for name in layers if name not in seen}
    return Inspection(
        seen, operators.digest(), norms=norms, norm_calls=norm_calls, given=given
    )  # fmt: skip


def _fusable(subject: Subject, layers: Mapping[str, nn.Module], found: Inspection) -> Inspection:
    """What was found, with the model's graph, and what can be fused in it.

    Raises:
        Untraceable: nothing can be fused.
    """
    reason = _reason_not_to_fuse(subject)
    if reason is not None:
        raise Untraceable(reason)
    graph = traced(subject.model, subject.example, subject.named, subject.snapshot)
    once = {
        name: of_one[0]
        for name, of_one in found.seen.items()
        if len(of_one) == 1 and not has_hooks(layers[name])
    }
    if not sites(graph, once):
        raise Untraceable("no convolution is followed by anything that can be fused with it")
    expected, unsteady = _check_graph(subject, graph.module)
    written = written_tensors(
        subject.model, lambda: subject.result(subject.model), subject.snapshot
    )
    fusable = sites(graph, once, written)
    if not fusable:
        raise Untraceable("the model writes to parameters or buffers of all that could be fused")
    return Inspection(found.seen, found.structure, graph, fusable, expected, unsteady)


def _with_blocks(subject: Subject, found: Inspection) -> Inspection:
    """What was found, with the blocks of a model in training.

    Raises:
        Untraceable: there are none.
    """
    if _hooks._has_any_global_hook():
        raise Untraceable("global hooks of modules are registered")
    left: dict[str, str] = {}
    parts = regions(subject.model, found.given, left)
    parts = [
        replace(part, blocks={n: one for n, one in part.blocks.items() if n in found.norm_calls})
        for part in parts
    ]
    kept = _checked(subject, [part for part in parts if part.blocks], left)
    for name, reason in left.items():
        subject.notes.append(f"not fused in {name}: {reason}")
    if not kept:
        raise Untraceable("no BatchNorm can be computed with what follows it")
    expected, unsteady = _check_graph(subject, _with_graphs(subject.model, kept))
    norm_calls = {}
    for region in kept:
        for name, block in region.blocks.items():
            form = None if block.residual is None else region.graph.forms[block.residual]
            norm_calls[name] = [
                call.followed(
                    block.activation,
                    call.input if form and form.shape != call.input.shape else form,
                )
                for call in found.norm_calls[name]
            ]
    return replace(
        found, regions=kept, norm_calls=norm_calls, expected=expected, unsteady=unsteady
    )  # fmt: skip


def _checked(subject: Subject, parts: list[Region], left: dict[str, str]) -> list[Region]:
    """The regions whose graphs, without fused blocks, give the model's results."""

    def trouble(of: list[Region]) -> str | None:
        try:
            _check_graph(subject, _with_graphs(subject.model, of))
        except Untraceable as error:
            return str(error)
        return None

    if not parts or trouble(parts) is None:
        return parts
    kept: list[Region] = []
    for kind in dict.fromkeys(type(part.module) for part in parts):
        alike = [part for part in parts if type(part.module) is kind]
        words = trouble(alike)
        if words is None:
            kept += alike
        else:
            left |= {part.name or "the model": words for part in alike}
    return kept


def _with_graphs(model: nn.Module, parts: list[Region]) -> Callable[..., Any]:
    """Calls the model so that regions run their graphs, without fused blocks."""
    graphs = {part.module: part.training_graph(()) for part in parts}

    def call(*args: Any, **kwargs: Any) -> Any:
        with attached(graphs):
            return model(*args, **kwargs)

    return call


def _reason_not_to_fuse(subject: Subject) -> str | None:
    leaves = (*subject.model.parameters(), *tensors_of((subject.example, subject.named)))
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        return "gradients are recorded; for inference, optimize within torch.no_grad()"
    return None


def _check_graph(subject: Subject, graph: Callable[..., Any]) -> tuple[Any, float]:
    """Compares the results of a graph, before anything is fused in it, with those of its model.

    ``graph`` is a module, or a function that calls the model by graphs of its modules.

    Returns:
        The model's results, and by how much they differ from call to call.

    Raises:
        Untraceable: the graph does something else than the model.
    """
    expected = subject.result(subject.model)
    other, again, counted = subject.more_results(subject.model)
    words, unsteady = agreement.difference(expected["result"], again["result"])
    if words is not None or unsteady > _UNSTEADY:
        raise Untraceable(
            "the model's results differ from call to call, by "
            f"{words or format(unsteady, '.1%')}, so its graph cannot be checked"
        )
    try:
        found = subject.result(graph)
    except Exception as error:
        raise Untraceable(f"its graph fails: {tables.error_line(error)}") from error
    trouble = graph_disagreement(expected, found, unsteady)
    if trouble is not None:
        raise Untraceable(trouble)
    of_graph, _, counted_by_graph = subject.more_results(graph)
    trouble = None if other is None else graph_disagreement(other, of_graph, unsteady)
    if trouble is not None:
        raise Untraceable(f"called once more, with other numbers, {trouble}")
    if counted != counted_by_graph:
        where = next(one for one, _ in counted.items() ^ counted_by_graph.items())
        raise Untraceable(f"each call of the model changes {where}, but its graph does not")
    return expected, unsteady


def graph_disagreement(expected: Any, found: Any, unsteady: float) -> str | None:
    """How a graph's results differ from the model's, if by more than one operation's rounding.

    A graph computes the same as its model, in the same order. Where the model's own results differ
    from call to call, by the share ``unsteady``, those of its graph may do so too.
    """
    words, share = agreement.difference(expected, found)
    if words is not None:
        return f"its graph gives {words}"
    if share > max(2 * unsteady, agreement.rounding_of(expected)):
        return f"its graph's results are {share:.2g} of their norm off those of the model"
    return None

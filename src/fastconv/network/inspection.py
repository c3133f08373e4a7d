"""What ``optimize`` finds in a model: its layers, their calls, and what can be fused with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fastconv.network import agreement, calls
from fastconv.network.calls import Call
from fastconv.network.dry_run import NeedsData, call_without_data, tensors_of
from fastconv.network.exchange import kind_of, known_kind, reason_to_leave
from fastconv.network.preparation import is_gpu
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
    cls: type = type(module)  # mypy would take the module to be of a class that it is compared with
    if cls is not known_kind(module).pytorchs:
        return f"of another class, {cls.__name__}"
    if module._parameters.get("weight") is None:
        return "with a weight that is computed"
    if not is_gpu(module.weight.device):
        return f"on {module.weight.device}"
    return None


def inspected(subject: Subject, layers: Mapping[str, nn.Module], fuse: bool) -> Inspection:
    """What a model's layers are called with and, if asked for, what can be fused with them."""
    with subject.timed("inspecting"):
        found = _layer_calls(subject, layers)
    if not fuse or not found.seen:
        return found
    with subject.timed("tracing"):
        try:
            return _fusable(subject, layers, found)
        except Untraceable as error:
            subject.notes.append(f"not fused: {error}")
            return found
        finally:
            subject.snapshot.put_back()


def _layer_calls(subject: Subject, layers: Mapping[str, nn.Module]) -> Inspection:
    """How each layer is called: by a dry run or, where the model needs data, by a real call."""
    seen: dict[str, list[Call]] = {}
    if not layers:
        return Inspection(seen, "")
    operators = calls.Operators()

    @contextmanager
    def watch() -> Iterator[None]:
        with calls.watched(layers, seen), operators:
            yield

    try:
        call_without_data(subject.model, subject.example, subject.named, watch=watch())
    except NeedsData as error:
        subject.notes.append(f"the model was called with data to find its layers, as it {error}")
        seen.clear()
        operators = calls.Operators()
        with watch():
            subject.model(*cloned(subject.example), **cloned(subject.named))
        subject.snapshot.put_back()
    subject.left |= {name: "not called with this example" for name in layers if name not in seen}
    return Inspection(seen, operators.digest())


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
    expected, unsteady = _check_graph(subject, graph)
    written = written_tensors(
        subject.model, lambda: subject.result(subject.model), subject.snapshot
    )
    fusable = sites(graph, once, written)
    if not fusable:
        raise Untraceable("the model writes to parameters or buffers of all that could be fused")
    return Inspection(found.seen, found.structure, graph, fusable, expected, unsteady)


def _reason_not_to_fuse(subject: Subject) -> str | None:
    leaves = (*subject.model.parameters(), *tensors_of((subject.example, subject.named)))
    if subject.model.training:
        return "the model is in training mode"
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        return "gradients are recorded; for inference, optimize within torch.no_grad()"
    return None


def _check_graph(subject: Subject, graph: Traced) -> tuple[Any, float]:
    """Compares the results of a graph, before anything is fused in it, with those of its model.

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
    trouble = graph_disagreement(expected, subject.result(graph.module), unsteady)
    if trouble is not None:
        raise Untraceable(trouble)
    of_graph, _, counted_by_graph = subject.more_results(graph.module)
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

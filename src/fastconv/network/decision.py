"""How ``optimize`` decides: inspect the model, measure it, and propose what it should become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fastconv.network import block_comparison, fusion, measurement, ranks
from fastconv.network.block_calls import BlockCall
from fastconv.network.calls import Call, Times
from fastconv.network.inspection import (
    Inspection,
    exchangeable_layers,
    graph_disagreement,
    inspected,
)
from fastconv.network.proposal import Proposal, proposed, unchanged
from fastconv.network.report import MeasuredBlock, MeasuredLayer, block_rows, rows
from fastconv.network.snapshot import same_random_numbers
from fastconv.network.subject import Subject

Decision = tuple[Proposal, dict[str, Any]]
"""What the model should become, and the report's fields."""


def left_alone(subject: Subject, reason: str) -> Decision:
    """The decision for a model that is not measured."""
    subject.notes.append(reason)
    proposal = unchanged(subject.model)
    return proposal, _report(subject, proposal, (), None)


def decided(subject: Subject, fuse: bool, inplace: bool, recompute: bool = False) -> Decision:
    """Measures the model and decides; the model is as it was afterwards."""
    subject.snapshot.record({"model": subject.model})
    try:
        with same_random_numbers():
            return _decided(subject, fuse, inplace, recompute)
    finally:
        subject.snapshot.put_back()


def _decided(subject: Subject, fuse: bool, inplace: bool, recompute: bool) -> Decision:
    layers = exchangeable_layers(subject)
    mine = ranks.in_each(lambda: inspected(subject, layers, fuse, inplace))
    ranks.same_in_all("has the layers " + ", ".join(layers), sorted(layers))
    shared = ranks.gathered(
        lambda: (
            {name: site.words for name, site in mine.sites.items()},
            {name: block.words for name, block in mine.blocks.items()},
        )
    )
    if any(other != shared[0] for other in shared):
        subject.notes.append("not fused: the graphs of processes differ in what can be fused")
        mine = replace(mine, graph=None, sites={}, regions=[])
    graph, sites = mine.graph, mine.sites
    seen = dict(mine.seen)
    if graph is not None:
        for name, site in sites.items():
            seen[name] = [fusion.with_followers(seen[name][0], site, graph)]
    of_blocks = mine.block_calls
    # Rank 0 decides. Its calls may be other ones than this process's, but its layers are the same.
    judged, judged_blocks, found, together = ranks.from_rank_0(
        lambda: (seen, of_blocks, *_times(subject, layers, mine, seen))
    )
    alone = _gaining(judged, found)
    ours = [name for name in judged if name in alone or name in together]
    blocks = _gaining(judged_blocks, found)
    proposal = proposed(subject.model, layers, ours, graph, sites, seen)
    proposal = proposal.with_blocks(mine.regions, blocks, recompute)
    whole: Times | None = None
    if proposal.changes:
        pairs = _pairs(mine, seen, blocks)
        needed: dict[measurement.AnyCall, nn.Module] = {
            call: layers[name]
            for name in ours
            for call in ([pairs[name]] if name in pairs else seen.get(name, ()))
        }
        needed |= {call: mine.norms[name] for name in blocks for call in of_blocks.get(name, ())}
        ranks.in_each(lambda: measurement.load_chosen(subject, needed))
        troubles = ranks.gathered(lambda: _trouble(subject, proposal, mine))
        trouble = next(filter(None, troubles), None)
        if trouble is None:
            proposal = proposal.finished()
            whole = ranks.from_rank_0(
                lambda: measurement.model_times(subject, proposal, judged, mine.structure)
            )
            if not whole.gains and (proposal.model is not subject.model or proposal.blocks):
                trouble = "the model as a whole is not faster when fused"
        if trouble is not None:
            subject.notes.append(f"not fused: {trouble}")
            subject.snapshot.put_back()
            return _decided(subject, fuse=False, inplace=inplace, recompute=False)
        if whole is not None and not whole.gains:
            subject.notes.append("the model as a whole is not faster: it was left as it was")
            proposal = unchanged(subject.model)
    words = {name: site.words for name, site in sites.items()}
    measured = tuple(rows(judged, found, proposal.ours, words, together))
    followed = {name: block.words for name, block in mine.blocks.items()}
    if again := sum(graph.source.count("recomputes") for graph in proposal.graphs.values()):
        subject.notes.append(f"{again} activations are computed again in backward passes")
    measured_blocks = tuple(block_rows(judged_blocks, found, proposal.blocks, followed))
    return proposal, _report(subject, proposal, measured, whole, measured_blocks)


def _times(
    subject: Subject,
    layers: Mapping[str, nn.Module],
    mine: Inspection,
    seen: Mapping[str, Sequence[Call]],
) -> tuple[dict[measurement.AnyCall, Times | str], dict[str, Times]]:
    """The times of all calls, and those of layers that only gain with their BatchNorms, by name."""
    of_blocks = mine.block_calls
    found = measurement.layer_times(subject, {**layers, **mine.norms}, {**seen, **of_blocks})
    losing = seen.keys() - _gaining(seen, found)
    pairs = _pairs(mine, seen, _gaining(of_blocks, found))
    tried = {name: [pair] for name, pair in pairs.items() if name in losing}
    by_pair = measurement.layer_times(subject, layers, tried)
    together: dict[str, Times] = {}
    for name, (pair,) in tried.items():
        times = by_pair[pair]
        if isinstance(times, str):
            subject.notes.append(f"{name} was not measured with its BatchNorm: {times}")
        elif times.gains:
            together[name] = times
    return found, together


def _pairs(
    mine: Inspection, seen: Mapping[str, Sequence[Call]], blocks: Sequence[str]
) -> dict[str, BlockCall]:
    """The calls of convolutions with their BatchNorms, by the convolutions' names.

    They are those of these blocks of which a kernel may leave statistics.
    """
    found = {
        name: BlockCall(seen[name][0], mine.norm_calls[norm][0])
        for name, norm in mine.convolved.items()
        if norm in blocks and len(seen.get(name, ())) == len(mine.norm_calls[norm]) == 1
    }
    return {name: pair for name, pair in found.items() if pair.may_leave_statistics}


def _gaining(
    of: Mapping[str, Sequence[measurement.AnyCall]], found: Mapping[Any, Times | str]
) -> list[str]:
    """The names of layers or blocks that are faster by fastconv."""
    return [name for name, one in of.items() if measurement.gains([found[call] for call in one])]


def _trouble(subject: Subject, proposal: Proposal, inspection: Inspection) -> str | None:
    """What is wrong with a fused model's results, if anything."""
    if proposal.fused is None and not proposal.blocks:
        return None
    with subject.timed("comparing"):
        if proposal.fused is None:
            trouble = block_comparison.disagreement(subject, proposal)
            subject.snapshot.put_back()
            return trouble
        result, trouble = proposal.fused.disagreement(subject.result)
        subject.snapshot.put_back()
        return graph_disagreement(inspection.expected, result, inspection.unsteady) or trouble


def _report(
    subject: Subject,
    proposal: Proposal,
    layers: tuple[MeasuredLayer, ...],
    whole: Times | None,
    blocks: tuple[MeasuredBlock, ...] = (),
) -> dict[str, Any]:
    return {
        "layers": layers,
        "exchanged": tuple(proposal.ours),
        "folded": proposal.folded,
        "left": {name: why for name, why in subject.left.items() if name not in proposal.ours},
        "before_ms": whole and whole.theirs,
        "after_ms": whole and whole.ours,
        "fused": proposal.model is not subject.model,
        "measured": subject.measured,
        "notes": tuple(subject.notes),
        "task_seconds": dict(subject.task_seconds),
        "blocks": blocks,
    }

"""A proposal: what a model could become, by layers of another class or as a fused graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import nn

from fastconv.network import fusion
from fastconv.network.calls import Call
from fastconv.network.exchange import exchange, exchange_for_good, exchanged_back
from fastconv.network.regions import Region
from fastconv.network.sites import Site
from fastconv.network.tracing import Traced
from fastconv.network.training_graph import TrainingGraph, attach, detach


@dataclass(frozen=True)
class Proposal:
    """What a model could become."""

    model: nn.Module  # the model itself, or a graph of it
    ours: Collection[str]  # names of layers that become fastconv's
    plain: Sequence[nn.Module]  # those of them whose class is all that changes
    folded: int  # how many BatchNorms are folded into weights
    fused: fusion.Fused | None = None  # the graph while its sites are compared with their parts
    blocks: Collection[str] = ()  # names of BatchNorms that are computed with what follows
    graphs: Mapping[nn.Module, TrainingGraph] = field(default_factory=dict)  # by their regions

    @property
    def changes(self) -> bool:
        return bool(self.ours or self.folded or self.blocks)

    def apply(self) -> None:
        """Changes the classes of modules."""
        exchange(self.plain)
        for module, graph in self.graphs.items():
            attach(module, graph)

    def undo(self) -> None:
        for module in self.graphs:
            detach(module)
        exchange(self.plain, back=True)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Makes the model as it was at its end, whatever the block does."""
        try:
            yield
        finally:
            self.undo()

    def apply_for_good(self) -> None:
        """Makes the model so until it is restored."""
        exchange_for_good(self.plain)
        for module, graph in self.graphs.items():
            attach(module, graph)

    def finished(self) -> Proposal:
        """The proposal with a graph of fused layers alone."""
        if self.fused is None:
            return self
        return replace(self, model=self.fused.finished(), fused=None)

    def with_blocks(
        self, regions: Sequence[Region], chosen: Collection[str], recompute: bool = False
    ) -> Proposal:
        """The proposal with these blocks, named by their BatchNorms, in their regions.

        ``recompute`` is as for :meth:`Region.training_graph`.
        """
        if not chosen:
            return self
        with exchanged_back(self.plain):
            exchange(self.plain)  # blocks of convolutions that are fastconv's include these
            graphs = {
                region.module: region.training_graph(chosen, recompute)
                for region in regions
                if not region.blocks.keys().isdisjoint(chosen)
            }
        return replace(self, blocks=chosen, graphs=graphs)


def unchanged(model: nn.Module) -> Proposal:
    return Proposal(model, (), (), 0)


def proposed(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    ours: Collection[str],
    graph: Traced | None,
    sites: Mapping[str, Site],
    seen: Mapping[str, Sequence[Call]],
) -> Proposal:
    """The proposal in which the layers ``ours`` become fastconv's, in a graph if there is one."""
    changed = {n: site for n, site in sites.items() if n in ours or site.norm is not None}
    if graph is None or not changed:
        return Proposal(model, ours, [layers[name] for name in ours], 0)
    plain = [layers[name] for name in ours if name not in changed]
    folded = sum(site.norm is not None for site in changed.values())
    fused = fusion.fuse(graph, changed, ours, {name: seen[name][0] for name in changed})
    return Proposal(fused.module, ours, plain, folded, fused)

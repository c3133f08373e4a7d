"""A proposal: what a model could become, by layers of another class or as a fused graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from fastconv.network import fusion
from fastconv.network.calls import Call
from fastconv.network.sites import Site
from fastconv.network.tracing import Traced


@dataclass(frozen=True)
class Proposal:
    """What a model could become."""

    model: nn.Module  # the model itself, or a graph of it
    ours: Collection[str]  # names of layers that become fastconv's
    plain: Sequence[nn.Module]  # those of them whose class is all that changes
    folded: int  # how many BatchNorms are folded into weights
    fused: fusion.Fused | None = None  # the graph while its sites are compared with their parts

    @property
    def changes(self) -> bool:
        return bool(self.ours or self.folded)

    def finished(self) -> Proposal:
        """The proposal with a graph of fused layers alone."""
        if self.fused is None:
            return self
        return replace(self, model=self.fused.finished(), fused=None)


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

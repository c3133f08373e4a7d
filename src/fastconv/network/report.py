"""The report of :func:`fastconv.optimize`: what it has measured and done, as values and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastconv import tables
from fastconv.network.calls import Call, Times
from fastconv.problem import is_channels_last


class MeasuredLayer(NamedTuple):
    """Layers of a model that are called alike."""

    call: Call
    followed_by: str  # what fastconv's kernel computes in its epilogue, or folds into weights
    layers: int
    calls: int
    times: Times | None  # all passes of one call
    exchanged: int  # how many of the layers are fastconv's
    why: str

    def chosen_ms(self, times: Times) -> float:
        """The time of all calls as the layers were chosen, given the times of one call."""
        share = self.exchanged / self.layers
        return self.calls * (share * times.ours + (1 - share) * times.theirs)


@dataclass(frozen=True)
class Optimization:
    """What :func:`fastconv.optimize` has measured and done; as text, a table."""

    layers: tuple[MeasuredLayer, ...]
    exchanged: tuple[str, ...]  # names of the layers that are fastconv's now
    folded: int  # how many BatchNorms were folded into weights
    left: Mapping[str, str]  # layers that were not measured, by name, and why
    before_ms: float | None  # the whole model; None where nothing was to be exchanged
    after_ms: float | None
    fused: bool  # whether the model is a graph with fused layers
    measured: int  # how many times in `layers` are new; the others were stored on disk before
    notes: tuple[str, ...]
    seconds: float
    task_seconds: Mapping[str, float] = field(default_factory=dict)  # planning, compiling, ...

    def __str__(self) -> str:
        lines = [*self._table(), *self._totals(), *self._left(), *self.notes]
        stored = sum(row.times is not None for row in self.layers) - self.measured
        tasks = ", ".join(f"{name} {took:.1f}" for name, took in self.task_seconds.items())
        lines.append(
            f"{self.measured} distinct calls measured, {stored} known from earlier, "
            f"{self.seconds:.1f} s" + (f" ({tasks})" if tasks else "")
        )
        return "\n".join(lines)

    def _table(self) -> list[str]:
        if not self.layers:
            return []
        heading = (
            "input", "weight", "", "type", "passes", "with", "calls", "PyTorch ms", "fastconv ms",
            "chosen", "why",
        )  # fmt: skip
        rows = [heading, *map(_cells, self.layers)]
        return tables.lines(rows, right={6, 7, 8})

    def _totals(self) -> list[str]:
        timed = [(row, row.times) for row in self.layers if row.times is not None]
        lines = []
        if timed:
            theirs = sum(row.calls * times.theirs for row, times in timed)
            ours = sum(row.calls * times.ours for row, times in timed)
            chosen = sum(row.chosen_ms(times) for row, times in timed)
            lines.append(
                f"all calls: {theirs:.3f} ms by PyTorch, {ours:.3f} ms by fastconv, "
                f"{chosen:.3f} ms as chosen"
            )
        if self.layers:
            folded = f", {self.folded} BatchNorms folded into weights" if self.folded else ""
            lines.append(
                f"{len(self.exchanged)} of {sum(row.layers for row in self.layers)} layers "
                f"exchanged for fastconv's{folded}"
            )
        if self.before_ms is not None and self.after_ms is not None:
            lines.append(
                f"the whole model: {self.before_ms:.3f} ms before, {self.after_ms:.3f} ms after, "
                f"{self.before_ms / self.after_ms:.2f}x"
            )
        return lines

    def _left(self) -> list[str]:
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            by_reason.setdefault(reason, []).append(name)
        return [f"left as they are, {why}: {', '.join(of)}" for why, of in by_reason.items()]


def _cells(row: MeasuredLayer) -> tuple[str, ...]:
    call = row.call
    sizes = ("x".join(map(str, form.shape)) for form in (call.input, call.weight))
    batched = len(call.input.shape) == 4
    nhwc = batched and is_channels_last(call.input.shape, call.input.stride)
    format = "nhwc" if nhwc else "nchw" if batched else "chw"
    dtype = str(call.dtype).removeprefix("torch.")
    backward = f", gradients of {' '.join(call.gradients)}" if call.gradients else ""
    ms = ("", "") if row.times is None else (f"{row.times.theirs:.4f}", f"{row.times.ours:.4f}")
    chosen = {0: "PyTorch", row.layers: "fastconv"}.get(
        row.exchanged, f"fastconv in {row.exchanged} of {row.layers}"
    )
    return (
        *sizes, call.geometry, f"{dtype} {format}", f"forward{backward}", row.followed_by,
        str(row.calls), *ms, chosen, row.why,
    )  # fmt: skip


def rows(
    seen: Mapping[str, Sequence[Call]],
    found: Mapping[Call, Times | str],
    ours: Collection[str],
    words: Mapping[str, str],
) -> Iterator[MeasuredLayer]:
    """The report's rows, one for each distinct call.

    Args:
        seen: the calls of each layer, by its name.
        found: the times of each call, or why it has none.
        ours: names of layers that are exchanged.
        words: what is fused with layers, by name.
    """
    for call in dict.fromkeys(call for of_one in seen.values() for call in of_one):
        names = [name for name, of_one in seen.items() if call in of_one]
        times = found[call]
        yield MeasuredLayer(
            call,
            words.get(names[0], ""),
            len(names),
            sum(seen[name].count(call) for name in names),
            None if isinstance(times, str) else times,
            sum(name in ours for name in names),
            _why(times),
        )


def _why(times: Times | str) -> str:
    if isinstance(times, str):
        return times
    if times.gains:
        return f"{times.theirs / times.ours:.2f}x as fast"
    if times.ours < times.theirs:
        return "gains no more than times vary"
    return f"takes {times.ours / times.theirs:.2f} times as long"

"""The report of ``optimize``: what it has measured and done, as values and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torch import nn

from fastconv import tables
from fastconv.network.calls import Call, Times
from fastconv.network.norm_calls import NormCall
from fastconv.problem import is_channels_last

_Report = TypeVar("_Report")

REPORT = "fastconv_optimization"
"""The attribute of an optimized model that has its report."""


def attached(model: nn.Module, attribute: str, kind: type[_Report]) -> _Report:
    """The report of this kind that a model has as an attribute.

    Raises:
        ValueError: the model has none.
    """
    found = getattr(model, attribute, None)
    if not isinstance(found, kind):
        raise ValueError(f"the model has no report: no attribute {attribute} of a {kind.__name__}")
    return found


def left_lines(left: Mapping[str, str]) -> list[str]:
    """A line of text for each reason why layers were left as they are."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in left.items():
        by_reason.setdefault(reason, []).append(name)
    return [f"left as they are, {why}: {', '.join(of)}" for why, of in by_reason.items()]


class MeasuredLayer(NamedTuple):
    """Layers of a model that are called alike: one row of a ``fastconv.Optimization``.

    Attributes:
        call: the kind of layer, sizes, types, memory formats and options of the call, and which
            gradients it needs.
        followed_by: what fastconv's kernel computes in its epilogue, or folds into the weights.
        layers: how many layers are called so.
        calls: how many calls these are in one step of the model.
        times: milliseconds of all passes of one call, as medians with their standard errors, by
            PyTorch (``theirs``) and by fastconv (``ours``); None where nothing could be measured.
        exchanged: how many of the layers are fastconv's now.
        why: the reason in words.

    Examples:
        >>> model = torch.nn.Conv2d(3, 8, 3).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> images = torch.randn(2, 3, 9, 9, device=model.weight.device)
        >>> for row in fastconv.Optimization.of(fastconv.optimize(model, images)).layers:
        ...     print(row.call.kind, row.call.geometry, row.times, row.exchanged, row.why)
    """

    call: Call
    followed_by: str
    layers: int
    calls: int
    times: Times | None
    exchanged: int
    why: str

    def chosen_ms(self, times: Times) -> float:
        """The time of all calls as the layers were chosen, given the times of one call.

        Args:
            times: those of one call.

        Returns:
            Milliseconds.
        """
        share = self.exchanged / self.layers
        return self.calls * (share * times.ours + (1 - share) * times.theirs)


class MeasuredBlock(NamedTuple):
    """BatchNorms of a model in training that are called alike: one row of a report's ``blocks``.

    A block is a BatchNorm with the addition and the activation behind it. Where it is fastconv's,
    it also has the convolution before it if that is.

    Attributes:
        call: sizes, types and memory formats, and which gradients the call needs.
        followed_by: what is computed with the BatchNorm: "addition, relu".
        names: the names of the BatchNorms.
        calls: how many calls these are in one step of the model.
        times: as in ``fastconv.MeasuredLayer``, without those of the convolution.
        fused: the names of those that are fastconv's now.
        why: the reason in words.

    Examples:
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
        >>> images = torch.randn(2, 3, 9, 9, device=device)
        >>> report = fastconv.Optimization.of(fastconv.optimize(model.to(device), images))
        >>> for row in report.blocks:
        ...     print(row.names, row.followed_by, row.times, row.why)
    """

    call: NormCall
    followed_by: str
    names: tuple[str, ...]
    calls: int
    times: Times | None
    fused: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Optimization:
    """What ``fastconv.optimize`` has measured and done. Printed, it is a table.

    Attributes:
        layers: a row for each distinct call of a layer.
        exchanged: names of the layers that are fastconv's now.
        folded: how many BatchNorms were folded into weights.
        left: layers that were not measured, by name, and why.
        before_ms: the time of the whole model before; None where nothing was to be exchanged.
        after_ms: the time of the whole model after.
        fused: whether the model is a graph with fused layers.
        measured: how many times in ``layers`` are new; the others were stored on disk before.
        notes: what else there is to say, in sentences.
        seconds: how long it took.
        task_seconds: how long planning, compiling, measuring and so on took of that.
        blocks: a row for each distinct call of a BatchNorm with what follows it, in training.

    Examples:
        >>> model = torch.nn.Conv2d(3, 8, 3).to("cuda" if torch.cuda.is_available() else "cpu")
        >>> images = torch.randn(2, 3, 9, 9, device=model.weight.device)
        >>> report = fastconv.Optimization.of(fastconv.optimize(model, images))
        >>> report.fused
        False
    """

    layers: tuple[MeasuredLayer, ...]
    exchanged: tuple[str, ...]
    folded: int
    left: Mapping[str, str]
    before_ms: float | None
    after_ms: float | None
    fused: bool
    measured: int
    notes: tuple[str, ...]
    seconds: float
    task_seconds: Mapping[str, float] = field(default_factory=dict)
    blocks: tuple[MeasuredBlock, ...] = ()

    @classmethod
    def of(cls, model: nn.Module) -> Optimization:
        """The report of a model that ``fastconv.optimize`` has returned.

        It is ``model.fastconv_optimization``, with a type that type checkers know.

        Args:
            model: what ``fastconv.optimize`` has returned.

        Returns:
            The report.

        Raises:
            ValueError: the model has none.
        """
        return attached(model, REPORT, cls)

    def __str__(self) -> str:
        tables_of_both = (*self._table(), *self._table_of_blocks())
        lines = [*tables_of_both, *self._totals(), *left_lines(self.left), *self.notes]
        every = [*(row.times for row in self.layers), *(row.times for row in self.blocks)]
        # What was measured for a fused model, which was not faster, is not among these.
        stored = max(0, sum(times is not None for times in every) - self.measured)
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
            "layer", "input", "weight", "", "type", "passes", "with", "calls", "PyTorch ms",
            "fastconv ms", "chosen", "why",
        )  # fmt: skip
        rows = [heading, *map(_cells, self.layers)]
        return tables.lines(rows, right={7, 8, 9})

    def _table_of_blocks(self) -> list[str]:
        if not self.blocks:
            return []
        heading = (
            "block", "input", "type", "passes", "with", "calls", "PyTorch ms", "fastconv ms",
            "chosen", "why", "BatchNorms",
        )  # fmt: skip
        return tables.lines([heading, *map(_block_cells, self.blocks)], right={5, 6, 7})

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
        if self.blocks:
            names = sum(len(row.names) for row in self.blocks)
            fused = sum(len(row.fused) for row in self.blocks)
            lines.append(
                f"{fused} of {names} BatchNorms computed with what follows them, by fastconv"
            )
        if self.before_ms is not None and self.after_ms is not None:
            lines.append(
                f"the whole model: {self.before_ms:.3f} ms before, {self.after_ms:.3f} ms after, "
                f"{self.before_ms / self.after_ms:.2f}x"
            )
        return lines


def _cells(row: MeasuredLayer) -> tuple[str, ...]:
    call = row.call
    sizes = ("x".join(map(str, form.shape)) for form in (call.input, call.weight))
    dtype = str(call.dtype).removeprefix("torch.")
    backward = f", gradients of {' '.join(call.gradients)}" if call.gradients else ""
    ms = ("", "") if row.times is None else (f"{row.times.theirs:.4f}", f"{row.times.ours:.4f}")
    chosen = {0: "PyTorch", row.layers: "fastconv"}.get(
        row.exchanged, f"fastconv in {row.exchanged} of {row.layers}"
    )
    return (
        call.kind, *sizes, call.geometry, f"{dtype} {_format(call)}", f"forward{backward}",
        row.followed_by, str(row.calls), *ms, chosen, row.why,
    )  # fmt: skip


def _block_cells(row: MeasuredBlock) -> tuple[str, ...]:
    call = row.call
    backward = f", gradients of {' '.join(call.gradients)}" if call.gradients else ""
    ms = ("", "") if row.times is None else (f"{row.times.theirs:.4f}", f"{row.times.ours:.4f}")
    chosen = "fastconv" if row.fused else "PyTorch"
    shape, stride, dtype = call.input
    last = "channels-last" if len(shape) > 3 and is_channels_last(shape, stride) else "contiguous"
    names = ", ".join(row.names[:3]) + (" ..." if len(row.names) > 3 else "")
    return (
        call.kind, "x".join(map(str, shape)), f"{str(dtype).removeprefix('torch.')} {last}",
        f"forward{backward}", row.followed_by, str(row.calls), *ms, chosen, row.why, names,
    )  # fmt: skip


def _format(call: Call) -> str:
    """The memory format of a call's input: "nhwc" or "nchw", of a sequence "nlc" or "ncl".

    That of a volume is "ndhwc" or "ncdhw".
    """
    axes = {1: "l", 2: "hw", 3: "dhw"}[call.axes]
    if not call.is_batched:
        return f"c{axes}"
    shape, stride = call.input.shape, call.input.stride
    if call.axes == 1:  # an image of one row
        shape = (*shape[:2], 1, shape[2])
        stride = (*stride[:2], stride[2] * shape[3], stride[2])
    return f"n{axes}c" if is_channels_last(shape, stride) else f"nc{axes}"


def rows(
    seen: Mapping[str, Sequence[Call]],
    found: Mapping[Any, Times | str],
    ours: Collection[str],
    words: Mapping[str, str],
    together: Mapping[str, Times],
) -> Iterator[MeasuredLayer]:
    """The report's rows, one for each distinct call.

    Args:
        seen: the calls of each layer, by its name.
        found: the times of each call, or why it has none.
        ours: names of layers that are exchanged.
        words: what is fused with layers, by name.
        together: the times of layers with their BatchNorms, by name, where these decided.
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
            _why_together(times, [together[name] for name in names if name in together]),
        )


def _why_together(alone: Times | str, together: Sequence[Times]) -> str:
    if not together:
        return _why(alone)
    return f"{_why(Times.sum(together))} with its BatchNorm; alone it {_why(alone)}"


def _why(times: Times | str) -> str:
    if isinstance(times, str):
        return times
    if times.gains:
        return f"{times.theirs / times.ours:.2f}x as fast"
    if times.ours < times.theirs:
        return "gains no more than times vary"
    return f"takes {times.ours / times.theirs:.2f} times as long"


def block_rows(
    seen: Mapping[str, Sequence[NormCall]],
    found: Mapping[Any, Times | str],
    fused: Collection[str],
    words: Mapping[str, str],
) -> Iterator[MeasuredBlock]:
    """The report's rows of blocks, one for each distinct call; arguments as for :func:`rows`."""
    for call in dict.fromkeys(call for of_one in seen.values() for call in of_one):
        names = tuple(name for name, of_one in seen.items() if call in of_one)
        times = found[call]
        yield MeasuredBlock(
            call,
            words.get(names[0], ""),
            names,
            sum(seen[name].count(call) for name in names),
            None if isinstance(times, str) else times,
            tuple(name for name in names if name in fused),
            _why(times),
        )

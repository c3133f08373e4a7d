"""``optimize``: a network with those convolutions exchanged that gain by it, and no others."""

from __future__ import annotations

import copy
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from fastconv import native, tables, timing
from fastconv.backends import cuda
from fastconv.kernels.family import Plan
from fastconv.modules import PYTORCHS, Conv2d, FusedConv2d
from fastconv.network import agreement, calls, fusion, preparation
from fastconv.network.calls import Call, Times, Trial
from fastconv.network.preparation import is_gpu, tensors_of
from fastconv.network.state import State, is_same, same_random_numbers
from fastconv.problem import is_channels_last

_REPORT = "fastconv_optimization"
_MARK = "_fastconv_exchanged"  # on layers that are ours by optimize

# By how much a model's results may differ from call to call, as a share of their norm, for its
# graph to be judged by them. Atomic additions make such differences.
_UNSTEADY = 1e-4
_BY_GPU_TIME = (
    "the whole model was measured by the GPU's time alone, as the native host path was still being "
    "built"
)
_SEED = 1729  # of comparisons; models are traced with the random numbers that come then

_Value = TypeVar("_Value")
_Plans = dict[cuda.Need, Plan]


# --- The report -----------------------------------------------------------------------------------


class MeasuredLayer(NamedTuple):
    """Layers of a model that are called alike."""

    call: Call
    followed_by: str  # what is computed by the same kernel, if it is ours
    layers: int
    calls: int
    times: Times | None  # of a call, all its passes
    exchanged: int  # how many of the layers are ours
    why: str

    def chosen_ms(self, times: Times) -> float:
        """What all calls take now, given the times of one."""
        share = self.exchanged / self.layers
        return self.calls * (share * times.ours + (1 - share) * times.theirs)


@dataclass(frozen=True)
class Optimization:
    """What :func:`optimize` has measured and done; as text, a table."""

    layers: tuple[MeasuredLayer, ...]
    exchanged: tuple[str, ...]  # names of layers that are ours now
    folded: int  # BatchNorms that are part of weights now
    left: Mapping[str, str]  # layers that were not measured, by name, and why
    before_ms: float | None  # of the whole model; None where nothing was to be exchanged
    after_ms: float | None
    fused: bool  # whether the model is a graph, in which layers have become one with others
    measured: int  # of the layers' times; the others were kept from earlier
    notes: tuple[str, ...]
    seconds: float
    phases: Mapping[str, float] = field(default_factory=dict)  # where the seconds went

    def __str__(self) -> str:
        lines = [*self._table(), *self._sums(), *self._left(), *self.notes]
        kept = sum(row.times is not None for row in self.layers) - self.measured
        phases = ", ".join(f"{name} {took:.1f}" for name, took in self.phases.items())
        lines.append(
            f"{self.measured} measured, {kept} known from earlier, {self.seconds:.1f} s"
            + (f" ({phases})" if phases else "")
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

    def _sums(self) -> list[str]:
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
            folded = f", {self.folded} BatchNorms are part of weights" if self.folded else ""
            lines.append(
                f"{len(self.exchanged)} of {sum(row.layers for row in self.layers)} layers are "
                f"fastconv's now{folded}"
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


# --- What users call ------------------------------------------------------------------------------


def optimize(
    model: nn.Module,
    *example: Any,
    inplace: bool = False,
    fuse: bool = True,
    progress: bool | None = None,
    **named: Any,
) -> nn.Module:
    """The model with those of its convolutions computed by fastconv that are faster so.

    Each ``torch.nn.Conv2d`` is measured as the model calls it, on this GPU, by PyTorch and by
    fastconv; then the whole model is, before and after. A layer that gains nothing stays
    PyTorch's, and if the model as a whole is not faster, all of it does.

        >>> model = fastconv.optimize(model.cuda(), images)
        >>> print(model.fastconv_optimization)

    Call it as the model will be called: in the same mode (``train``, ``eval``), under the same
    ``autocast`` and :class:`fastconv.precision`, with an example of the same size, type and memory
    format. Gradients are measured where autograd would record them: for inference, call it
    within ``torch.no_grad()`` or ``torch.inference_mode()``.

    A layer that is exchanged stays the object that it is, with its parameters, hooks and
    state: only its class becomes :class:`fastconv.Conv2d`. Other classes than ``torch.nn.Conv2d``
    itself are left as they are. A layer that is called with other sizes later keeps its choice.

    In inference, in ``eval`` mode, a copy is also fused: by ``torch.fx``, BatchNorms become part of
    weights, activations and additions part of kernels. The result is then a
    ``torch.fx.GraphModule`` for inference alone. What cannot be traced, or sets ``autocast`` or
    the like for a part of itself, is not fused. A graph has to give the model's results, and each
    fused layer those of what it is made of, but for rounding.

    Times are kept on disk beside the kernels: the next process takes them from there. Where
    ``torch.distributed`` is initialized, all processes have to call it, and rank 0 decides.

    Where there is no GPU, nothing is measured, and the model is as it was: the report says so.

    Args:
        model: on a GPU, if there is one. What wraps it (``torch.compile``, DDP, FSDP) comes later.
        example: what it will be called with.
        inplace: change the model itself; else a copy. An optimizer that was made before goes on
            to hold the parameters of the model, not those of a copy.
        fuse: whether to fuse in inference.
        progress: whether to show on stderr how far it is; by default, if that is a terminal.
        named: the example's arguments by name.

    Returns:
        The model or the copy, with an :class:`Optimization` as ``fastconv_optimization``, which
        says what was measured and done. A model that was optimized before comes back as it
        is: :func:`restore` it first to decide anew.

    Raises:
        ValueError: there is no example, there is a GPU but the model or the example is not on it,
            the model is wrapped, or processes have different models.
    """
    start = time.perf_counter()
    _each(lambda: _check(model, example, named))
    target = model if inplace else _each(lambda: _copied(model))
    if _alike("has been optimized before", hasattr(model, _REPORT)):
        setattr(target, _REPORT, getattr(model, _REPORT))  # which copies of graphs lose
        return target
    work = _Work(target, _cloned(example), _cloned(named), progress)
    reason = next(filter(None, _gathered(lambda: _reason_not_to_measure(model))), None)
    if reason is not None:
        proposal, report = work.nothing(reason)
    else:
        proposal, report = work.proposed(fuse=fuse and not inplace)
    # All else is as it was: whatever has raised, nothing is exchanged.
    _exchange(proposal.plain)
    for layer in proposal.plain:
        vars(layer)[_MARK] = True
    seconds = time.perf_counter() - start
    setattr(proposal.model, _REPORT, Optimization(**report, seconds=seconds))
    return proposal.model


def restore(model: nn.Module) -> nn.Module:
    """Undoes what :func:`optimize` did: its layers are PyTorch's again. Others stay ours.

    Returns:
        The model.

    Raises:
        ValueError: the model was fused. It is a copy; the model that it was made of is as it was.
    """
    fused = [name for name, module in model.named_modules() if _is_fused(module)]
    if fused:
        raise ValueError(
            "restore() cannot take a fused model apart: of "
            f"{', '.join(filter(None, fused[:4])) or 'it'}{' ...' if len(fused) > 4 else ''}, "
            "BatchNorms, additions or activations have become part. It is a copy, and the model "
            "that it was made of is as it was"
        )
    for module in model.modules():
        state = vars(module)
        if state.pop(_MARK, False) and type(module) is Conv2d:
            module.__class__ = PYTORCHS
        state.pop(_REPORT, None)
    return model


def _is_fused(module: nn.Module) -> bool:
    return isinstance(module, FusedConv2d) or fusion.FOLDED in vars(module)


def _check(model: nn.Module, example: Any, named: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize() takes a torch.nn.Module, not {type(model).__name__}")
    tensors = tensors_of((example, named))
    if not tensors:
        raise ValueError("optimize() takes a model and an example of what it is called with")
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise ValueError("optimize() measures, so the example has to have data: it is fake")
    parameters = list(model.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        raise ValueError(
            "optimize() cannot measure what has no sizes yet: call the model once before"
        )
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError("optimize() measures, so the example has to have data: it is on meta")
    elsewhere = {
        what: of[0].device
        for what, of in (("model", parameters), ("example", tensors))
        if of and not any(is_gpu(tensor.device) for tensor in of)
    }
    # Without a GPU there is nothing to move to; and a half on one is a mistake in any case.
    if elsewhere and (torch.cuda.is_available() or (len(elsewhere) == 1 and parameters)):
        what, device = next(iter(elsewhere.items()))
        raise ValueError(
            f"optimize() measures on a GPU, but the {what} is on {device}: there is "
            f"nothing to gain there. Move the model and the example to a GPU first"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError("optimize() takes a model before torch.compile, which may follow")
    if _is_distributed():
        _check_alone(model)


def _check_alone(model: nn.Module) -> None:
    """Raises if a process cannot run the model without the others."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind.startswith(("DistributedDataParallel", "FullyShardedDataParallel", "FSDP")) or (
            isinstance(module, nn.SyncBatchNorm)
        ):
            raise ValueError(
                f"optimize() runs the model in one process, but {name or 'it'} is a {kind}, which "
                "waits for others: optimize the model before it is wrapped or converted"
            )
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"optimize() runs the model in one process, but {name} is a DTensor, which several "
                "hold: optimize the model before it is distributed"
            )


def _copied(model: nn.Module) -> nn.Module:
    try:
        with torch.inference_mode(False):  # what is made within can never be written outside
            return copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"optimize() cannot copy the model: {error}. With inplace=True it need not"
        ) from error


def _reason_not_to_measure(model: nn.Module) -> str | None:
    devices = {parameter.device for parameter in model.parameters()}
    if devices and not any(map(is_gpu, devices)):
        return "there is no GPU: nothing was measured, and the model is as it was"
    return None


def _cloned(values: Any) -> Any:
    """The same with tensors of its own: models may write to what they are given."""
    return tree_map_only(
        Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), values
    )


# --- The work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Proposal:
    """What a model could be."""

    model: nn.Module  # itself, or a graph of it
    ours: Collection[str]  # names of layers
    plain: Sequence[nn.Module]  # those of them whose class is all that changes
    folded: int
    fused: fusion.Fused | None = None  # that the graph is made of, until it is finished

    @property
    def changes(self) -> bool:
        return bool(self.ours or self.folded)


@dataclass(frozen=True)
class _Looked:
    """What a process finds in its model."""

    seen: dict[str, list[Call]]  # how each layer is called, by its name
    structure: str  # of a call of the model
    graph: fusion.Traced | None = None
    sites: dict[str, fusion.Site] = field(default_factory=dict)
    expected: Any = None  # the model's results
    unsteady: float = 0.0  # by how much they differ from call to call


@dataclass
class _Work:
    """One model on its way through :func:`optimize`."""

    model: nn.Module
    example: Any
    named: Any
    progress: bool | None
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    measured: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    plans: dict[Call, _Plans] = field(default_factory=dict)  # of calls, as far as they are made

    def nothing(self, reason: str) -> tuple[_Proposal, dict[str, Any]]:
        """The model as it is, and the report's fields."""
        self.notes.append(reason)
        proposal = _Proposal(self.model, (), (), 0)
        return proposal, self._report(proposal, (), None)

    def proposed(self, fuse: bool) -> tuple[_Proposal, dict[str, Any]]:
        """What the model should be, and the report's fields; the model is as it was."""
        self._state = State(values=True)
        self._state.take({"model": self.model})
        try:
            with same_random_numbers():
                return self._decided(fuse)
        finally:
            self._state.put_back()

    def _decided(self, fuse: bool) -> tuple[_Proposal, dict[str, Any]]:
        layers = self._layers()
        mine = _each(lambda: self._looked(layers, fuse))
        _alike("has the layers " + ", ".join(layers), sorted(layers))
        shared = _gathered(lambda: {name: site.words for name, site in mine.sites.items()})
        graph, sites = mine.graph, mine.sites
        if any(other != shared[0] for other in shared):
            self.notes.append("not fused: processes have graphs of which not the same can be fused")
            graph, sites = None, {}
        seen = dict(mine.seen)
        if graph is not None:
            for name, site in sites.items():
                seen[name] = [fusion.with_followers(seen[name][0], site, graph)]
        # By rank 0, whose calls need not be those of this process; its layers are.
        judged, found = _agreed(lambda: (seen, self._times(layers, seen)))
        ours = [name for name, of_one in judged.items() if _gains([found[call] for call in of_one])]
        proposal = self._proposal(layers, ours, graph, sites, seen)
        whole: Times | None = None
        if proposal.changes:
            needed = {call: layers[name] for name in ours for call in seen.get(name, ())}
            _each(lambda: self._make_ready(needed))
            trouble = next(filter(None, _gathered(lambda: self._trouble(proposal, mine))), None)
            if trouble is None:
                proposal = _finished(proposal)
                whole = _agreed(lambda: self._whole(proposal, judged, mine.structure))
                if not whole.gains and proposal.model is not self.model:
                    trouble = "the model as a whole is not faster so"
            if trouble is not None:
                self.notes.append(f"not fused: {trouble}")
                self._state.put_back()
                return self._decided(fuse=False)
            if whole is not None and not whole.gains:
                self.notes.append("the model as a whole is not faster: it was left as it was")
                proposal = _Proposal(self.model, (), (), 0)
        words = {name: site.words for name, site in sites.items()}
        return proposal, self._report(
            proposal, tuple(_rows(judged, found, proposal.ours, words)), whole
        )

    def _report(
        self, proposal: _Proposal, rows: tuple[MeasuredLayer, ...], whole: Times | None
    ) -> dict[str, Any]:
        return {
            "layers": rows,
            "exchanged": tuple(proposal.ours),
            "folded": proposal.folded,
            "left": {name: why for name, why in self.left.items() if name not in proposal.ours},
            "before_ms": whole and whole.theirs,
            "after_ms": whole and whole.ours,
            "fused": proposal.model is not self.model,
            "measured": self.measured,
            "notes": tuple(self.notes),
            "phases": dict(self.phases),
        }

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Counts the time of a part of the work."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def _proposal(
        self,
        layers: Mapping[str, nn.Module],
        ours: Collection[str],
        graph: fusion.Traced | None,
        sites: Mapping[str, fusion.Site],
        seen: Mapping[str, Sequence[Call]],
    ) -> _Proposal:
        changed = {n: site for n, site in sites.items() if n in ours or site.norm is not None}
        if graph is None or not changed:
            return _Proposal(self.model, ours, [layers[name] for name in ours], 0)
        plain = [layers[name] for name in ours if name not in changed]
        folded = sum(site.norm is not None for site in changed.values())
        fused = fusion.fuse(graph, changed, ours, {name: seen[name][0] for name in changed})
        return _Proposal(fused.module, ours, plain, folded, fused)

    def _layers(self) -> dict[str, nn.Module]:
        """The layers that can be exchanged, by name; the others are left, for a reason each."""
        layers = {}
        for name, module in self.model.named_modules():
            if isinstance(module, PYTORCHS):
                reason = _reason_to_leave(module)
                if reason is None:
                    layers[name] = module
                else:
                    self.left[name] = reason
        if not layers and not self.left:
            self.notes.append("the model has no 2-D convolutions: it was left as it was")
        return layers

    def _looked(self, layers: Mapping[str, nn.Module], fuse: bool) -> _Looked:
        with self._phase("looking"):
            found = self._seen(layers)
        if not fuse or not found.seen:
            return found
        with self._phase("tracing"):
            try:
                return self._fusable(layers, found)
            except fusion.Untraceable as error:
                self.notes.append(f"not fused: {error}")
                return found
            finally:
                self._state.put_back()

    def _seen(self, layers: Mapping[str, nn.Module]) -> _Looked:
        """How each layer is called, and what else the model does."""
        seen: dict[str, list[Call]] = {}
        if not layers:
            return _Looked(seen, "")
        operators = calls.Operators()

        @contextmanager
        def watch() -> Iterator[None]:
            with calls.watched(layers, seen), operators:
                yield

        try:
            preparation.call_without_data(self.model, self.example, self.named, watch=watch())
        except preparation.NeedsData as error:
            self.notes.append(f"the model was called to see its layers, as it {error}")
            seen.clear()
            operators = calls.Operators()
            with watch():
                self.model(*_cloned(self.example), **_cloned(self.named))
            self._state.put_back()
        self.left |= {name: "not called with this example" for name in layers if name not in seen}
        return _Looked(seen, operators.digest())

    def _fusable(self, layers: Mapping[str, nn.Module], found: _Looked) -> _Looked:
        """What was found, with the model's graph, and what can be fused in it.

        Raises:
            Untraceable: nothing can be.
        """
        reason = self._reason_not_to_fuse()
        if reason is not None:
            raise fusion.Untraceable(reason)
        graph = fusion.traced(self.model, self.example, self.named, self._state)
        once = [
            name
            for name, of_one in found.seen.items()
            if len(of_one) == 1 and not fusion.has_hooks(layers[name])
        ]
        if not fusion.sites(graph, once):
            raise fusion.Untraceable("nothing follows a convolution that could be")
        expected = self._result(self.model)
        other, again, counted = self._more_calls(self.model)
        words, unsteady = agreement.difference(expected["result"], again["result"])
        if words is not None or unsteady > _UNSTEADY:
            raise fusion.Untraceable(
                "the model's results differ from call to call, by "
                f"{words or format(unsteady, '.1%')}: whether a graph's are right cannot be told"
            )
        trouble = _disagreement(expected, self._result(graph.module), unsteady)
        if trouble is not None:
            raise fusion.Untraceable(trouble)
        of_graph, _, counted_by_graph = self._more_calls(graph.module)
        trouble = None if other is None else _disagreement(other, of_graph, unsteady)
        if trouble is not None:
            raise fusion.Untraceable(f"called once more, with other numbers, {trouble}")
        if counted != counted_by_graph:
            where = next(one for one, _ in counted.items() ^ counted_by_graph.items())
            raise fusion.Untraceable(f"each call changes {where}, which its graph's do not")
        written = fusion.written(self.model, lambda: self._result(self.model), self._state)
        sites = fusion.sites(graph, once, written)
        if not sites:
            raise fusion.Untraceable("the model writes to what could be fused")
        return _Looked(found.seen, found.structure, graph, sites, expected, unsteady)

    def _reason_not_to_fuse(self) -> str | None:
        leaves = (*self.model.parameters(), *tensors_of((self.example, self.named)))
        if self.model.training:
            return "the model is in training mode"
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
            return "gradients are recorded; for inference, optimize within torch.no_grad()"
        return None

    def _more_calls(self, model: nn.Module) -> tuple[Any, Any, dict[str, object]]:
        """What two more calls give, which may depend on what earlier ones have left.

        The first has other numbers than the example; None if the model does not take them.

        Returns:
            Both results, and which numbers of the model's the calls have changed.
        """
        kept = State()
        kept.take({"model": self.model})
        try:
            other = self._result(model, anew=False, other=True)
        except Exception:
            other = None
            self._result(model)
        again = self._result(model, anew=False)
        return other, again, kept.counts()

    def _result(self, model: nn.Module, anew: bool = True, other: bool = False) -> Any:
        """What a call gives, and what it leaves in its arguments, parameters and buffers.

        ``anew`` says that the model is as it was, and ``other``, that it is called with other
        numbers than the example's. Random numbers are always the same.
        """
        if anew:
            self._state.put_back()
        example, named = _cloned(self.example), _cloned(self.named)
        if other:
            example, named = tree_map_only(Tensor, _with_other_numbers, (example, named))
        torch.clear_autocast_cache()
        with same_random_numbers(_SEED):
            result = model(*example, **named)
        changed = self._state.changed()
        left = {
            name: tensor.detach().clone()
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
            if id(tensor) in changed
        }
        return {"result": result, "arguments": (example, named), "state": left}

    def _times(
        self, layers: Mapping[str, nn.Module], seen: Mapping[str, Sequence[Call]]
    ) -> dict[Call, Times | str]:
        """What each call takes, or why that cannot be told."""
        of = {call: layers[name] for name, of_one in seen.items() for call in of_one}
        found: dict[Call, Times | str] = {}
        for call, layer in of.items():
            kept = calls.kept(repr(call), _device(layer))
            if kept is not None:
                found[call] = kept
        missing = {call: layer for call, layer in of.items() if call not in found}
        if not missing:
            return found
        native.begin()  # and is there when the whole model is measured, or soon after
        with self._phase("planning"):
            failed, plans = _planned(missing)
            self.plans |= plans
        found |= failed
        # PyTorch looks for algorithms while our kernels are compiled in the background.
        with self._phase("PyTorch's first calls"):
            show = preparation.shower("PyTorch has called {} of {} layers", self.progress)
            for number, (call, layer) in enumerate(missing.items(), 1):
                with suppress(Exception):  # which it meets again when it is measured
                    calls.clock.first(Trial(call, layer, _device(layer)))
                _show(show, number, len(missing))
        with self._phase("compiling"):
            found |= _compiled(
                plans, preparation.shower("compiled {} of {} kernels", self.progress)
            )
        with self._phase("measuring layers"):
            show = preparation.shower("measured {} of {} layers", self.progress)
            for number, (call, layer) in enumerate(missing.items(), 1):
                if call not in found:
                    found[call] = _measured(call, layer)
                    self.measured += isinstance(found[call], Times)
                _show(show, number, len(missing))
        if any(_device(layer).type == "cuda" for layer in missing.values()):
            torch.cuda.empty_cache()
        return found

    def _make_ready(self, of: Mapping[Call, nn.Module]) -> None:
        """Loads what the chosen layers need, in processes that have not measured, too."""
        with self._phase("loading"):
            plans: dict[cuda.Need, Plan] = {}
            for call, layer in of.items():
                plans |= self.plans.get(call) or calls.plans(call, layer, _device(layer))
            show = preparation.shower("loaded {} of {} kernels", self.progress)
            preparation.make_ready(plans, show)

    def _whole(
        self, proposal: _Proposal, seen: Mapping[str, Sequence[Call]], structure: str
    ) -> Times:
        """Times of the model as it is and as proposed."""
        device = next(one.device for one in self.model.parameters() if is_gpu(one.device))
        # Without the native host path our layers take more of the host's time than PyTorch's, with
        # it less. Until it is there, the GPU's time decides.
        with_host = not native.under_way()
        if with_host:
            native.settle()
        elif _BY_GPU_TIME not in self.notes:
            self.notes.append(_BY_GPU_TIME)
        of = Counter((repr(call), name in proposal.ours) for name in seen for call in seen[name])
        about = {
            "fused": proposal.model is not self.model,
            "folded": proposal.folded,
            "with host": with_host,
            "by native": native.conv2d is not None,
            "structure": structure,
            "code": calls.code_of(self.model),
            "training": self.model.training,
            "calls": sorted(of.items()),
        }
        what = f"model, {hashlib.sha256(repr(about).encode()).hexdigest()}"
        times = calls.kept(what, device)
        if times is None:
            with self._phase("measuring the whole model"), _exchanged_back(proposal.plain):
                times = calls.clock.model(
                    [lambda: self._step(self.model), lambda: self._step(proposal.model)],
                    [lambda: _exchange(proposal.plain, back=True),
                     lambda: _exchange(proposal.plain)],
                    device,
                    with_host,
                )  # fmt: skip
            calls.keep(what, f"a model of {len(seen)} layers", device, times)
        return times

    def _trouble(self, proposal: _Proposal, looked: _Looked) -> str | None:
        """What is wrong with a fused model's results, if anything."""
        if proposal.fused is None:
            return None
        with self._phase("comparing"):
            result, trouble = proposal.fused.disagreement(self._result)
            self._state.put_back()
            return _disagreement(looked.expected, result, looked.unsteady) or trouble

    def _step(self, model: nn.Module) -> None:
        """A forward pass, and a backward pass where gradients are recorded; both are dropped."""
        torch.clear_autocast_cache()
        results = tensors_of(model(*self.example, **self.named))
        outputs = [one for one in results if one.requires_grad]
        if outputs:
            leaves = [
                leaf
                for leaf in (*model.parameters(), *tensors_of((self.example, self.named)))
                if leaf.requires_grad
            ]
            ones = [torch.ones_like(output) for output in outputs]
            results += torch.autograd.grad(outputs, leaves, ones, allow_unused=True)
        for device in {one.device for one in results if one is not None}:
            timing.synchronize(device)


def _with_other_numbers(tensor: Tensor) -> Tensor:
    """Another example for a model: the same images in another order, if there are several.

    Else the pixels are in another order; and of a constant, another one. Integers are indices or
    labels and stay what they are.
    """
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not (is_strided and tensor.dim() and (tensor.is_floating_point() or tensor.is_complex())):
        return tensor
    orders = (tensor.detach().roll(1, dimension) for dimension in (0, -1))
    found = next((one for one in orders if not is_same(one, tensor)), tensor.detach() * 0.5 + 0.25)
    return found.requires_grad_(tensor.requires_grad)


def _disagreement(expected: Any, found: Any, unsteady: float) -> str | None:
    """How a graph's results differ from the model's, if in more than one operation's rounding.

    A graph computes the same as its model, in the same order. Where the model's own results differ
    from call to call, by the share ``unsteady``, those of its graph may do so, too.
    """
    words, share = agreement.difference(expected, found)
    if words is not None:
        return f"its graph gives {words}"
    if share > max(2 * unsteady, agreement.rounding_of(expected)):
        return f"its graph's results are {share:.2g} of their norm off those of the model"
    return None


def _finished(proposal: _Proposal) -> _Proposal:
    if proposal.fused is None:
        return proposal
    return replace(proposal, model=proposal.fused.finished(), fused=None)


def _show(show: preparation.Show | None, done: int, total: int) -> None:
    if show is not None:
        show(done, total)


def _reason_to_leave(module: Any) -> str | None:
    """Why a layer cannot be exchanged, if it cannot."""
    if isinstance(module, Conv2d):
        return "fastconv's already"
    if type(module) is not PYTORCHS:
        return f"of another class, {type(module).__name__}"
    if "forward" in vars(module) or "_conv_forward" in vars(module):
        return "with a forward of their own"
    if module._parameters.get("weight") is None:
        return "with a weight that is computed"
    if not is_gpu(module.weight.device):
        return f"on {module.weight.device}"
    return None


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device


def _exchange(layers: Iterable[nn.Module], back: bool = False) -> None:
    for layer in layers:
        layer.__class__ = PYTORCHS if back else Conv2d


@contextmanager
def _exchanged_back(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Has layers be PyTorch's afterwards, whatever comes between."""
    try:
        yield
    finally:
        _exchange(layers, back=True)


def _planned(of: Mapping[Call, nn.Module]) -> tuple[dict[Call, str], dict[Call, _Plans]]:
    """Plans calls, and begins to compile what they need; what is wrong with those that fail."""
    failed: dict[Call, str] = {}
    plans: dict[Call, _Plans] = {}
    for call, layer in of.items():
        try:
            plans[call] = calls.plans(call, layer, _device(layer))
        except Exception as error:  # whatever it is, PyTorch's layer is there
            failed[call] = tables.error_line(error)
    return failed, plans


def _compiled(plans: Mapping[Call, _Plans], show: preparation.Show | None) -> dict[Call, str]:
    """Compiles what calls need, side by side; what is wrong with those for which it fails."""
    failed: dict[Call, str] = {}
    try:
        preparation.make_ready({n: p for each in plans.values() for n, p in each.items()}, show)
    except Exception:  # of one of them: which?
        for call, needed in plans.items():
            try:
                preparation.make_ready(needed)
            except Exception as error:
                failed[call] = tables.error_line(error)
    return failed


def _measured(call: Call, layer: nn.Module) -> Times | str:
    device = _device(layer)
    try:
        times = calls.clock.call(Trial(call, layer, device))
    except Exception as error:  # out of memory, say
        return tables.error_line(error)
    sizes = " ".join("x".join(map(str, form.shape)) for form in (call.input, call.weight))
    calls.keep(repr(call), f"a layer, {sizes}", device, times)
    return times


def _gains(found: Sequence[Times | str]) -> bool:
    """Whether a layer should be ours, by all of its calls together."""
    times = [one for one in found if not isinstance(one, str)]
    return len(times) == len(found) and Times.sum(times).gains


def _rows(
    seen: Mapping[str, Sequence[Call]],
    found: Mapping[Call, Times | str],
    ours: Collection[str],
    words: Mapping[str, str],
) -> Iterator[MeasuredLayer]:
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


# --- Several processes ----------------------------------------------------------------------------


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _agreed(decide: Callable[[], _Value]) -> _Value:
    """What rank 0 decides, in all processes."""
    if not _is_distributed():
        return decide()
    rank_0 = dist.get_rank() == 0
    return _gathered(lambda: decide() if rank_0 else None)[0]  # type: ignore[return-value]


def _each(do: Callable[[], _Value]) -> _Value:
    """What it gives here, if it does not fail in any process."""
    kept: list[_Value] = []
    _gathered(lambda: kept.append(do()))
    return kept[0]


def _alike(what: str, value: _Value) -> _Value:
    """A value that has to be the same in all processes, or all of them raise."""
    others = _gathered(lambda: (what, value))
    for rank, (words, other) in enumerate(others):
        if other != others[0][1]:
            raise ValueError(
                "optimize() takes the same model in all processes, but they differ: in rank 0 it "
                f"{_said(*others[0])}, in rank {rank} it {_said(words, other)}"
            )
    return value


def _said(words: str, value: object) -> str:
    return words if value else f"is not one that {words.rstrip()}"


def _gathered(do: Callable[[], _Value]) -> list[_Value]:
    """What it gives in each process, by rank. If it fails in one, all raise: none waits."""
    if not _is_distributed():
        return [do()]
    value, error = None, None
    try:
        value = do()
    except Exception as caught:  # the others wait
        error = caught
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (value, error and tables.error_line(error)))
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(every):
        if failed is not None:
            raise RuntimeError(f"optimize() failed in rank {rank}: {failed}")
    return [one for one, _ in every]

"""``optimize``: a network with those convolutions exchanged that gain by it, and no others."""

from __future__ import annotations

import copy
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from fastconv import calls, fusion, native, preparation, tables, timing
from fastconv.backends import cuda
from fastconv.calls import Call, Times, Trial
from fastconv.kernels.family import Plan
from fastconv.modules import PYTORCHS, Conv2d, FusedConv2d
from fastconv.preparation import is_gpu, tensors_of
from fastconv.problem import is_channels_last

_REPORT = "fastconv_optimization"
_MARK = "_fastconv_exchanged"  # on layers that are ours by optimize

# By how much a fused model's results may differ from the model's, as a share of their norm. Only
# roundings should differ; of numbers of 16 bits, a deep network makes much of them.
_AGREEMENT, _HALF_AGREEMENT = 0.02, 0.1

_Value = TypeVar("_Value")


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

    def __str__(self) -> str:
        lines = [*self._table(), *self._sums(), *self._left(), *self.notes]
        kept = sum(row.times is not None for row in self.layers) - self.measured
        lines.append(f"{self.measured} measured, {kept} known from earlier, {self.seconds:.1f} s")
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
    format = "nhwc" if is_channels_last(call.input.shape, call.input.stride) else "nchw"
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
    ``torch.fx.GraphModule`` for inference alone. What cannot be traced is not fused.

    Times are kept on disk beside the kernels: the next process takes them from there. Where
    ``torch.distributed`` is initialized, all processes have to call it, and rank 0 decides.

    Args:
        model: on a GPU. What wraps it (``torch.compile``, DDP, FSDP) comes later.
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
        ValueError: there is no example, something is not on a GPU, or the model is wrapped.
    """
    start = time.perf_counter()
    _check(model, example, named)
    target = model if inplace else _copied(model)
    if hasattr(model, _REPORT):
        setattr(target, _REPORT, getattr(model, _REPORT))  # which copies of graphs lose
        return target
    work = _Work(target, _cloned(example), _cloned(named), progress)
    with _untouched(target):
        optimized, report = work.done(fuse=fuse and not inplace)
    seconds = time.perf_counter() - start
    setattr(optimized, _REPORT, Optimization(**report, seconds=seconds))
    return optimized


def restore(model: nn.Module) -> nn.Module:
    """Undoes what :func:`optimize` did: its layers are PyTorch's again. Others stay ours.

    Returns:
        The model.

    Raises:
        ValueError: the model was fused. It is a copy; the model that it was made of is as it was.
    """
    if any(map(_is_fused, model.modules())):
        raise ValueError(
            "restore() cannot take a fused model apart: it is a copy, and the model that it was "
            "made of is as it was"
        )
    for module in model.modules():
        state = vars(module)
        if state.pop(_MARK, False) and type(module) is Conv2d:
            module.__class__ = PYTORCHS
        state.pop(_REPORT, None)
    return model


def _is_fused(module: nn.Module) -> bool:
    report = vars(module).get(_REPORT)
    return isinstance(module, FusedConv2d) or (isinstance(report, Optimization) and report.fused)


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
    for what, of in (("model", parameters), ("example", tensors)):
        if of and not any(is_gpu(tensor.device) for tensor in of):
            raise ValueError(
                f"optimize() measures on a GPU, but the {what} is on {of[0].device}: there is "
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


def _cloned(values: Any) -> Any:
    """The same with tensors of its own: models may write to what they are given."""
    return tree_map_only(
        Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), values
    )


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Puts back the state of random numbers, and all buffers."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    values = {
        id(buffer): (buffer, buffer.detach().clone())
        for _, of_one in buffers
        for buffer in of_one.values()
        if buffer is not None
    }
    numbers = random.getstate()
    try:
        with torch.random.fork_rng(_gpus(model)):
            yield
    finally:
        random.setstate(numbers)
        for module, of_one in buffers:
            module._buffers.update(of_one)
        with torch.no_grad():
            for buffer, value in values.values():
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _gpus(model: nn.Module) -> list[int]:
    devices = {tensor.device for tensor in model.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda")


# --- The work -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Proposal:
    """What a model could be."""

    model: nn.Module  # itself, or a graph of it
    ours: Collection[str]  # names of layers
    plain: Sequence[nn.Module]  # those of them whose class is all that changes
    folded: int

    @property
    def changes(self) -> bool:
        return bool(self.ours or self.folded)


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

    def done(self, fuse: bool) -> tuple[nn.Module, dict[str, Any]]:
        """The model as it should be, and the report's fields."""
        layers = self._layers()
        seen = self._seen(layers)
        graph, sites = self._fusable(layers, seen) if fuse else (None, {})
        if graph is not None:
            for name, site in sites.items():
                seen[name] = [fusion.with_followers(seen[name][0], site, graph)]
        found = _agreed(lambda: self._times(layers, seen))
        ours = [name for name, of_one in seen.items() if _gains([found[call] for call in of_one])]
        proposal = self._proposal(layers, ours, graph, sites)
        whole: Times | None = None
        if proposal.changes:
            self._make_ready({call: layers[name] for name in ours for call in seen[name]})
            whole, trouble = _agreed(lambda: self._whole(proposal, seen))
            gains = whole is not None and whole.gains
            if trouble is None and not gains and proposal.model is not self.model:
                trouble = "the model as a whole is not faster so"
            if trouble is not None:
                self.notes.append(f"not fused: {trouble}")
                return self.done(fuse=False)
            if not gains:
                self.notes.append("the model as a whole is not faster: it was left as it was")
                proposal = _Proposal(self.model, (), (), 0)
        _exchange(proposal.plain)
        for layer in proposal.plain:
            vars(layer)[_MARK] = True
        return proposal.model, {
            "layers": tuple(_rows(seen, found, proposal.ours, sites)),
            "exchanged": tuple(proposal.ours),
            "folded": proposal.folded,
            "left": dict(self.left),
            "before_ms": whole and whole.theirs,
            "after_ms": whole and whole.ours,
            "fused": proposal.model is not self.model,
            "measured": self.measured,
            "notes": tuple(self.notes),
        }

    def _proposal(
        self,
        layers: Mapping[str, nn.Module],
        ours: Collection[str],
        graph: fusion.Traced | None,
        sites: Mapping[str, fusion.Site],
    ) -> _Proposal:
        plain = [layers[name] for name in ours if name not in sites]
        folded = sum(site.norm is not None for site in sites.values())
        if graph is None or not (ours or folded):
            return _Proposal(self.model, ours, plain, 0)
        return _Proposal(fusion.fuse(graph, sites, ours), ours, plain, folded)

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

    def _seen(self, layers: Mapping[str, nn.Module]) -> dict[str, list[Call]]:
        """How each layer is called, by its name."""
        seen: dict[str, list[Call]] = {}
        if not layers:
            return seen
        try:
            preparation.call_without_data(
                self.model, self.example, self.named, watch=calls.watched(layers, seen)
            )
        except preparation.NeedsData as error:
            self.notes.append(f"the model was called to see its layers, as it {error}")
            seen.clear()
            with calls.watched(layers, seen):
                self.model(*self.example, **self.named)
        self.left |= {name: "not called with this example" for name in layers if name not in seen}
        return seen

    def _fusable(
        self, layers: Mapping[str, nn.Module], seen: Mapping[str, Sequence[Call]]
    ) -> tuple[fusion.Traced | None, dict[str, fusion.Site]]:
        """The model's graph, and what can be fused in it."""
        reason = self._reason_not_to_fuse(seen)
        if reason is None:
            try:
                graph = fusion.traced(self.model, self.example, self.named)
                once = [
                    name
                    for name, of_one in seen.items()
                    if len(of_one) == 1 and not fusion.has_hooks(layers[name])
                ]
                if sites := fusion.sites(graph, once):
                    return graph, sites
                reason = "nothing follows a convolution that could be"
            except fusion.Untraceable as error:
                reason = str(error)
        if seen:
            self.notes.append(f"not fused: {reason}")
        return None, {}

    def _reason_not_to_fuse(self, seen: Mapping[str, Sequence[Call]]) -> str | None:
        every = [call for of_one in seen.values() for call in of_one]
        if self.model.training:
            return "the model is in training mode"
        if any(call.gradients for call in every):
            return "gradients are recorded; for inference, optimize within torch.no_grad()"
        if len({call.autocast for call in every}) > 1:
            return "the model sets autocast itself, which torch.fx would lose"
        return None

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
        found |= _compiled(missing, preparation.shower("compiled {} of {} kernels", self.progress))
        native.settle()
        show = preparation.shower("measured {} of {} layers", self.progress)
        for number, (call, layer) in enumerate(missing.items(), 1):
            if call not in found:
                found[call] = _measured(call, layer)
                self.measured += isinstance(found[call], Times)
            if show is not None:
                show(number, len(missing))
        if any(_device(layer).type == "cuda" for layer in missing.values()):
            torch.cuda.empty_cache()
        return found

    def _make_ready(self, of: Mapping[Call, nn.Module]) -> None:
        """Loads what the chosen layers need, in processes that have not measured, too."""
        plans: dict[cuda.Need, Plan] = {}
        for call, layer in of.items():
            plans |= calls.plans(call, layer, _device(layer))
        preparation.make_ready(plans, preparation.shower("loaded {} of {} kernels", self.progress))

    def _whole(
        self, proposal: _Proposal, seen: Mapping[str, Sequence[Call]]
    ) -> tuple[Times | None, str | None]:
        """Times of the model as it is and as proposed; or what is wrong with the proposal."""
        device = next(one.device for one in self.model.parameters() if is_gpu(one.device))
        fused = proposal.model is not self.model
        if fused and (trouble := self._trouble(proposal, seen)) is not None:
            return None, trouble
        native.settle()
        of = Counter((repr(call), name in proposal.ours) for name in seen for call in seen[name])
        by_native = native.conv2d is not None
        what = f"model, {fused=}, {by_native=}, {proposal.folded}: {sorted(of.items())}"
        times = calls.kept(what, device)
        if times is None:
            with _exchanged_back(proposal.plain):
                times = calls.clock.model(
                    [lambda: self._step(self.model), lambda: self._step(proposal.model)],
                    [lambda: _exchange(proposal.plain, back=True),
                     lambda: _exchange(proposal.plain)],
                    device,
                )  # fmt: skip
            calls.keep(what, f"a model of {len(seen)} layers", device, times)
        return times, None

    def _trouble(self, proposal: _Proposal, seen: Mapping[str, Sequence[Call]]) -> str | None:
        """What is wrong with the fused model's results, if anything."""

        def result(model: nn.Module) -> Any:
            with torch.random.fork_rng(_gpus(self.model)), torch.no_grad():
                return model(*_cloned(self.example), **_cloned(self.named))

        expected = result(self.model)
        with _exchanged_back(proposal.plain):
            _exchange(proposal.plain)
            found = result(proposal.model)
        halves = any(call.dtype.itemsize == 2 for of_one in seen.values() for call in of_one)
        return fusion.disagreement(expected, found, _HALF_AGREEMENT if halves else _AGREEMENT)

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


def _compiled(of: Mapping[Call, nn.Module], show: preparation.Show | None) -> dict[Call, str]:
    """Compiles what calls need, side by side; what is wrong with those for which it fails."""
    failed: dict[Call, str] = {}
    plans: dict[Call, dict[cuda.Need, Plan]] = {}
    for call, layer in of.items():
        try:
            plans[call] = calls.plans(call, layer, _device(layer))
        except Exception as error:  # whatever it is, PyTorch's layer is there
            failed[call] = tables.error_line(error)
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
    sites: Mapping[str, fusion.Site],
) -> Iterator[MeasuredLayer]:
    for call in dict.fromkeys(call for of_one in seen.values() for call in of_one):
        names = [name for name, of_one in seen.items() if call in of_one]
        times = found[call]
        yield MeasuredLayer(
            call,
            sites[names[0]].words if names[0] in sites else "",
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
    sent: list[Any] = [None, None]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            sent[0] = decide()
        except Exception as caught:  # the others wait
            error, sent[1] = caught, tables.error_line(caught)
    dist.broadcast_object_list(sent, src=0)
    if error is not None:
        raise error
    if sent[1] is not None:
        raise RuntimeError(f"optimize() failed in rank 0: {sent[1]}")
    value: _Value = sent[0]
    return value

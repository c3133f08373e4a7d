"""The times of a model's layers and of the whole model, measured or stored from earlier."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import nn

from fastconv import native, tables
from fastconv.network import calls, preparation
from fastconv.network.block_calls import BlockCall
from fastconv.network.calls import Call, Times
from fastconv.network.norm_calls import NormCall
from fastconv.network.proposal import Proposal
from fastconv.network.subject import Plans, Subject

AnyCall = Call | NormCall | BlockCall
"""The call of a convolution, of a block's BatchNorm, or of both."""

_BY_GPU_TIME = (
    "the whole model was measured by the GPU's time alone, as the native host path was still being "
    "built"
)
_UNDECIDED = (
    "by the clock the whole model is neither faster nor slower{}: the GPU's time alone decided"
)


def layer_times(
    subject: Subject, layers: Mapping[str, nn.Module], seen: Mapping[str, Sequence[AnyCall]]
) -> dict[AnyCall, Times | str]:
    """The times of each call of a layer or a block, or why there are none."""
    of = {call: layers[name] for name, of_one in seen.items() for call in of_one}
    found: dict[AnyCall, Times | str] = {}
    for call, layer in of.items():
        stored = calls.stored_times(repr(call), _device(layer, subject))
        if stored is not None:
            found[call] = stored
    missing = {call: layer for call, layer in of.items() if call not in found}
    if not missing:
        return found
    # The host path is built by the time the whole model is measured, or soon after.
    native.start_build()
    with subject.timed("planning"):
        failed, plans = _planned(missing, subject)
        subject.plans |= plans
    found |= failed
    # PyTorch tries its algorithms out while fastconv's kernels are compiled in the background.
    with subject.timed("PyTorch's first calls"):
        show = subject.shower("PyTorch has called {} of {} layers")
        for number, (call, layer) in enumerate(missing.items(), 1):
            with suppress(Exception):  # the measurement raises it again
                calls.clock.first(call.trial(layer, _device(layer, subject)))
            show(number, len(missing))
    with subject.timed("compiling"):
        found |= _compiled(plans, subject.shower("compiled {} of {} kernels"))
    with subject.timed("measuring layers"):
        show = subject.shower("measured {} of {} layers")
        for number, (call, layer) in enumerate(missing.items(), 1):
            if call not in found:
                found[call] = _measured(call, layer, _device(layer, subject))
                # A report has no row of its own for a convolution with its BatchNorm.
                is_row = not isinstance(call, BlockCall)
                subject.measured += is_row and isinstance(found[call], Times)
            show(number, len(missing))
    if any(_device(layer, subject).type == "cuda" for layer in missing.values()):
        torch.cuda.empty_cache()
    return found


def gains(found: Sequence[Times | str]) -> bool:
    """Whether a layer should be fastconv's, by all of its calls together."""
    times = [one for one in found if not isinstance(one, str)]
    return len(times) == len(found) and Times.sum(times).gains


def load_chosen(subject: Subject, of: Mapping[AnyCall, nn.Module]) -> None:
    """Loads the kernels of the chosen layers, also in processes that have not measured."""
    with subject.timed("loading"):
        plans: Plans = {}
        for call, layer in of.items():
            plans |= subject.plans.get(call) or calls.plans(call, layer, _device(layer, subject))
        preparation.load_kernels(plans, subject.shower("loaded {} of {} kernels"))


def model_times(
    subject: Subject, proposal: Proposal, seen: Mapping[str, Sequence[Call]], structure: str
) -> Times:
    """The times of the whole model as it is and as proposed.

    Args:
        subject: the model as it is.
        proposal: what it could become.
        seen: the calls of each layer, by its name.
        structure: a hash of the operators that the model calls.
    """
    # Without the native host path fastconv's layers take more host time than PyTorch's, with it
    # less. Until it is built, the GPU's time decides.
    if native.under_way():
        if _BY_GPU_TIME not in subject.notes:
            subject.notes.append(_BY_GPU_TIME)
        return _model_times(subject, proposal, seen, structure, with_host=False)
    native.settle()
    times = _model_times(subject, proposal, seen, structure, with_host=True)
    if not times.undecided:
        return times
    fused = proposal.model is not subject.model or proposal.blocks
    subject.notes.append(_UNDECIDED.format(" when fused" if fused else ""))
    return _model_times(subject, proposal, seen, structure, with_host=False)


def _model_times(
    subject: Subject,
    proposal: Proposal,
    seen: Mapping[str, Sequence[Call]],
    structure: str,
    with_host: bool,
) -> Times:
    """The times of the whole model by the clock, or by the GPU's time."""
    device = subject.device
    of = Counter((repr(call), name in proposal.ours) for name in seen for call in seen[name])
    about = {
        "fused": proposal.model is not subject.model,
        "folded": proposal.folded,
        "blocks": sorted(proposal.blocks),
        "with host": with_host,
        "by native": native.conv2d is not None,
        "structure": structure,
        "code": calls.code_of(subject.model),
        "training": subject.model.training,
        "calls": sorted(of.items()),
    }
    what = f"model, {hashlib.sha256(repr(about).encode()).hexdigest()}"
    times = calls.stored_times(what, device)
    if times is None:
        with subject.timed("measuring the whole model"), proposal.undone():
            times = calls.clock.model(
                [lambda: subject.run(subject.model), lambda: subject.run(proposal.model)],
                [proposal.undo, proposal.apply],
                device,
                with_host,
            )
        calls.store_times(what, f"a model of {len(seen)} layers", device, times)
    return times


def _device(layer: nn.Module, subject: Subject) -> torch.device:
    """The device of a layer; a BatchNorm without any tensor is taken to be on the model's."""
    found = next((one.device for one in (*layer.parameters(), *layer.buffers())), None)
    return subject.device if found is None else found


def _planned(
    of: Mapping[AnyCall, nn.Module], subject: Subject
) -> tuple[dict[AnyCall, str], dict[AnyCall, Plans]]:
    """Plans calls and begins to compile their kernels; errors of calls that cannot be planned."""
    failed: dict[AnyCall, str] = {}
    plans: dict[AnyCall, Plans] = {}
    for call, layer in of.items():
        try:
            plans[call] = calls.plans(call, layer, _device(layer, subject))
        except Exception as error:  # the layer then stays PyTorch's
            failed[call] = tables.error_line(error)
    return failed, plans


def _compiled(plans: Mapping[AnyCall, Plans], show: preparation.Show) -> dict[AnyCall, str]:
    """Compiles kernels side by side; the result has the errors of calls for which it failed."""
    failed: dict[AnyCall, str] = {}
    try:
        preparation.load_kernels({n: p for each in plans.values() for n, p in each.items()}, show)
    except Exception:  # which call it belongs to shows when each is compiled by itself
        for call, needed in plans.items():
            try:
                preparation.load_kernels(needed)
            except Exception as error:
                failed[call] = tables.error_line(error)
    return failed


def _measured(call: AnyCall, layer: nn.Module, device: torch.device) -> Times | str:
    """Measures a call and stores its times; the error if that fails."""
    try:
        times = calls.clock.call(call.trial(layer, device))
    except Exception as error:  # such as out of memory
        return tables.error_line(error)
    sizes = " ".join("x".join(map(str, form.shape)) for form in call.forms)
    calls.store_times(repr(call), f"a {call.kind}, {sizes}", device, times)
    return times

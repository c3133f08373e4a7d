"""``optimize``: convolutions of a network exchanged for fastconv's where that is faster."""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from fastconv.network import ranks
from fastconv.network.decision import decided, left_alone
from fastconv.network.dry_run import tensors_of
from fastconv.network.exchange import Model, copied
from fastconv.network.preparation import is_gpu
from fastconv.network.report import REPORT, Optimization
from fastconv.network.subject import Subject, cloned


def optimize(
    model: Model,
    *example: Any,
    inplace: bool = False,
    fuse: bool = True,
    recompute: bool = False,
    progress: bool | None = None,
    **named: Any,
) -> Model:
    """The model with those of its convolutions computed by fastconv that are faster that way.

    Each ``torch.nn.Conv1d`` to ``Conv3d`` and ``ConvTranspose1d`` to ``ConvTranspose3d`` is
    measured as the model calls it, on this GPU, by PyTorch and by fastconv; then the whole model is
    measured, before and after. A layer that gains nothing stays PyTorch's, and if the model as a
    whole is not faster, so do all of its layers.

    Call it as the model will be called: in the same mode (``train``, ``eval``), under the same
    ``autocast`` and ``fastconv.precision``, with an example of the same size, type and memory
    format. Gradients are measured where autograd would record them: for inference, call it
    within ``torch.no_grad()`` or ``torch.inference_mode()``.

    A layer that is exchanged stays the same object, with its parameters, hooks and state: only its
    class becomes ``fastconv.Conv2d``, or that of its kind; or one derived from that and from its
    own, where its own is derived from PyTorch's and only adds to it. Layers of other derived
    classes are left as they are. A layer that is called with other sizes later keeps its choice.

    In training, each BatchNorm is also measured with the addition and the activation behind it, and
    computed by ``fastconv.batch_norm_act`` where that gains. The model keeps its modules,
    parameters, hooks and state dict: modules whose ``forward`` has such blocks get a class derived
    from their own. ``fuse=False`` leaves them. With ``recompute=True``, activations that only the
    next block's convolution reads are not kept for the backward pass, but computed again there,
    with the same bits: a step takes less memory and a little more time.

    In inference, in ``eval`` mode, a copy is also fused: by ``torch.fx``, BatchNorms are folded
    into weights, and activations and additions become part of kernels. The result is then a
    ``torch.fx.GraphModule`` for inference alone, without the other methods and attributes of the
    model's class, whatever its annotation says; ``fuse=False`` keeps the class. A model that cannot
    be traced, or that sets ``autocast`` or the like for a part of itself, is not fused. The graph
    has to give the model's results, and each fused layer those of its parts, but for rounding.

    Times are stored on disk beside the kernels, and the next process takes them from there. Where
    ``torch.distributed`` is initialized, all processes have to call it, and rank 0 decides.

    Where there is no GPU, nothing is measured and the model is left as it was: the report says so.

    Args:
        model: on a GPU, if there is one. Wrap it (``torch.compile``, DDP, FSDP) afterwards.
        *example: what it will be called with.
        inplace: change the model itself instead of a copy. An optimizer that was made before holds
            the parameters of the model, not those of a copy.
        fuse: whether to fuse, in inference and in training.
        recompute: whether blocks of training keep less and compute more.
        progress: whether to show on stderr how far it is; by default, if that is a terminal.
        **named: the example's arguments by name.

    Returns:
        The model or the copy, with a ``fastconv.Optimization`` as ``fastconv_optimization``, which
        says what was measured and done. A model that was optimized before comes back as it
        is: ``fastconv.restore`` it first to decide anew.

    Raises:
        TypeError: the model is no ``torch.nn.Module``.
        ValueError: there is no example, there is a GPU but the model or the example is not on it,
            the model is wrapped, or processes have different models.
        RuntimeError: the model cannot be copied.
        fastconv.CompilationError: the compiler refuses a kernel.
        fastconv.GpuUnavailable: this machine lacks what the kernels need beside the GPU.
        fastconv.LaunchError: the CUDA driver refuses a kernel.

    Examples:
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).to(device)
        >>> images = torch.randn(2, 3, 9, 9, device=device)
        >>> with torch.no_grad():  # for inference
        ...     fast = fastconv.optimize(model.eval(), images)
        >>> print(fast.fastconv_optimization)  # with a GPU, a table of all layers
        there is no GPU: nothing was measured, and the model is as it was
        0 distinct calls measured, 0 known from earlier, ... s

        For training, the model itself changes, so that its optimizer keeps its parameters:

        >>> model = fastconv.optimize(model.train(), images, inplace=True)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    """
    start = time.perf_counter()
    ranks.in_each(lambda: _check(model, example, named))
    target: Model = model if inplace else ranks.in_each(lambda: copied(model, "optimize"))
    if ranks.same_in_all("has been optimized before", hasattr(model, REPORT)):
        setattr(target, REPORT, getattr(model, REPORT))  # copies of graphs lack it
        return target
    subject = Subject(target, cloned(example), cloned(named), progress)
    reasons = ranks.gathered(lambda: _reason_not_to_measure(model))
    reason = next(filter(None, reasons), None)
    if reason is not None:
        proposal, report = left_alone(subject, reason)
    else:
        proposal, report = decided(subject, fuse=fuse, inplace=inplace, recompute=recompute)
    # The model changes only here: if anything before raises, it stays as it was.
    proposal.apply_for_good()
    seconds = time.perf_counter() - start
    setattr(proposal.model, REPORT, Optimization(**report, seconds=seconds))
    return cast(Model, proposal.model)


def _check(model: nn.Module, example: Any, named: Any) -> None:
    """Raises if the model cannot be measured with this example."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"optimize() takes a torch.nn.Module, not {type(model).__name__}")
    tensors = tensors_of((example, named))
    if not tensors:
        raise ValueError(
            "optimize() takes a model and an example of what it is called with, which has tensors: "
            "optimize(model, torch.randn(8, 3, 224, 224)), for one"
        )
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
    # Without a GPU there is nothing to move to, so both may be on the CPU. If only one of them is,
    # that is a mistake on any machine.
    if elsewhere and (torch.cuda.is_available() or (len(elsewhere) == 1 and parameters)):
        what, device = next(iter(elsewhere.items()))
        raise ValueError(
            f"optimize() measures on a GPU, but the {what} is on {device}: there is "
            f"nothing to gain there. Move the model and the example to a GPU first"
        )
    if hasattr(model, "_orig_mod"):
        raise ValueError("optimize() takes a model before torch.compile, which may follow")
    if ranks.is_distributed():
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
                "processes hold: optimize the model before it is distributed"
            )


def _reason_not_to_measure(model: nn.Module) -> str | None:
    devices = {parameter.device for parameter in model.parameters()}
    if devices and not any(map(is_gpu, devices)):
        return "there is no GPU: nothing was measured, and the model is as it was"
    return None

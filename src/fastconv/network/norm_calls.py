"""The call of a BatchNorm with what follows it, as a value: repeated with random data and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastconv.backends.epilogue import applied
from fastconv.batchnorm import batch_norm_act
from fastconv.geometry import Activation, activation_of
from fastconv.network.calls import Form, Passes
from fastconv.problem import Epilogue


@dataclass(frozen=True)
class NormCall:
    """Everything that the time of a block's BatchNorm depends on, except machine and settings."""

    kind: str  # the name of the layer's class in PyTorch: "BatchNorm2d"
    input: Form
    parameters: torch.dtype | None  # the type of weight and bias, if there are any
    statistics: torch.dtype | None  # the type of running statistics, if they are updated or read
    of_batch: bool  # whether it normalizes with the statistics of the batch
    gradients: tuple[str, ...]  # those that autograd computes: of "input", "parameters"
    activation: Activation | None = None
    residual: Form | None = None

    @classmethod
    def of(cls, module: Any, input: Tensor) -> NormCall:
        """The call of a BatchNorm with this input, without what follows it."""
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        weight, mean = module.weight, module.running_mean
        wanted = {
            "input": input.requires_grad,
            "parameters": weight is not None and weight.requires_grad,
        }
        return cls(
            type(module).__name__,
            Form.of(input),
            None if weight is None else weight.dtype,
            None if mean is None else mean.dtype,
            module.training or mean is None,
            tuple(name for name, wants in wanted.items() if recorded and wants),
        )

    def followed(self, activation: Activation | None, residual: Form | None) -> NormCall:
        """The call with what follows it."""
        return replace(self, activation=activation, residual=residual)

    def trial(self, layer: nn.Module, device: torch.device) -> NormTrial:
        """The call with random data."""
        return NormTrial(self, device)

    @property
    def forms(self) -> tuple[Form, ...]:
        """Of the operands by whose sizes people know the call."""
        return (self.input,)

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the call is computed."""
        return self.input.dtype


@contextmanager
def watched_norms(
    norms: Mapping[str, nn.Module], seen: dict[str, list[NormCall]]
) -> Iterator[None]:
    """Records how BatchNorms are called, by name."""

    def record(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        input = args[0] if args else kwargs["input"]
        seen.setdefault(name, []).append(NormCall.of(module, input))

    handles = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in norms.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class NormTrial(Passes):
    """A call with random data, by PyTorch's operations and by fastconv."""

    def __init__(self, call: NormCall, device: torch.device) -> None:
        self.call = call
        self.input = call.input.random(device)
        self.residual = None if call.residual is None else call.residual.random(device)
        channels = (call.input.shape[1],)
        self.parameters: list[Tensor | None] = [None, None]
        if call.parameters is not None:
            self.parameters = [
                torch.randn(channels, dtype=call.parameters, device=device) for _ in range(2)
            ]
        self.statistics: list[Tensor | None] = [None, None]
        if call.statistics is not None:
            self.statistics = [
                torch.ones(channels, dtype=call.statistics, device=device) for _ in range(2)
            ]
        of_input = [one for one in (self.input, self.residual) if one is not None]
        wanted = {"input": of_input, "parameters": [p for p in self.parameters if p is not None]}
        self.wanted = [one.requires_grad_() for name in call.gradients for one in wanted[name]]

    def pytorchs(self) -> object:
        return self._passes(self._pytorchs_forward)

    def ours(self) -> object:
        return self._passes(self.ours_forward)

    def _pytorchs_forward(self, input: Tensor, residual: Tensor | None) -> Tensor:
        (mean, var), (weight, bias) = self.statistics, self.parameters
        output = F.batch_norm(input, mean, var, weight, bias, self.call.of_batch)
        return applied(output, residual, Epilogue(*activation_of(self.call.activation)))

    def ours_forward(self, input: Tensor, residual: Tensor | None) -> Tensor:
        (mean, var), (weight, bias) = self.statistics, self.parameters
        return batch_norm_act(
            input, mean, var, weight, bias, self.call.of_batch,
            activation=self.call.activation, residual=residual,
        )  # fmt: skip

    def _passes(self, forward: Any) -> object:
        with torch.set_grad_enabled(bool(self.wanted)):
            return self.gradients(forward(self.input, self.residual))

"""Each block of a proposal, compared with the operations that it takes the place of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastconv import tables
from fastconv.backends.epilogue import applied
from fastconv.batchnorm import bn_act, conv_of_bn_act
from fastconv.geometry import Activation, activation_of
from fastconv.network.agreement import norm_disagreement
from fastconv.network.proposal import Proposal
from fastconv.network.subject import Subject
from fastconv.problem import Epilogue


def disagreement(subject: Subject, proposal: Proposal) -> str | None:
    """How a block differs from its parts if by more than rounding, or why a step fails.

    The model is called with PyTorch's operations in all blocks, and fused ones on the same inputs.
    """
    comparison = _Comparison()
    names = {bn_act: comparison.norm, conv_of_bn_act: comparison.conv_norm}
    graphs = {module: graph.with_names(names) for module, graph in proposal.graphs.items()}
    compared = replace(proposal, graphs=graphs)

    def call(*args: Any, **kwargs: Any) -> Any:
        with compared.undone():
            compared.apply()
            return subject.model(*args, **kwargs)

    try:
        subject.result(call)
    except Exception as error:
        return f"its graph fails: {tables.error_line(error)}"
    modules = dict(subject.model.named_modules(remove_duplicate=False))
    for name in proposal.blocks:
        words = comparison.said.get(id(modules[name]), "nothing, as its graph is not called")
        if words is not None:
            return f"{name} with what follows it gives {words}"
    try:
        with proposal.undone():
            proposal.apply()
            subject.run(subject.model)
    except Exception as error:  # PyTorch may allow to write to what a block keeps for the gradients
        return f"its step fails: {tables.error_line(error)}"
    return None


class _Comparison:
    """Takes the place of blocks' functions: gives PyTorch's results, and compares ours with them.

    ``said`` has for each BatchNorm, by its id, how they differ.
    """

    def __init__(self) -> None:
        self.said: dict[int, str | None] = {}

    def conv_norm(self, conv: Any, bn: Any, input: Tensor, *rest: Any, **_: Any) -> Tensor:
        # Other options choose what is kept: here the input is PyTorch's, which is kept anyway.
        before = _buffers(bn)
        found = conv_of_bn_act(conv, bn, input, *rest)
        return self._compared(bn, conv.forward(input), rest, found, before)

    def norm(self, bn: Any, input: Tensor, *rest: Any) -> Tensor:
        before = _buffers(bn)
        return self._compared(bn, input, rest, bn_act(bn, input, *rest), before)

    def _compared(
        self, bn: Any, input: Tensor, rest: Any, found: Tensor, before: dict[str, Tensor]
    ) -> Tensor:
        """PyTorch's result; ``before`` are the BatchNorm's buffers before our call."""
        ours = _buffers(bn)
        with torch.no_grad():
            for name, value in before.items():
                bn._buffers[name].copy_(value)
        expected = _parts(bn, input, *rest)
        words = norm_disagreement(bn, input, rest[0], rest[1], expected, found, ours, before)
        self.said[id(bn)] = self.said.get(id(bn)) or words
        return expected


def _buffers(bn: Any) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in bn._buffers.items() if one is not None}


def _parts(
    bn: Any,
    input: Tensor,
    residual: Tensor | None,
    activation: Activation | None,
    adds_in_place: bool,
) -> Tensor:
    """The result of the operations that a block takes the place of."""
    output: Tensor = type(bn).forward(bn, input)
    if residual is not None:
        output = output.add_(residual) if adds_in_place else output + residual
    return applied(output, None, Epilogue(*activation_of(activation)))

"""The model that ``optimize`` works on: how it is called, and what is gathered for the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fastconv import timing
from fastconv.kernels.family import Plan
from fastconv.network import preparation
from fastconv.network.dry_run import tensors_of
from fastconv.network.snapshot import Snapshot, same_random_numbers
from fastconv.network.tensor_record import is_same

# The seed of calls whose results are compared. Any number would do.
_SEED = 1729

Plans = dict[preparation.Need, Plan]
"""The plans of all passes of a call."""


@dataclass
class Subject:
    """One model on its way through :func:`fastconv.optimize`."""

    model: nn.Module
    example: Any
    named: Any
    progress: bool | None
    left: dict[str, str] = field(default_factory=dict)  # layers that are not measured, and why
    notes: list[str] = field(default_factory=list)  # for the report
    measured: int = 0  # calls whose times are new
    task_seconds: dict[str, float] = field(default_factory=dict)  # planning, compiling, ...
    plans: dict[Any, Plans] = field(default_factory=dict)  # those that have been made
    snapshot: Snapshot = field(default_factory=lambda: Snapshot(values=True))

    @property
    def device(self) -> torch.device:
        """The GPU of the model's first parameter on one."""
        return next(one.device for one in self.model.parameters() if preparation.is_gpu(one.device))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of the block to that of a task."""
        start = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - start
            self.task_seconds[name] = self.task_seconds.get(name, 0.0) + took

    def shower(self, words: str) -> preparation.Show:
        """A function that shows progress, if it should be shown."""
        return preparation.progress_shower(words, self.progress) or (lambda done, total: None)

    def result(self, model: Callable[..., Any], anew: bool = True, other: bool = False) -> Any:
        """Calls a model, always with the same random numbers.

        Args:
            model: the subject's model, or a graph of it.
            anew: puts the model's state back first.
            other: calls it with other numbers than the example's.

        Returns:
            What it returns, and what it leaves in its arguments, parameters and buffers.
        """
        if anew:
            self.snapshot.put_back()
        example, named = cloned(self.example), cloned(self.named)
        if other:
            example, named = tree_map_only(Tensor, _with_other_numbers, (example, named))
        torch.clear_autocast_cache()
        with same_random_numbers(_SEED):
            result = model(*example, **named)
        changed = self.snapshot.changed_tensors()
        left = {
            name: tensor.detach().clone()
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers())
            if id(tensor) in changed
        }
        return {"result": result, "arguments": (example, named), "state": left}

    def more_results(self, model: Callable[..., Any]) -> tuple[Any, Any, dict[str, object]]:
        """Calls a model twice more; results may depend on what earlier calls have left.

        Returns:
            The result of a call with other numbers than the example's, or None if the model does
            not take them; the result of a call with the example; and the numbers among the model's
            attributes that both calls have changed.
        """
        before = Snapshot()
        before.record({"model": self.model})
        try:
            other = self.result(model, anew=False, other=True)
        except Exception:
            other = None
            self.result(model)
        again = self.result(model, anew=False)
        return other, again, before.changed_values()

    def run(self, model: nn.Module) -> None:
        """A forward pass, and a backward pass where gradients are recorded; for its time alone."""
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


def cloned(values: Any) -> Any:
    """The same arguments with copies of tensors: models may write to what they are given."""
    return tree_map_only(
        Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), values
    )


def _with_other_numbers(tensor: Tensor) -> Tensor:
    """Another example for a model: the same images in another order, if there are several.

    Otherwise the pixels are in another order, and a constant becomes another constant. Integers are
    indices or labels, and stay.
    """
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    if not (is_strided and tensor.dim() and (tensor.is_floating_point() or tensor.is_complex())):
        return tensor
    orders = (tensor.detach().roll(1, dimension) for dimension in (0, -1))
    found = next((one for one in orders if not is_same(one, tensor)), tensor.detach() * 0.5 + 0.25)
    return found.requires_grad_(tensor.requires_grad)

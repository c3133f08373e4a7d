"""Autograd's graphs are freed with the output, without Python's garbage collector.

What outlives them costs memory. And a CUDA graph cannot be captured while nodes of an earlier step
are alive: PyTorch would have a captured gradient wait for another stream.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import fastconv

pytestmark = pytest.mark.usefixtures("host_path")

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv1d": (lambda: fastconv.Conv1d(4, 4, 3, padding=1), (2, 4, 9)),
    "Conv2d": (lambda: fastconv.Conv2d(4, 4, 3, padding=1), (2, 4, 9, 8)),
    "ConvTranspose1d": (lambda: fastconv.ConvTranspose1d(4, 4, 3, padding=1), (2, 4, 9)),
    "ConvTranspose2d": (lambda: fastconv.ConvTranspose2d(4, 4, 3, padding=1), (2, 4, 9, 8)),
}

Use = Callable[[Tensor, list[Tensor]], object]
"""What is done with an output and the parameters before the output is dropped."""

USES: dict[str, Use] = {
    "nothing": lambda output, parameters: None,
    "backward": lambda output, parameters: output.sum().backward(),
    "grad": lambda output, parameters: torch.autograd.grad(output.sum(), parameters),
    "second": lambda output, parameters: torch.autograd.grad(
        torch.autograd.grad(output.square().sum(), parameters, create_graph=True)[0].sum(),
        parameters,
        allow_unused=True,
    ),
}


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held_by(node: Any) -> weakref.ref[Any]:
    """A reference that is dead once the node is: it is that to a hook of the node."""

    def hook(*_: Any) -> None:
        pass

    node.register_hook(hook)
    return weakref.ref(hook)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("batched", [True, False], ids=["", "unbatched"])
@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)
def test_nodes_are_freed_with_the_output(
    make: Callable[[], nn.Module], shape: tuple[int, ...], batched: bool, use: Use
) -> None:
    network = nn.Sequential(make(), nn.LeakyReLU(), make())
    parameters = list(network.parameters())
    output = network(torch.randn(shape if batched else shape[1:]))
    held = [held_by(output.grad_fn)]
    held += [held_by(get_gradient_edge(parameter).node) for parameter in parameters]
    use(output, parameters)
    assert all(one() is not None for one in held)
    del output
    assert all(one() is None for one in held)

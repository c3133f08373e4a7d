"""Two processes train a model with fastconv's layers and compute what one process does."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.nn.parallel import DistributedDataParallel

import fastconv

PROCESSES = 2

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo"),
    pytest.mark.usefixtures("host_path"),
]


def _model(convolution: type[nn.Conv2d]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        convolution(3, 8, 3, padding=1),
        nn.ReLU(),
        convolution(8, 8, 3, stride=2, groups=4, bias=False),
        nn.ReLU(),
        convolution(8, 5, 1),
    )


def _replicated(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def _sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            fully_shard(layer)
    return fully_shard(model)


def _train(model: nn.Module, rank: int) -> list[Tensor]:
    """The losses of three steps on this process's data, and then all parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 3, 9, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    parameters = [parameter.detach() for parameter in model.parameters()]
    return losses + [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters]


# --- DTensor --------------------------------------------------------------------------------------

ALL, FIRST, SECOND, ROWS, PART = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], list[Placement], list[Placement]]] = {
    # Placements of input, weight and bias, and those of the output and of the gradients.
    "nothing": ({}, [ALL, ALL, ALL], [ALL, ALL, ALL, ALL]),
    "images": ({}, [FIRST, ALL, ALL], [FIRST, FIRST, PART, PART]),
    "images, in groups": ({"groups": 2}, [FIRST, ALL, ALL], [FIRST, FIRST, PART, PART]),
    "output channels": ({}, [ALL, FIRST, FIRST], [SECOND, PART, FIRST, FIRST]),
    "output channels, no bias": ({}, [ALL, FIRST], [SECOND, PART, FIRST]),
    "input channels": ({}, [SECOND, SECOND], [PART, SECOND, SECOND]),
    # DTensor gathers parts that no process can use alone.
    "input channels, with a bias": ({}, [SECOND, SECOND, ALL], [ALL, SECOND, SECOND, ALL]),
    "channels, in groups": ({"groups": 2}, [SECOND, FIRST, FIRST], [ALL, ALL, ALL, ALL]),
    "rows": ({}, [ROWS, ALL, ALL], [ALL, ALL, ALL, ALL]),
}
# The same tensors are convolved with several geometries, because DTensor caches by arguments.
GEOMETRIES: list[dict[str, Any]] = [
    {"padding": ((1, 0), (2, 1))},
    {"padding": ((1, 0), (2, 1)), "stride": (2, 1)},
    {"padding": 1, "stride": (2, 1)},
]


def _leaves(groups: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (4, 4, 9, 8), (6, 4 // groups, 3, 3), (6,)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _convolved(leaves: Sequence[Tensor], options: dict[str, Any]) -> list[Tensor]:
    """The output and the gradients of all leaves."""
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = fastconv.conv2d(*leaves, **options)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def _distributed(mesh: DeviceMesh, name: str) -> list[list[DTensor]]:
    """The results of each geometry."""
    options, placements, _ = DISTRIBUTIONS[name]
    results = []
    for geometry in GEOMETRIES:
        leaves = [
            distribute_tensor(leaf, mesh, [placement])
            for leaf, placement in zip(_leaves(**options), placements, strict=False)
        ]
        results.append(_convolved(leaves, {**options, **geometry}))
    return results


FUSED: dict[str, tuple[dict[str, Any], list[Placement], Placement]] = {
    # Placements of input, weight, bias and residual, and those of the output.
    "nothing": ({}, [ALL, ALL, ALL, ALL], ALL),
    "images": ({}, [FIRST, ALL, ALL, FIRST], FIRST),
    "images, in groups": ({"groups": 2}, [FIRST, ALL, ALL, FIRST], FIRST),
    "images, no residual": ({}, [FIRST, ALL, ALL], FIRST),
    "output channels": ({}, [ALL, FIRST, FIRST, SECOND], SECOND),
    "output channels, no residual": ({}, [ALL, FIRST, FIRST], SECOND),
    # An activation needs the whole sum, so partial sums are reduced first.
    "input channels": ({}, [SECOND, SECOND, ALL, ALL], ALL),
    "channels, in groups": ({"groups": 2}, [ALL, FIRST, FIRST, SECOND], ALL),
}


def _fused(tensors: Sequence[Tensor], **options: Any) -> Tensor:
    input, weight, bias, *residual = tensors
    with torch.no_grad():
        return fastconv.conv2d(
            input, weight, bias, **GEOMETRIES[1], **options,
            activation="silu", residual=residual[0] if residual else None,
        )  # fmt: skip


def _fused_leaves(options: dict[str, Any], count: int) -> list[Tensor]:
    residual = torch.randn((4, 6, 4, 9), generator=torch.Generator().manual_seed(2))
    return [*_leaves(**options), residual][:count]


def _all_fused(mesh: DeviceMesh) -> dict[str, tuple[Any, Tensor]]:
    """Placements and values of the outputs."""
    found = {}
    for name, (options, placements, _) in FUSED.items():
        leaves = _fused_leaves(options, len(placements))
        pairs = zip(leaves, placements, strict=True)
        output = _fused([distribute_tensor(leaf, mesh, [p]) for leaf, p in pairs], **options)
        found[name] = output.placements, output.full_tensor()
    return found


OTHERS: dict[str, tuple[str, dict[str, Any], list[Placement], list[Placement]]] = {
    # A function, and placements as in DISTRIBUTIONS.
    "sequences": ("conv1d", {"padding": 1}, [FIRST, ALL, ALL], [FIRST, FIRST, PART, PART]),
    "sequences, output channels": (
        "conv1d",
        {"padding": ((2, 0),)},
        [ALL, FIRST, FIRST],
        [SECOND, PART, FIRST, FIRST],
    ),
    "transposed": (
        "conv_transpose2d",
        {"stride": 2, "padding": 1},
        [FIRST, ALL, ALL],
        [FIRST, FIRST, PART, PART],
    ),
    "transposed, output channels": (
        "conv_transpose2d",
        {"stride": 2, "output_padding": 1},
        [ALL, SECOND, FIRST],
        [SECOND, PART, SECOND, FIRST],
    ),
    "transposed, input channels": (
        "conv_transpose1d",
        {"stride": 2},
        [SECOND, FIRST],
        [PART, SECOND, FIRST],
    ),
    "transposed, in groups": (
        "conv_transpose1d",
        {"groups": 2},
        [FIRST, ALL, ALL],
        [FIRST, FIRST, PART, PART],
    ),
    "volumes": (
        "conv3d",
        {"padding": ((2, 0), (1, 1), (0, 1)), "stride": (1, 2, 1)},
        [FIRST, ALL, ALL],
        [FIRST, FIRST, PART, PART],
    ),
    "volumes, output channels": (
        "conv3d",
        {"padding": 1},
        [ALL, FIRST, FIRST],
        [SECOND, PART, FIRST, FIRST],
    ),
    "volumes, transposed": (
        "conv_transpose3d",
        {"stride": 2, "output_padding": (1, 0, 1)},
        [ALL, SECOND, FIRST],
        [SECOND, PART, SECOND, FIRST],
    ),
}


def _other_leaves(name: str) -> list[Tensor]:
    function, options, placements, _ = OTHERS[name]
    generator, groups = torch.Generator().manual_seed(3), options.get("groups", 1)
    axes = int(function[-2])
    pair = (4, 6 // groups) if "transpose" in function else (6, 4)
    shapes = (4, 4, *(9, 8, 5)[:axes]), (*pair, *(3, 2, 2)[:axes]), (6,)
    return [torch.randn(shape, generator=generator) for shape in shapes][: len(placements)]


def _other_results(name: str, leaves: Sequence[Tensor]) -> list[Tensor]:
    function, options, _, _ = OTHERS[name]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    output = getattr(fastconv, function)(*leaves, **options)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]


def _all_others(mesh: DeviceMesh) -> dict[str, list[tuple[Any, Tensor]]]:
    found = {}
    for name, (_, _, placements, _) in OTHERS.items():
        pairs = zip(_other_leaves(name), placements, strict=True)
        results = _other_results(name, [distribute_tensor(leaf, mesh, [p]) for leaf, p in pairs])
        found[name] = [(result.placements, result.full_tensor()) for result in results]
    return found


NORMS: dict[str, tuple[bool, list[Placement], Placement, list[Placement]]] = {
    # Whether it is in training, placements of input, residual, weight and bias, that of running
    # statistics, and those of the output and of the gradients.
    "channels": (
        True,
        [SECOND, SECOND, FIRST, FIRST],
        FIRST,
        [SECOND, SECOND, SECOND, FIRST, FIRST],
    ),
    # Statistics are those of all images, which DTensor gathers.
    "images": (True, [FIRST, FIRST, ALL, ALL], ALL, 5 * [ALL]),
    "images, in evaluation": (False, [FIRST, FIRST, ALL, ALL], ALL, 3 * [FIRST] + 2 * [PART]),
    # Running statistics stay where they are.
    "channels, but no statistics": (True, [SECOND, SECOND, ALL, ALL], ALL, [ALL]),
    "statistics alone": (True, [ALL, ALL, ALL, ALL], FIRST, [SECOND]),
}


def _norm_leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = (4, 6, 3, 2), (4, 6, 3, 2), (6,), (6,)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _normalized(
    training: bool, leaves: Sequence[Tensor], running: Sequence[Tensor]
) -> list[Tensor]:
    """Running statistics, the output and the gradients of all leaves."""
    leaves = [leaf.requires_grad_() for leaf in leaves]
    input, residual, weight, bias = leaves
    output = fastconv.batch_norm_act(
        input, *running, weight, bias, training, activation="relu", residual=residual
    )
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    return [*running, output.detach(), *gradients]


def _all_normalized(mesh: DeviceMesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (training, placements, of_running, _) in NORMS.items():
        pairs = zip(_norm_leaves(), placements, strict=True)
        leaves = [distribute_tensor(leaf, mesh, [place]) for leaf, place in pairs]
        running = [
            distribute_tensor(one, mesh, [of_running]) for one in (torch.zeros(6), torch.ones(6))
        ]
        results: list[Any] = _normalized(training, leaves, running)
        found[name] = [(one.placements, one.full_tensor()) for one in results]
    partial = [DTensor.from_local(one, mesh, [PART]) for one in (torch.zeros(6), torch.ones(6))]
    with pytest.raises(RuntimeError) as error:
        _normalized(True, leaves, partial)
    return {**found, "error": str(error.value)}


Distributed = dict[str, list[list[tuple[Any, Tensor]]]]
"""Placements and values of all results, by the name of the distribution."""


def _all_distributed(mesh: DeviceMesh) -> Distributed:
    return {
        name: [
            [(result.placements, result.full_tensor()) for result in results]
            for results in _distributed(mesh, name)
        ]
        for name in DISTRIBUTIONS
    }


# --- Training -------------------------------------------------------------------------------------

WRAPS = {"replicated": _replicated, "sharded": _sharded}
Results = dict[str, dict[str, list[Tensor]]]
"""Results of training, by the name of the wrapper and by whose convolutions are used."""
Others = dict[str, list[tuple[Any, Tensor]]]
Computed = tuple[Results, Distributed, dict[str, tuple[Any, Tensor]], Any, Others]


def _process(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES
    )
    try:
        results: Results = {
            name: {
                "ours": _train(wrap(_model(fastconv.Conv2d)), rank),
                "theirs": _train(wrap(_model(nn.Conv2d)), rank),
            }
            for name, wrap in WRAPS.items()
        }
        mesh = init_device_mesh("cpu", (PROCESSES,))
        distributed = _all_distributed(mesh)
        fused, normalized = _all_fused(mesh), _all_normalized(mesh)
        computed: Computed = results, distributed, fused, normalized, _all_others(mesh)
    finally:
        dist.destroy_process_group()
    torch.save(computed, folder / f"{rank}.pt")
    # Skips the interpreter's shutdown, during which a thread of PyTorch's that still wants the
    # interpreter aborts the process: see wait_at_exit in ops/autograd.py.
    os._exit(0)


@pytest.fixture(scope="module")
def computed(host_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[Computed]:
    """The results of both processes, which start once, because importing PyTorch takes long."""
    folder = tmp_path_factory.mktemp(host_path)
    torch.multiprocessing.spawn(_process, (folder,), nprocs=PROCESSES)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(PROCESSES)]


@pytest.mark.parametrize("wrap", WRAPS)
def test_trains_as_pytorch(wrap: str, computed: list[Computed]) -> None:
    by_rank = [results[wrap] for results, *_ in computed]
    for results in by_rank:
        torch.testing.assert_close(results["ours"], results["theirs"], rtol=1e-6, atol=1e-6)
    losses = [results["ours"][:3] for results in by_rank]
    parameters = [results["ours"][3:] for results in by_rank]
    assert losses[0] != losses[1]  # Each process had its own images.
    torch.testing.assert_close(*parameters, rtol=0, atol=0)
    for value, initial in zip(parameters[0], _model(nn.Conv2d).parameters(), strict=True):
        assert not value.equal(initial)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributed_tensors(name: str, computed: list[Computed]) -> None:
    options, placements, expected_placements = DISTRIBUTIONS[name]
    leaves = _leaves(**options)[: len(placements)]
    for _, distributed, *_ in computed:
        for geometry, results in zip(GEOMETRIES, distributed[name], strict=True):
            expected = _convolved(leaves, {**options, **geometry})
            found, values = zip(*results, strict=True)
            assert list(found) == [(placement,) for placement in expected_placements]
            torch.testing.assert_close(list(values), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", FUSED)
def test_distributed_epilogues(name: str, computed: list[Computed]) -> None:
    options, placements, expected_placement = FUSED[name]
    expected = _fused(_fused_leaves(options, len(placements)), **options)
    for _, _, fused, *_ in computed:
        found, value = fused[name]
        assert found == (expected_placement,)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_convolutions(name: str, computed: list[Computed]) -> None:
    expected = _other_results(name, _other_leaves(name))
    for *_, others in computed:
        found, values = zip(*others[name], strict=True)
        assert list(found) == [(placement,) for placement in OTHERS[name][-1]]
        torch.testing.assert_close(list(values), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", NORMS)
def test_distributed_norms(name: str, computed: list[Computed]) -> None:
    training, _, of_running, expected_placements = NORMS[name]
    expected = _normalized(training, _norm_leaves(), [torch.zeros(6), torch.ones(6)])
    for *_, normalized, _ in computed:
        found, values = zip(*normalized[name], strict=True)
        assert list(found[:2]) == 2 * [(of_running,)]
        count = len(expected_placements)
        assert list(found[2 : 2 + count]) == [(placement,) for placement in expected_placements]
        torch.testing.assert_close(list(values), expected, rtol=1e-5, atol=1e-4)


def test_running_statistics_that_would_not_be_updated(computed: list[Computed]) -> None:
    for *_, normalized, _ in computed:
        assert "batch_norm_forward updates running statistics in place" in normalized["error"]
        assert "running_mean is distributed as (Partial(sum),)" in normalized["error"]

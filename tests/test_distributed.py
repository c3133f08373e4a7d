"""Two processes train a model of ours as they train PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
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
    """Three steps on data of one's own; the losses, and then all parameters."""
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


def _process(rank: int, wrap: Callable[[nn.Sequential], nn.Module], folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=PROCESSES
    )
    try:
        results = {
            name: _train(wrap(_model(convolution)), rank)
            for name, convolution in (("ours", fastconv.Conv2d), ("theirs", nn.Conv2d))
        }
    finally:
        dist.destroy_process_group()
    torch.save(results, folder / f"{rank}.pt")


@pytest.mark.parametrize("wrap", [_replicated, _sharded])
def test_trains_as_pytorch(wrap: Callable[[nn.Sequential], nn.Module], tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_process, (wrap, tmp_path), nprocs=PROCESSES)
    by_rank = [torch.load(tmp_path / f"{rank}.pt") for rank in range(PROCESSES)]
    for results in by_rank:
        torch.testing.assert_close(results["ours"], results["theirs"], rtol=1e-6, atol=1e-6)
    losses = [results["ours"][:3] for results in by_rank]
    parameters = [results["ours"][3:] for results in by_rank]
    assert losses[0] != losses[1]  # each had its own images
    torch.testing.assert_close(*parameters, rtol=0, atol=0)
    for trained, initial in zip(parameters[0], _model(nn.Conv2d).parameters(), strict=True):
        assert not trained.equal(initial)

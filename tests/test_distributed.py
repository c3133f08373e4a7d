"""Two processes train a model of ours as they train PyTorch's."""

from __future__ import annotations

import os
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


WRAPS = {"replicated": _replicated, "sharded": _sharded}
Results = dict[str, dict[str, list[Tensor]]]
"""What training gives: by the name of the wrap, by whose convolutions they are."""


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
    finally:
        dist.destroy_process_group()
    torch.save(results, folder / f"{rank}.pt")
    # Without the interpreter's end, in which a thread of PyTorch's that still wants the interpreter
    # aborts the process: see ops/autograd.py: wait_at_exit.
    os._exit(0)


@pytest.fixture(scope="module")
def trained(host_path: str, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """Of each process. Importing PyTorch takes most of the time: once for all."""
    folder = tmp_path_factory.mktemp(host_path)
    torch.multiprocessing.spawn(_process, (folder,), nprocs=PROCESSES)
    return [torch.load(folder / f"{rank}.pt") for rank in range(PROCESSES)]


@pytest.mark.parametrize("wrap", WRAPS)
def test_trains_as_pytorch(wrap: str, trained: list[Results]) -> None:
    by_rank = [results[wrap] for results in trained]
    for results in by_rank:
        torch.testing.assert_close(results["ours"], results["theirs"], rtol=1e-6, atol=1e-6)
    losses = [results["ours"][:3] for results in by_rank]
    parameters = [results["ours"][3:] for results in by_rank]
    assert losses[0] != losses[1]  # each had its own images
    torch.testing.assert_close(*parameters, rtol=0, atol=0)
    for value, initial in zip(parameters[0], _model(nn.Conv2d).parameters(), strict=True):
        assert not value.equal(initial)

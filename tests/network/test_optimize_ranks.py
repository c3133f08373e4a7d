"""``optimize`` in several processes: rank 0 decides."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fastconv
from fastconv.network import calls
from fastconv.network.calls import Times
from network.helpers import (
    EXAMPLE,
    Clock,
    norm_calls,
    ours,
    report,
    stand_in,
    times,
)

pytestmark = pytest.mark.usefixtures("clock")


def _in_process(rank: int, folder: Path, do: Callable[[int, Path], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    try:
        found = do(rank, folder)
    finally:
        dist.destroy_process_group()
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)  # test_distributed.py says why


def _different_times(rank: int, folder: Path) -> tuple[list[str], str, int, str]:
    stand_in(folder / f"cache{rank}", setattr)
    monkeypatch = pytest.MonkeyPatch()
    from conftest import loads

    for _ in loads.__wrapped__(monkeypatch):  # the fixture's own function
        clock = Clock()
        # Rank 1 would choose other layers.
        clock.gains = lambda call: times(2, 1) if call.groups == 1 + rank else times(1, 2)
        calls.clock = clock
        model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1, groups=2))
        optimized = fastconv.optimize(model, torch.randn(2, 2, 5, 5))

        def fails(*_: Any) -> Times:
            raise RuntimeError("out of order")

        clock.model = fails  # type: ignore[method-assign]
        try:
            fastconv.optimize(model, torch.randn(3, 2, 5, 5))
            error = ""
        except RuntimeError as caught:
            error = str(caught)
        try:
            fastconv.optimize(nn.SyncBatchNorm.convert_sync_batchnorm(model), EXAMPLE)
        except ValueError as caught:
            error += str(caught)
    return ours(optimized), str(report(optimized)), len(clock.seen), error


class Branches(nn.Module):
    """A model in which the size of the input decides which layers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.large = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 3)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.large(x).relu() if x.shape[-1] > 5 else x


def _different_examples(rank: int, folder: Path) -> list[Any]:
    """Optimizes with examples of another size in each process; then with errors in one of them."""
    stand_in(folder / f"cache{rank}", setattr)
    monkeypatch = pytest.MonkeyPatch()
    from conftest import loads

    found: list[Any] = []
    for _ in loads.__wrapped__(monkeypatch):
        calls.clock = Clock()
        size = 5 + 2 * rank
        found.append(ours(fastconv.optimize(Branches(), torch.randn(2, 2, size, size))))
        model = Branches().eval()
        with torch.no_grad():
            optimized = fastconv.optimize(model, torch.randn(2, 2, size, size))
        found += [report(optimized).fused, ours(optimized)]
        models = nn.Conv2d(2, 2, 1), nn.Sequential(nn.Conv2d(2, 2, 1))
        for model, example in (
            (models[rank], torch.randn(1, 2, 5, 5)),
            (models[0], () if rank else torch.randn(1, 2, 5, 5)),
            (models[0], torch.randn(1, 2 + rank, 5, 5)),
        ):
            try:
                fastconv.optimize(model, example)
            except Exception as error:
                found.append(str(error))
    return found


class Residual(nn.Module):
    """A convolution, BatchNorm, addition and activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)) + x)


def _sharded(model: Any) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def _with_blocks(rank: int, folder: Path) -> list[Any]:
    """For each wrapper: the blocks that run, and results of training with them and without."""
    stand_in(folder / f"cache{rank}", setattr)
    monkeypatch = pytest.MonkeyPatch()
    from conftest import loads

    found: list[Any] = []
    images = torch.randn(2, 4, 3, 6, 5, generator=torch.Generator().manual_seed(rank))
    for _ in loads.__wrapped__(monkeypatch):
        calls.clock = Clock()
        for wrap in (DistributedDataParallel, _sharded):
            torch.manual_seed(0)
            model = nn.Sequential(Residual(), Residual()).train()
            optimized = fastconv.optimize(model, images[0])
            both = [wrap(one) for one in (optimized, model)]
            found.append(norm_calls(lambda: both[0](images[0])))  # noqa: B023 - it is called here
            both[1](images[0])
            found.append([_trained(one, images) for one in both])
    return found


def _trained(model: nn.Module, images: Tensor) -> list[Tensor]:
    """All gradients of the second of two steps, parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in images:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    parameters = list(model.parameters())
    tensors = [*(one.grad for one in parameters), *parameters, *model.buffers()]
    return [one.full_tensor() if isinstance(one, DTensor) else one.detach() for one in tensors]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")
def test_blocks_in_each_process(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_in_process, (tmp_path, _with_blocks), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for found in ranks:
        for count, (ours_, theirs) in zip(found[::2], found[1::2], strict=True):
            assert count["forward"] == 2
            torch.testing.assert_close(ours_, theirs, rtol=1e-4, atol=1e-5)
    first, second = (found[1][0][:8] for found in ranks)
    torch.testing.assert_close(first, second)  # gradients, which processes share


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")
def test_examples_of_other_sizes_in_each_process(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_in_process, (tmp_path, _different_examples), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    # Rank 0 has the smaller example, with which the other layer is not called.
    assert first[0] == second[0] == ["first"]
    assert first[1] == second[1]
    assert first[2] == second[2]
    for errors in (first[3:], second[3:]):
        assert len(errors) == 3
        assert "takes the same model in all processes, but they differ" in errors[0]
    assert "failed in rank 1: ValueError: optimize() takes a model and an example" in first[4]
    assert "takes a model and an example" in second[4]
    assert "failed in rank 1" in first[5]
    assert "expected input" in second[5]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="PyTorch has no gloo")
def test_rank_0_decides(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_in_process, (tmp_path, _different_times), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2))
    assert first[0] == second[0] == ["0"]
    assert (first[2], second[2]) == (2 * 2, 0)
    assert first[1].splitlines()[:-1] == second[1].splitlines()[:-1]
    assert first[3].startswith("out of order")
    assert second[3].startswith("optimize() failed in rank 0: RuntimeError: out of order")
    for _, _, _, error in (first, second):
        assert "is a SyncBatchNorm, which waits for others" in error

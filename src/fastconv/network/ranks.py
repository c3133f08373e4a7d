"""Decisions that all processes of ``torch.distributed`` have to share, and errors in one of them.

Without ``torch.distributed``, or with one process, all functions simply run here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fastconv import tables

_Value = TypeVar("_Value")


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def from_rank_0(decide: Callable[[], _Value]) -> _Value:
    """The result of rank 0, in all processes; the others do not run the function."""
    if not is_distributed():
        return decide()
    rank_0 = dist.get_rank() == 0
    return gathered(lambda: decide() if rank_0 else None)[0]  # type: ignore[return-value]


def in_each(do: Callable[[], _Value]) -> _Value:
    """The result of this process; if the function fails in any process, all raise."""
    results: list[_Value] = []
    gathered(lambda: results.append(do()))
    return results[0]


def same_in_all(what: str, value: _Value) -> _Value:
    """The value, which has to be the same in all processes: otherwise all of them raise.

    ``what`` is a predicate of the model for the error message: "has the layers ...".
    """
    others = gathered(lambda: (what, value))
    for rank, (words, other) in enumerate(others):
        if other != others[0][1]:
            raise ValueError(
                "optimize() takes the same model in all processes, but they differ: in rank 0 it "
                f"{_predicate(*others[0])}, in rank {rank} it {_predicate(words, other)}"
            )
    return value


def _predicate(words: str, value: object) -> str:
    return words if value else f"is not one that {words.rstrip()}"


def gathered(do: Callable[[], _Value]) -> list[_Value]:
    """The results of all processes, by rank; if one fails, all raise, so that none waits."""
    if not is_distributed():
        return [do()]
    value, error = None, None
    try:
        value = do()
    except Exception as caught:  # the others wait for a message: it is raised after that
        error = caught
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (value, error and tables.error_line(error)))
    if error is not None:
        raise error
    for rank, (_, failed) in enumerate(every):
        if failed is not None:
            raise RuntimeError(f"optimize() failed in rank {rank}: {failed}")
    return [one for one, _ in every]

"""Plans on disk, beside the kernels: to read a plan takes a fraction of the time to make it.

The key of a plan is all that it depends on: the problem and its operands, the GPU, the switch, the
sources of the planners, and the table of measured choices.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from fastconv import problem as problems
from fastconv.jit import cache as disk
from fastconv.kernels import tuned
from fastconv.kernels.family import (
    FOLDER,
    Gpu,
    Im2colMap,
    Kernel,
    Launch,
    Operands,
    Plan,
    Region,
    TensorMap,
)
from fastconv.kernels.planner import Pass, Switch
from fastconv.problem import Problem

_FORMAT = (1, 1)
_CLASSES = {one.__name__: one for one in (Plan, Launch, Kernel, Region, TensorMap, Im2colMap)}
_CLASS = "class"


def find_or_make(
    plan: Pass, problem: Problem, operands: Operands, gpu: Gpu, switch: Switch
) -> Plan:
    """Returns the plan of a pass from the disk, or makes it and stores it there."""
    asked = repr((plan.__name__, problem, operands, gpu, switch))
    key = disk.key(asked, {}, (_sources(), repr(tuned.table())), _FORMAT)
    encoded = disk.load(disk.PLAN, key)
    found = None if encoded is None else decode(encoded)
    if found is None:
        found = plan(problem, operands, gpu, switch)
        about = {"source": f"{plan.__name__}, {found.family}", "architecture": gpu.architecture}
        disk.store(disk.PLAN, key, encode(found), about)
    return found


def encode(plan: Plan) -> bytes:
    """Returns a plan as JSON, which can be read without executing anything."""
    return json.dumps(_plain(plan), separators=(",", ":")).encode()


def decode(encoded: bytes) -> Plan | None:
    """Returns the plan that :func:`encode` was given; None for text that it did not make."""
    try:
        found = _restored(json.loads(encoded))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, Plan) else None


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        assert type(value) is tuple, f"{type(value).__name__} would be read as a plain tuple"
        return [_plain(one) for one in value]
    if type(value).__name__ not in _CLASSES:
        return value
    members = {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    return {_CLASS: type(value).__name__, **members}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple([_restored(one) for one in value])
    if not isinstance(value, dict):
        return value
    of = _CLASSES[value.pop(_CLASS)]
    return of(**{name: _restored(one) for name, one in value.items()})


@cache
def _sources() -> str:
    """Returns a hash of all sources that plans depend on."""
    digest = hashlib.sha256()
    for path in (Path(problems.__file__), *sorted(FOLDER.rglob("*.py"))):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()

"""A program that calls operators of libfastconv.so with CPU tensors, and a driver that logs.

It gets the paths of the library, of the driver and of a file of calls, each the operator's name and
its arguments. It prints a line of JSON for each call: the error, or the addresses of its tensors
and of its results. Before each call it writes a line to stderr, to which the driver writes as well.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import torch
from torch import Tensor


def _call(operator: str, arguments: list[Any]) -> dict[str, Any]:
    try:
        results = getattr(torch.ops.fastconv, operator)(*arguments)
    except RuntimeError as error:
        return {"error": str(error)}
    results = results if isinstance(results, tuple) else (results,)
    return {
        "tensors": [_address(one) for one in arguments if one is None or isinstance(one, Tensor)],
        "results": [one.data_ptr() for one in results],
        "strides": [one.stride() for one in results],
    }


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def main(library: str, driver: str, calls: str) -> None:
    ctypes.CDLL(driver)
    torch.ops.load_library(library)
    for operator, arguments in torch.load(calls):
        print("call", file=sys.stderr, flush=True)
        print(json.dumps(_call(operator, arguments)), flush=True)
    assert "fastconv" not in sys.modules


if __name__ == "__main__":
    main(*sys.argv[1:])

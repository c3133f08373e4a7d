"""Tensors, stand-ins for the compiler, and processes for tests of the native host path."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fastconv
from effort import PATIENCE_S, wait_until
from fastconv import native
from fastconv.native import build
from fastconv.ops import entries
from fastconv.ops.entries import Entry, NormEntry

INPUT, WEIGHT, BIAS = (2, 4, 6, 5), (6, 4, 3, 3), (6,)


def tensors(*shapes: tuple[int, ...], requires_grad: bool = False) -> list[Tensor]:
    # Products of multiples of a quarter have exact sums.
    some = (torch.randint(-8, 8, shape) / 4 for shape in shapes)
    return [tensor.requires_grad_(requires_grad) for tensor in some]


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def check_works() -> None:
    some = tensors(INPUT, WEIGHT, BIAS)
    close(fastconv.conv2d(*some, padding=1), F.conv2d(*some, padding=1))


def forget() -> None:
    """Resets the package to the state that it has in a new process."""
    if native._background is not None:
        native._background.join()
    native.conv2d, native._started, native._background = None, False, None
    native._forked, native._reason = False, native._NOT_YET


class Compiler:
    """Stands in for the compiler: a script that prints words, and copies a library or fails."""

    def __init__(self, folder: Path, built: Path) -> None:
        self._folder, self._log, self._built = folder, folder / "log", built
        self.path, self.go = folder / "compiler", folder / "go"
        self.set()

    def set(
        self, seconds: float = 0, status: int = 0, words: str = "some words", held: bool = False
    ) -> None:
        """Sets what it does; if it is ``held``, it waits until ``go`` exists."""
        wait = f"while ! test -e {self.go}; do sleep 0.05; done" if held else f"sleep {seconds}"
        self.path.write_text(
            # A temporary file and a part of the library exist from the start.
            '#!/bin/sh\nmktemp "${TMPDIR:-/tmp}/cc.XXXXXX" > /dev/null\n'
            'for last; do :; done\n: > "$last"\n'
            f'echo "$*" >> {self._log}\n{wait}\necho {shlex.quote(words)}\n'
            f"test {status} = 0 || exit {status}\n"
            f'cp {self._built} "$last"\nchmod +rwx "$last"\n'  # Linkers do so, within the umask.
        )
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def wait_for_a_call(self, before: int = 0) -> None:
        wait_until(lambda: len(self.calls) > before)


@contextlib.contextmanager
def noted_warnings() -> Iterator[list[str]]:
    words: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield words
    words += [str(warning.message) for warning in caught]


def run(program: str, **environment: str) -> list[str]:
    """The lines that a new process prints; it must succeed, without a warning."""
    path = os.pathsep.join(filter(None, sys.path))
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{PREAMBLE}{program}"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


PREAMBLE = """
import sys, time, torch, fastconv
import torch.nn.functional as F
from fastconv import cli, native

def call():
    x, w = torch.randn(1, 2, 5, 5), torch.randn(3, 2, 3, 3)
    torch.testing.assert_close(fastconv.conv2d(x, w), F.conv2d(x, w))
    print("Python" if native.conv2d is None else "native")
"""


def in_child(function: Callable[[], None]) -> None:
    """Calls the function in a forked process, which is killed if it hangs."""
    child = os.fork()
    if not child:
        signal.alarm(int(PATIENCE_S))
        try:
            function()
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class Host:
    """A copy of the library, with a table of its own, that records its calls of Python."""

    def __init__(self, path: Path) -> None:
        # pybind11 makes only one of two modules with the same name.
        name = f"of_{path.parent.name}.{build._NAME}"
        loader = importlib.machinery.ExtensionFileLoader(name, str(path))
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        self.module = importlib.util.module_from_spec(spec)
        loader.exec_module(self.module)
        self.conv2d = self.module.call
        self.batch_norm_act, self.conv_bn_act = self.module.batch_norm_act, self.module.conv_bn_act
        self.asked: list[tuple[Any, ...]] = []  # operators whose entries were made, and arguments
        self.filled: list[str] = []
        self.module.set_make_entry(self._prepare)
        self.module.serve_norms(*native._gradients)
        self.answer: Callable[..., Entry | NormEntry] = self._real

    def _prepare(self, operator: str, *arguments: Any) -> Entry | NormEntry:
        self.asked.append((operator, *arguments))
        return self.answer(operator, *arguments)

    def _real(self, operator: str, *arguments: Any) -> Entry | NormEntry:
        entry = entries.make_entry(operator, *arguments)
        assert entry.fill is not None
        fill = entry.fill

        def noted(*arguments: Any) -> None:
            self.filled.append(operator)
            fill(*arguments)

        if isinstance(entry, NormEntry):
            return entry._replace(fill=noted)
        return entry._replace(fill=noted, cpu_plan=None)

    @property
    def operators(self) -> list[str]:
        return [operator for operator, *_ in self.asked]


def misaligned(tensor: Tensor) -> Tensor:
    """A copy at an address that is no multiple of 16."""
    moved = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view_as(tensor)
    return moved.copy_(tensor)

"""Kernels that are made faulty, for tests that the emulator sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastconv.kernels.family import Kernel


@dataclass(frozen=True)
class Changed(Kernel):
    """A kernel of a test's own file, in whose text something is changed."""

    old: str
    new: str

    @property
    def text(self) -> str:
        include = f'#include "{self.source}"'
        text = super().text.replace(include, Path(self.source).read_text())
        assert self.old in text
        return text.replace(self.old, self.new)

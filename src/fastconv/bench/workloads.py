"""The convolutions we measure, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastconv.problem import Problem


@dataclass(frozen=True)
class Workload:
    """One named convolution."""

    name: str
    about: str
    input: tuple[int, int, int, int]
    weight: tuple[int, int, int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1

    def scaled(self, divisor: int) -> Workload:
        """The same convolution of an input with 1/divisor of the height and of the width."""
        batch, channels, height, width = self.input
        return replace(self, input=(batch, channels, height // divisor, width // divisor))

    @property
    def problem(self) -> Problem:
        vertical, horizontal = self.padding
        sides = (vertical, vertical, horizontal, horizontal)
        return Problem.of(self.input, self.weight, self.stride, sides, self.dilation, self.groups)


FOUNDING = (
    Workload(
        "dilated5x9", "asymmetric, dilated kernel", (8, 32, 512, 512), (64, 32, 5, 9),
        padding=(2, 4), dilation=(2, 3),
    ),
    Workload("asym5x9", "asymmetric kernel", (8, 32, 512, 512), (64, 32, 5, 9)),
    Workload("square3x3", "large image, few channels", (16, 16, 1024, 1024), (128, 16, 3, 3)),
)  # fmt: skip

SUITES = {"founding": FOUNDING}

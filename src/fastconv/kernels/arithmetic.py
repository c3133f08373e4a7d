"""Small sums that plans need."""

from __future__ import annotations

from math import isqrt


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def divisors(n: int) -> list[int]:
    """All of them, ascending."""
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def shares(size: int) -> list[int]:
    """What the largest of n equal shares can be, for any n, ascending."""
    found, n = [], 1
    while n <= size:
        share = ceil_div(size, n)
        found.append(share)
        n = (size - 1) // (share - 1) + 1 if share > 1 else size + 1  # the first with a smaller one
    return found[::-1]

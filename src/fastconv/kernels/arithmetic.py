"""Integer arithmetic for plans."""

from __future__ import annotations

from math import isqrt


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def divisors(n: int) -> list[int]:
    """Returns all divisors of ``n``, in ascending order."""
    small = [i for i in range(1, isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def shares(size: int) -> list[int]:
    """Returns ceil(size / n) for all n, without repetitions and in ascending order."""
    found, n = [], 1
    while n <= size:
        share = ceil_div(size, n)
        found.append(share)
        # The next n is the least one with a smaller share.
        n = (size - 1) // (share - 1) + 1 if share > 1 else size + 1
    return found[::-1]

"""Legal numbers near an illegal one, for error messages."""

import math


def multiples_around(value: int, unit: int, least: int = 1) -> str:
    """`8 or 12`: the multiples of `unit` next below and above `value` that are at least `least`."""
    below = value // unit * unit
    smallest = -(-least // unit) * unit
    return " or ".join(str(n) for n in sorted({max(below, smallest), max(below + unit, smallest)} - {value}))


def divisors(value: int) -> list[int]:
    """All positive divisors of a positive number, ascending."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return [*small, *(value // n for n in reversed(small) if n * n != value)]


def distance(a: int, b: int) -> float:
    """How far apart two positive counts are; doubling is as far as halving."""
    return abs(math.log(a / b))

"""Align rows of cells in columns."""

from collections.abc import Collection, Sequence
from decimal import Decimal


def columns(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Return a line for each row, with two spaces between columns of equal width.

    Columns with these indices are aligned left, the others right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def numbers(values: Sequence[float], digits: int) -> list[str]:
    """Write the numbers of a column with equally many decimals, as the longest of them needs.

    >>> numbers([11, 11.95, 12.5], digits=4)
    ['11.00', '11.95', '12.50']
    """
    rounded = [Decimal(f"{value:.{digits}g}").normalize() for value in values]
    places = max((-int(number.as_tuple().exponent) for number in rounded), default=0)
    return [f"{number:.{max(places, 0)}f}" for number in rounded]

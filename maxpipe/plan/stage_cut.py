"""Distribute layers over stages by dynamic programming.

What a stage costs depends on which layers it holds: those with a window take less time.
"""

from collections.abc import Callable
from functools import cache
from itertools import permutations
from math import inf


def balance_layers(
    cost: Callable[[int, int, int], float], num_stages: int, total: int
) -> list[int] | None:
    """Return numbers of layers such that the most costly stage costs the least.

    Among equal choices the one whose stages differ least is taken, and among these the one with
    more layers in front, whose pipeline is full a little earlier.

    Args:
      cost: returns what holding some layers costs a stage, infinite where it cannot; its arguments
        are the stage, the first layer, and the number of layers.
      num_stages: number of stages, which hold the layers one after another.
      total: layers to distribute.

    Returns:
      Numbers that add up to `total`; None if every choice has a stage that cannot hold its layers.
    """

    @cache
    def cost_of(stage: int, left: int, layers: int) -> float:
        """Return the cost of a stage that holds the first of the `left` layers."""
        return cost(stage, total - left, layers)

    @cache
    def worst(stage: int, left: int) -> float:
        """Return the cost of the most costly stage from `stage` on, if these hold `left` layers."""
        if stage == num_stages - 1:
            return cost_of(stage, left, left)
        return min(
            max(cost_of(stage, left, n), worst(stage + 1, left - n)) for n in range(left + 1)
        )

    limit = worst(0, total) * (1 + 1e-9)
    if limit == inf:
        return None

    @cache
    def spread(stage: int, left: int) -> tuple[float, tuple[int, ...]]:
        """Return (sum of squared costs from `stage` on, layers of each stage with a minus sign).

        The sum is infinite if a cost is above the limit. With the sign, the least of equal sums has
        more layers in front.
        """
        if stage == num_stages - 1:
            return square(cost_of(stage, left, left)), (-left,)
        choices = []
        for n in range(left + 1):
            own = square(cost_of(stage, left, n))
            others, layers = spread(stage + 1, left - n) if own < inf else (inf, ())
            choices.append((own + others, (-n, *layers)))
        return min(choices)

    def square(cost: float) -> float:
        if cost > limit:
            return inf
        # An integer, so that sums do not depend on the order of their terms.
        return round(1e9 * (cost / limit) ** 2) if limit else 0

    return [-n for n in spread(0, total)[1]]


def chunk_sizes(layers: int, num_chunks: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Distribute a stage's layers over its chunks, at least one each and otherwise evenly.

    The first chunks get more where the layers do not divide. `first` and `last` are the work of the
    first and the last chunk besides their layers, in layers.
    """
    assert layers >= num_chunks
    work = [1.0] * num_chunks
    work[0] += first
    work[-1] += last
    sizes = [1] * num_chunks
    for _ in range(layers - num_chunks):
        least = work.index(min(work))
        sizes[least] += 1
        work[least] += 1
    return sizes


def lightened(
    sizes: tuple[int, ...], weight: Callable[[tuple[int, ...]], float], limit: float
) -> tuple[int, ...]:
    """Move layers between a stage's chunks, one by one, until it weighs at most the limit.

    If it cannot, return sizes that no such move makes lighter; of two chunks, the lightest ones.
    What the stage weighs is convex in the sizes, each of which stays at least one.
    """
    while weight(sizes) > limit:
        moves = (
            tuple(n - (c == source) + (c == target) for c, n in enumerate(sizes))
            for source, target in permutations(range(len(sizes)), 2)
            if sizes[source] > 1
        )
        lightest = min(moves, key=weight, default=sizes)
        if weight(lightest) >= weight(sizes):
            break
        sizes = lightest
    return sizes

"""Dealing layers out: as good as the best of all choices."""

from itertools import combinations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from maxpipe.plan.auto_stages import balance_layers, chunk_sizes, lightened


def choices(total, stages):
    for bars in combinations(range(total + stages - 1), stages - 1):
        ends = [*bars, total + stages - 1]
        yield [end - begin - 1 for begin, end in zip([-1, *ends], ends, strict=False)]


def spread(costs, layers):
    mine = [costs[s][n] for s, n in enumerate(layers)]
    return max(mine), sum(cost**2 for cost in mine)


@given(total=st.integers(0, 7), stages=st.integers(1, 4), data=st.data())
def test_no_other_choice_is_better(total, stages, data):
    cost = st.sampled_from([0.0, 1.0, 2.0, 3.0, 5.0, inf])
    row = st.lists(cost, min_size=total + 1, max_size=total + 1)
    costs = [data.draw(row) for _ in range(stages)]
    best = min((*spread(costs, layers), [-n for n in layers]) for layers in choices(total, stages))
    found = balance_layers(lambda s, first, n: costs[s][n], stages, total)
    if best[0] == inf:
        assert found is None
    else:
        assert (*spread(costs, found), [-n for n in found]) == best


def test_layers_that_cost_less_lie_together_on_a_longer_stage():
    times = [3, 3, 1, 1, 1, 1]
    assert balance_layers(lambda s, first, n: sum(times[first : first + n]), 2, 6) == [2, 4]


def test_chunks_of_a_stage_are_even():
    for layers, chunks, last, sizes in (
        (5, 2, 0.0, [3, 2]),
        (6, 2, 2.0, [4, 2]),
        (4, 3, 9.0, [2, 1, 1]),
        (3, 3, 0.0, [1, 1, 1]),
    ):
        assert chunk_sizes(layers, chunks, last=last) == sizes, (layers, chunks)


@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    columns=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    limit=st.integers(0, 90),
)
def test_two_chunks_are_moved_no_further_than_needed_to_fit(sizes, columns, limit):
    """What a stage holds at its peak is the largest of several weighted sums."""

    def weight(sizes):
        return max(a * sizes[0] + b * sizes[1] for a, b in columns)

    total, fitting = sum(sizes), lightened(sizes, weight, limit)
    splits = [(n, total - n) for n in range(1, total)]
    near = [split for split in splits if weight(split) <= limit]
    if near:
        moved = abs(fitting[0] - sizes[0])
        assert weight(fitting) <= limit
        assert moved == min(abs(split[0] - sizes[0]) for split in near)
    else:
        assert weight(fitting) == min(map(weight, splits))

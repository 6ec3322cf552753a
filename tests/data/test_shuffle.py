"""Test that positions are shuffled as grain does it, which decides the data of every saved run."""

import pytest
from grain.experimental import index_shuffle

from maxpipe.data import shuffle

SEEDS = [0, 1, 42, 2**31 + 5, 2**32 - 1]


@pytest.mark.parametrize("count", [1, 2, 3, 9, 257, 1000, shuffle._FEW, shuffle._FEW + 1])
@pytest.mark.parametrize("seed", SEEDS)
def test_order_is_grains(count, seed):
    places = range(0, count, max(1, count // 50))
    expected = [index_shuffle(i, max_index=count - 1, seed=seed, rounds=4) for i in places]

    assert [shuffle.shuffled(i, count, seed) for i in places] == expected


def test_few_positions_need_no_walks(monkeypatch):
    monkeypatch.setattr(shuffle, "index_shuffle", None)  # it takes milliseconds a position

    assert sorted(shuffle.shuffled(i, 9, seed=7) for i in range(9)) == [*range(9)]

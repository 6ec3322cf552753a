"""The order of documents."""

import pytest

from maxpipe.data.mixture import DocumentOrder


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_is_a_permutation(count: int, shuffle: bool) -> None:
    order = DocumentOrder(count, seed=3, shuffle=shuffle)
    for epoch in (0, 1, 2**32):
        assert sorted(order(epoch, i) for i in range(count)) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    def visit(seed: int, epoch: int, shuffle: bool = True) -> list[int]:
        order = DocumentOrder(50, seed, shuffle)
        return [order(epoch, i) for i in range(50)]

    assert visit(0, 0) != visit(0, 1)
    assert visit(0, 0) != visit(7, 0)
    assert visit(0, 0, shuffle=False) == visit(0, 1, shuffle=False) == list(range(50))


def test_order_of_saved_runs() -> None:
    """A saved position means these documents: another order would replay some and lose others, silently."""
    order = DocumentOrder(10, seed=0, shuffle=True)
    assert [order(0, i) for i in range(10)] == [0, 4, 6, 7, 8, 3, 1, 9, 5, 2]

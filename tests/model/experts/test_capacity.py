"""What experts take of a sequence, and the rows that suffice for it."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.config.sections.model_parts import MoEConfig
from maxpipe.model.experts.blocks import Blocks
from maxpipe.model.experts.capacity import capacity, layout_for, within_capacity
from maxpipe.model.experts.dispatch import arrange
from maxpipe.model.experts.megablox import Megablox

MOE = MoEConfig(experts=4, per_token=2, capacity_factor=1.0)


def test_capacity_is_a_multiple_of_an_even_share_and_at_most_the_sequence():
    # An even share is 3 of 6 tokens.
    for factor, expected in ((0.0, 6), (0.5, 2), (1.0, 3), (1.1, 4), (9.0, 6)):
        moe = MoEConfig(experts=4, per_token=2, capacity_factor=factor)
        assert capacity(moe, 6) == expected


def test_earlier_tokens_of_each_sequence_come_first():
    first = [[0, 1], [0, 2], [0, 1], [0, 3], [1, 0], [1, 2]]
    second = [[3, 2]] * 3 + [[0, 1]] * 3
    choice = jnp.asarray([first, second], jnp.int32)
    expected = [[0, 1], [0, 2], [0, 1], [4, 3], [1, 4], [4, 2]]
    np.testing.assert_array_equal(within_capacity(choice, MOE), [expected, second])
    assert within_capacity(choice, MoEConfig(experts=4, per_token=2)) is choice


@pytest.mark.parametrize("kernel", [Blocks, Megablox])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_rows_suffice_for_experts_that_are_full_in_all_sequences(kernel, factor):
    """On the first of two devices, whose two experts all tokens of 3 sequences choose."""
    moe = MoEConfig(experts=4, per_token=2, capacity_factor=factor)
    sequences, length = 3, 400
    choice = jnp.broadcast_to(jnp.array([0, 1], jnp.int32), (sequences, length, 2))
    kept = within_capacity(choice, moe)
    taken = sequences * 2 * capacity(moe, length)
    own = jnp.where(kept < 2, kept, 2).reshape(-1, 2)
    layout = layout_for(kernel.layout, moe, 2)((sequences, length, 2), 2)
    places = arrange(own, 2, layout)
    assert int(places.sizes.sum()) == taken == int(jnp.sum(places.assignments < own.size))
    assert taken <= layout.num_rows <= 1.2 * taken
    if factor == 0.5:
        assert layout.num_rows < layout_for(kernel.layout, MOE, 2)(choice.shape, 2).num_rows

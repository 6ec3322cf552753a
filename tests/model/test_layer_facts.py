"""What differs from layer to layer: looked up by index, constant where nothing differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny

from maxpipe.model.attention import look_up
from maxpipe.model.layer_facts import ALL_TOKENS, layer_table, visible_share

GEMMA = {
    "model.num_layers": 7,
    "model.layer_pattern": ["local"] * 5 + ["global"],
    "model.attention_window": 3,
    "model.rope_theta_local": 100.0,
    "model.rope_scaling.type": "yarn",
    "model.rope_scaling.factor": 8,
}


def table_of(**values):
    return layer_table(tiny(**values).model)


def test_layers_that_are_alike_have_constant_facts_and_need_no_index():
    facts = look_up(table_of(), None)
    assert facts.window is None
    assert isinstance(facts.frequencies, np.ndarray)
    assert facts.factor == 1
    assert look_up(table_of(**{"model.attention_window": 3}), None).window == 3


def test_index_names_the_place_in_the_repeated_pattern():
    table = table_of(**GEMMA)
    windows = [int(look_up(table, jnp.int32(i)).window) for i in range(8)]
    assert windows == [3, 3, 3, 3, 3, ALL_TOKENS, 3, 3]  # also of a layer of padding
    local, full = (look_up(table, jnp.int32(i)) for i in (0, 5))
    # The scaling is for global layers, since local ones have a base of their own.
    assert (float(local.factor), float(full.factor)) == pytest.approx((1, 0.1 * np.log(8) + 1))
    assert local.frequencies.tolist() == pytest.approx([1, 0.1])
    assert full.frequencies[1] < 0.01


def test_facts_that_do_not_differ_are_constants_next_to_those_that_do():
    pattern = {"model.layer_pattern": ["local", "global"], "model.attention_window": 3}
    facts = look_up(table_of(**pattern), jnp.int32(1))
    assert isinstance(facts.window, jax.Array)
    assert isinstance(facts.frequencies, np.ndarray)


def test_layer_without_rotation_has_frequencies_of_zero():
    table = table_of(**{"model.layer_pattern": ["global", "global_nope"]})
    assert np.any(look_up(table, jnp.int32(0)).frequencies)
    assert not np.any(look_up(table, jnp.int32(1)).frequencies)
    assert table.is_rotated
    assert not table_of(**{"model.layer_pattern": ["global_nope"]}).is_rotated


def test_visible_share_counts_windows():
    window, pattern = {"model.attention_window": 4}, {"model.layer_pattern": ["local", "global"]}
    for values, expected in (
        ({}, 0.5),
        (window, (4 * 4 / 2 + 4 * 4) / 64),
        ({"model.attention_window": 100}, 0.5),
        (window | pattern, (0.5 + 24 / 64) / 2),
    ):
        assert visible_share(tiny(**values).model, 8) == pytest.approx(expected)

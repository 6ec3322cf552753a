from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny

from maxpipe.pipeline.layout import StageLayout, build_layout


def test_layer_index_of_even_chunks_follows_the_formula():
    for S, V, L in product((1, 2, 4), (1, 2, 3), (1, 2, 3)):
        layout = StageLayout.even(S, V, L)
        assert layout.num_layers == S * V * L
        v, s, l = np.indices(layout.shape)
        assert layout.shape == (V, S, L)
        np.testing.assert_array_equal(layout.layer_index, v * S * L + s * L + l)


def test_layer_index_of_uneven_chunks_is_padded_and_runs_back_in_v_placement():
    layout = StageLayout(2, 2, (1, 3, 2, 1))
    assert layout.num_layers == 7
    assert layout.shape == (2, 2, 3)
    assert layout.layer_index.tolist() == [[[0, 7, 7], [1, 2, 3]], [[4, 5, 7], [6, 7, 7]]]
    assert layout.stage_layers(0) == [[0], [4, 5]]
    assert layout.stage_layers(1) == [[1, 2, 3], [6]]
    back = StageLayout(2, 2, (1, 3, 2, 1), placement="v")
    assert [back.stage_layers(s) for s in (0, 1)] == [[[0], [6]], [[1, 2, 3], [4, 5]]]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("after", [[[0], [1]], [[2], [3]], [[4], [5]]]),
        ("before", [[[1], [2]], [[3], [4]], [[0], [5]]]),
    ],
)
def test_layer_index_has_further_rows_for_layers_outside(place, expected):
    layout = StageLayout(2, 2, (1, 1, 1, 1), num_outside=1, outside_first=place == "before")
    assert layout.layer_index.tolist() == expected
    assert layout.outside_index.tolist() == [expected[2][0][0]]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("stage=1 engine=sequential", StageLayout(1, 1, (5,))),
        ("schedule=circular parallel_layers=4", StageLayout(2, 2, (1,) * 4, num_outside=1)),
        (
            "schedule=lockstep_1f1b layers_per_stage=[1,1,1,1] parallel_layers=4 "
            "outside_layers=before",
            StageLayout(2, 2, (1,) * 4, num_outside=1, outside_first=True),
        ),
        ("schedule=zb_v parallel_layers=4", StageLayout(2, 2, (1, 1, 1, 2), placement="v")),
    ],
)
def test_layout_of_a_configuration_is_its_engines(words, expected):
    stages = "num_layers=5 stage=2 num_repeats=2 num_microbatches=4"
    assert build_layout(tiny(f"{stages} {words}")) == expected


LAYOUTS = [
    StageLayout.even(1, 1, 6),
    StageLayout.even(2, 3, 2),
    StageLayout(2, 2, (1, 3, 2, 1)),
    StageLayout(2, 2, (2, 2, 2, 2), placement="v"),
    StageLayout(3, 2, (1, 3, 2, 1, 2, 2), placement="v"),
    StageLayout(2, 2, (1, 1, 1, 1), num_outside=3),
    StageLayout(2, 1, (1, 2), num_outside=1, outside_first=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_from_canonical_then_to_canonical_is_exact(layout):
    canonical = np.random.default_rng(0).random((layout.num_layers, 2, 3), np.float32)
    live = np.asarray(layout.from_canonical(jnp.asarray(canonical)))
    assert live.shape == (*layout.shape, 2, 3)
    for index, layer in np.ndenumerate(layout.layer_index):
        expected = canonical[layer] if layer < layout.num_layers else np.zeros((2, 3), np.float32)
        np.testing.assert_array_equal(live[index], expected)
    np.testing.assert_array_equal(np.asarray(layout.to_canonical(jnp.asarray(live))), canonical)

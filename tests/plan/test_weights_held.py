"""What engines hold of weights and gradients, on numbers that make each part visible."""

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.plan.weights_held import (
    ParameterCounts,
    StageLayers,
    Use,
    WeightsOfParts,
    weights_held,
)

# 8 chunks of 2 layers on a stage, split over four devices; two bytes computed with, four at rest.
WEIGHTS = ParameterCounts(
    stored=170.0,
    at_rest=170.0,
    layers_at_rest=160.0,
    gathered=680.0,
    layer_at_rest=10.0,
    layer_gathered=40.0,
    projection=100.0,
    shared_at_rest=6.0,
    shared=120.0,
)
USE = Use(
    microbatches=8,
    repeats=8,
    layers=2,
    period=4,
    per_repeat=0.0,
    once=0.0,
    in_steps=0.0,
    size=2.0,
    stored=4.0,
    keeps_gathered=0.0,
    unrolled=0.0,
)


def held(engine, **changes):
    return weights_held(ENGINES[engine], WEIGHTS, USE._replace(**changes))


def test_loops_that_xla_writes_hold_all_layers_cast():
    assert held("sequential").copies == 2 * 160
    assert held("circular").copies == 2 * 160 + 2 * 100  # and the projection's gradient
    assert held("sequential", stored=2.0).copies == 0
    assert held("scheduled").copies == 0
    assert held("scheduled", in_steps=1.0).copies == 2 * 160


def test_weights_that_are_whole_are_cast_before_the_loop_of_a_lockstep_engine():
    whole = WEIGHTS._replace(layer_at_rest=40.0, layers_at_rest=640.0)
    cast, same = (
        weights_held(ENGINES["scheduled"], whole, USE._replace(stored=stored))
        for stored in (4.0, 2.0)
    )
    assert cast.copies == 2 * 640
    assert same.copies == 0
    assert same.unit - cast.unit == 2 * 2 * 40  # a chunk


def test_gradients_of_a_microbatch_wait_where_there_are_several():
    assert held("sequential").gradients == 4 * 170 + 4 * 170
    assert held("sequential", microbatches=1).gradients == 4 * 170


def test_gradients_of_unrolled_layers_come_one_after_another():
    assert held("sequential").late == 0
    # Of several microbatches those that wait, of one the sums.
    assert held("sequential", unrolled=1.0, stored=2.0).late == 2 * 160
    assert held("sequential", unrolled=1.0, stored=2.0, microbatches=1).late == 4 * 160


def test_weights_gathered_once_a_repeat_are_there_two_or_three_times():
    for microbatches, repeats, sets, sums in (
        (8, 1, 1, 1),
        (8, 2, 2, 2),
        (8, 8, 2, 2),
        (4, 2, 2, 2),
        (4, 8, 3, 2),
    ):
        found = held("circular", microbatches=microbatches, repeats=repeats, per_repeat=1.0)
        chunk = 2 * 40
        assert found.copies == 2 * sets * chunk + 2 * 100, (microbatches, repeats)
        # Of the repeats at work there are whole sums, and no gradients at rest yet.
        assert found.gradients == 4 * (170 - sums * 160 / repeats + sums * chunk)
        assert found.head == 2 * 100, (microbatches, repeats)


def test_weights_gathered_once_are_whole_with_their_gradients():
    circular, lockstep = held("circular", once=1.0), held("scheduled", once=1.0)
    assert circular.copies == 2 * 680 + 2 * 100
    assert circular.gradients == 4 * 680
    # Layers, head and first dense layers; the embedding stays split.
    assert lockstep.copies == 2 * (640 + 120)
    assert lockstep.gradients == 4 * (640 + 120 + (170 - 160 - 6))


def test_layers_outside_the_pipeline_are_whole_on_a_lockstep_engine_that_gathers_once():
    """Three of 40 values, each split over four stages more, in eight rows of a stage."""
    parts = WeightsOfParts(10.0, 40.0, 40.0, 2.5, 10.0, 40.0, 100.0, 6.0, 120.0)
    layers = StageLayers(in_chunks=16, in_rows=8, outside=3)
    without, outside = parts.on_stage(layers._replace(in_rows=0, outside=0)), parts.on_stage(layers)
    assert without == WEIGHTS
    assert outside.stored - without.stored == outside.outside_rows == 8 * 10

    def more(engine, part, **changes):
        of_both = (
            weights_held(ENGINES[engine], weights, USE._replace(**changes))
            for weights in (outside, without)
        )
        return float(np.subtract(*(getattr(each, part) for each in of_both)))

    laid_out = 4 * 3 * 2.5
    assert more("scheduled", "copies") == laid_out
    assert more("scheduled", "gradients") == laid_out
    assert more("scheduled", "copies", once=1.0) == laid_out + 2 * 3 * 40
    assert more("scheduled", "gradients", once=1.0) == 4 * 3 * 40
    # Its gradients come all at once, more than those of a chunk of two layers.
    assert more("scheduled", "unit", once=1.0) == 4 * (3 - 2) * 40
    for mode in ({}, {"per_repeat": 1.0}, {"once": 1.0}):
        assert more("circular", "copies", **mode) == laid_out
        assert more("circular", "gradients", **mode) == 4 * 8 * 10


def test_gradients_of_a_chunk_that_is_gathered_in_steps_are_there_whole():
    plain, in_steps = held("scheduled"), held("scheduled", in_steps=1.0)
    chunk = 2 * 40
    # A chunk, the gradients of its shards, and one layer's whole gradient.
    assert plain.unit == 2 * chunk + 4 * (2 * 10 + 40)
    assert in_steps.unit == 2 * chunk + 2 * chunk
    assert plain.head == (2 + 4) * 100


def test_many_are_computed_at_once():
    once = np.array([0.0, 1.0])
    found = held("scheduled", once=once)
    for place, value in enumerate(once):
        assert [np.broadcast_to(part, 2)[place] for part in found] == [
            *held("scheduled", once=value)
        ]

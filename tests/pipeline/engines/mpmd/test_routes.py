"""Values travel along the pipeline, rest where they are needed, and are dropped after their last reader."""

import jax.numpy as jnp
import pytest
from helpers.mpmd_programs import assert_computes, chain, inputs, sliced, weights

from maxpipe.pipeline.engines.mpmd.marks import mark_stage_boundary as mark
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.engines.mpmd.runner import before, route


def skip(w, x):
    """The first chunk's output is read again by the fourth."""
    first = x = mark(jnp.sin(x @ w[0]))
    x = mark(jnp.sin(x @ w[1]))
    x = mark(jnp.sin(x @ w[2]))
    return jnp.sum(mark(x @ w[3] * first))


def counts(routes):
    return {str(name): len(values) for name, values in routes.sends.items() if values}


def test_a_value_for_a_far_stage_is_handed_on():
    program = sliced(skip, weights(4), inputs())
    assert_computes(program, skip, weights(4), inputs())
    # Back from chunk 3 travel the gradients of the activation and of the skipped value.
    assert counts(route(program, [0, 1, 2, 3])) == {
        "F0": 1,
        "F1": 2,
        "F2": 2,
        "B3": 2,
        "B2": 2,
        "B1": 1,
    }


def test_nothing_is_sent_to_a_stage_that_has_it():
    program = sliced(skip, weights(4), inputs())
    forward = {n: k for n, k in counts(route(program, [0, 1, 1, 0])).items() if n[0] == "F"}
    assert forward == {"F0": 1, "F2": 1}


def test_one_stage_sends_nothing():
    assert not counts(route(sliced(skip, weights(4), inputs()), [0] * 4))


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("stages", [[0, 1, 2], [0, 1, 0], [0, 0, 1]], ids=str)
def test_every_value_is_there_when_it_is_read_and_gone_in_the_end(stages, split):
    program = sliced(chain, weights(), inputs(), split_backwards=split)
    routes = route(program, stages)
    there = [set() for _ in routes.uses]
    left = [{v: len(names) for v, names in uses.items()} for uses in routes.uses]
    for name, computation in program.computations.items():
        stage = stages[name.chunk]
        there[stage].update(computation.writes)
        assert there[stage].issuperset(computation.reads), name
        if routes.sends[name]:
            following = name.chunk + (1 if name.kind == "F" else -1)
            assert there[stage].issuperset(routes.sends[name])
            there[stages[following]].update(routes.sends[name])
        for v, names in routes.uses[stage].items():
            if name in names:
                left[stage][v] -= 1
                if not left[stage][v]:
                    there[stage].discard(v)
    assert not any(there)


def test_last_reads_are_those_of_every_schedule():
    program = sliced(chain, weights(), inputs(), split_backwards=True)
    routes = route(program, [0, 1, 2])
    for name, computation in program.computations.items():
        stage = name.chunk
        for v in routes.last_reads(stage, name):
            assert all(other == name or before(other, name) for other in routes.uses[stage][v])
        if name.kind == "W":
            assert set(computation.reads) == routes.last_reads(stage, name)


def test_order_that_schedules_keep():
    assert before(UnitName("F", 0), UnitName("F", 1))
    assert before(UnitName("F", 2), UnitName("B", 0))
    assert before(UnitName("I", 2), UnitName("I", 1))
    assert before(UnitName("I", 1), UnitName("W", 1))
    assert not before(UnitName("W", 2), UnitName("I", 1))
    assert not before(UnitName("W", 2), UnitName("W", 1))
    assert not before(UnitName("F", 1), UnitName("F", 0))

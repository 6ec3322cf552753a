"""Times of units, and how often the table takes conditionals, from a plan and made-up seconds."""

import numpy as np
import pytest

from maxpipe.compile.prediction.operations import Part, Price
from maxpipe.compile.prediction.origins import Origin
from maxpipe.compile.prediction.predict import phase_times
from maxpipe.compile.prediction.unit_times import (
    chunk_share,
    global_share,
    phases_of,
    times_taken,
    unit_seconds,
)
from maxpipe.compile.prediction.walk import Conditional, Loop, Place, Spent, Timeline
from maxpipe.config import Config, replace, resolve
from maxpipe.pipeline.engines.scheduled.tick_plan import lockstep_plan
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.plan.simulate import simulate


def table_of(schedule, **values):
    keys = {"mesh.ici.stage": 4, "pipeline.num_microbatches": 8, "pipeline.schedule": schedule}
    keys |= {"model.num_layers": 16, "data.global_batch_size": 16, "eval.every": 0}
    return build_table(resolve(replace(Config(), **(keys | values)), 4))


def with_phases(schedule, **values):
    table = table_of(schedule, **values)
    return table, phases_of(lockstep_plan(table))


def origin(words):
    return Origin(f"jit(train_step)/shard_map/{words}/cond")


def test_phases_of_lockstep_1f1b_take_the_head_once_a_microbatch():
    for repeats, forward_ticks, both in ((2, 7, 12), (4, 15, 20)):
        _, phases = with_phases("lockstep_1f1b", **{"pipeline.num_repeats": repeats})
        found = [(phase.kinds, phase.ticks, phase.heads) for phase in phases]
        assert found == [("F", forward_ticks, 0), ("FB", both, 8), ("B", forward_ticks, 0)]
        assert sum(phase.embeddings for phase in phases) == 8, repeats
        assert sum(phase.embedding_gradients for phase in phases) == 8, repeats
        assert times_taken(phases, 1.0, origin("phase_1/while/body/head"), both) == 8
        forward = origin("phase_0/while/body/forward/embedding")
        assert times_taken(phases, 1.0, forward, 7) == phases[0].embeddings
        backward = origin("phase_2/while/body/backward/embedding")
        assert times_taken(phases, 1.0, backward, 7) == phases[2].embedding_gradients
        # A conditional that is none of the table's is taken each time.
        assert times_taken(phases, 1.0, origin("optimizer"), 1) == 1, repeats


def test_global_share_is_that_of_the_stage_with_most_layers_that_see_all():
    for layers, stages, repeats, share in (
        (6, 1, 1, 2 / 6),
        (12, 2, 1, 2 / 6),
        (8, 2, 2, 1 / 2),  # 2 of 8 layers, but in either repeat some stage has one of its two
    ):
        pattern = ["local", "local", "global"] if layers % 3 == 0 else ["local"] * 3 + ["global"]
        keys = {"model.layer_pattern": pattern, "model.attention_window": 8}
        keys |= {"model.num_layers": layers, "mesh.ici.stage": stages, "eval.every": 0}
        keys |= {"pipeline.num_repeats": repeats, "pipeline.num_microbatches": 2 * stages}
        config = resolve(replace(Config(), **keys), stages)
        assert global_share(config) == pytest.approx(share), (layers, stages)
        attention = Origin("jit(train_step)/transpose(jvp(layer))/attention/cond")
        assert times_taken([], global_share(config), attention, 12) == pytest.approx(12 * share)


def test_chunk_share_is_that_of_the_chunks_own_layers():
    keys = {"model.layer_pattern": ["local"] * 3 + ["global"], "model.attention_window": 8}
    model = resolve(replace(Config(), **keys, **{"model.num_layers": 8}), 1).model
    assert [chunk_share(model, np.array(layers)) for layers in ([0, 1], [2, 3], [3])] == [0, 0.5, 1]


def spent(phase, ticks, seconds, conditional=""):
    place = Place(phase, conditional, ticks)
    return Spent("f", Price(Part.LOOP_FUSIONS, seconds), Origin(), place, seconds)


def test_unit_seconds_of_split_backwards_come_from_the_phases_ticks():
    words = {"pipeline.num_repeats": 1, "pipeline.remat_policy": "minimal"}
    table, phases = with_phases("lockstep_zb", **words)
    slots = {"F": 3.0, "I": 4.0, "W": 2.0}
    parts = []
    for number, phase in enumerate(phases):
        seconds = sum(slots[kind] for kind in phase.kinds)
        parts.append(spent(f"phase_{number}", phase.ticks, seconds))
        parts.append(spent(f"phase_{number}", phase.heads, 0.5, "head"))
    head = Conditional("head", "phase_1", 12, 8, 0.5)
    timeline = Timeline(spent=parts, conditionals=[head])
    units = unit_seconds(timeline, table, phases)
    assert units.backward is None
    assert (units.forward, units.input_gradient, units.weight_gradient) == pytest.approx((3, 4, 2))
    # Four stages share the head.
    assert units.head == pytest.approx(4 * 0.5)
    assert units.words() == "forward=3 input_gradient=4 weight_gradient=2 head=2"
    step = sum(part.total for part in timeline.spent)
    assert simulate(table, units.costs()).makespan == pytest.approx(step)


def test_unit_seconds_hold_the_conditionals_of_attention():
    table, phases = with_phases("lockstep_1f1b", **{"pipeline.num_repeats": 2})
    slots = {"F": (1.0, "attention"), "B": (2.0, "attention gradient")}
    parts = []
    for number, phase in enumerate(phases):
        for seconds, attention in map(slots.get, phase.kinds):
            for conditional in ("", attention):
                parts.append(spent(f"phase_{number}", phase.ticks, seconds, conditional))
    units = unit_seconds(Timeline(spent=parts), table, phases)
    assert (units.forward, units.backward) == pytest.approx((2, 4))


def test_unit_seconds_that_phases_do_not_tell_apart_are_unknown():
    table, phases = with_phases("lockstep_1f1b", **{"pipeline.num_repeats": 2})
    (both,) = [phase for phase in phases if phase.kinds == "FB"]
    assert unit_seconds(Timeline(spent=[spent("phase_0", 12, 5.0)]), table, [both]) is None
    seconds = {"F": 5.0, "FB": 4.0, "B": 0.5}
    parts = [spent(f"phase_{n}", p.ticks, seconds[p.kinds]) for n, p in enumerate(phases)]
    assert unit_seconds(Timeline(spent=parts), table, phases) is None


def test_phase_times_take_one_iteration_from_the_loop_if_that_has_all_of_them():
    parts = [spent("forward loop 1", 4, 2.0), spent("forward loop 1", 1, 1.0)]
    loop = Loop("forward loop 1", "a", 4, 2.0)
    (time,) = phase_times(Timeline(spent=parts, loops=[loop]), [])
    assert (time.iterations, time.seconds, time.each) == (4, 9.0, 2.0)
    _, phases = with_phases("lockstep_1f1b", **{"pipeline.num_repeats": 2})
    shorter = Loop("phase_0", "a", phases[0].ticks - 1, 2.0)
    (time,) = phase_times(Timeline(spent=[spent("phase_0", 7, 3.0)], loops=[shorter]), phases)
    assert (time.iterations, time.each) == (7, 3.0)


def test_unit_seconds_of_the_circular_engine_are_those_of_its_longest_loops():
    table = table_of("circular", **{"pipeline.num_repeats": 2})
    loops = [
        Loop("forward loop 1", "a", 19, 1.5),
        Loop("forward loop 2", "b", 4, 2.0),  # of the head
        Loop("backward loop 1", "c", 4, 5.0),
        Loop("backward loop 2", "d", 19, 4.0),
    ]
    slots = Place("forward loop 2", "", 2.0)  # each stage has two of the eight microbatches
    head = Spent("m", Price(Part.MATRIX_PRODUCTS, 0.5), origin("head"), slots, 0.5)
    units = unit_seconds(Timeline(loops=loops, spent=[head]), table, [])
    assert (units.forward, units.backward) == pytest.approx((1.5, 4.0))
    assert units.words() == "forward=3 backward=8 head=0.5"
    assert unit_seconds(Timeline(loops=loops[:2]), table, []) is None

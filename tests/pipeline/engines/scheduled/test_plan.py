"""The plan of the scheduled engine: replayed value by value, its text, phases and facts."""

import textwrap

import jax
import numpy as np
import pytest
from helpers.random_tables import tables
from hypothesis import given

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.engines.scheduled import stage_program
from maxpipe.pipeline.engines.scheduled.tick_plan import lockstep_plan, plan_text
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import ScheduleError, forward_only, from_ticks, phases
from maxpipe.pipeline.schedules.validate import validate


def replay(table):
    """Move the names of values through the plan's slots as the engine does; check every read.

    A value's name is (microbatch, global chunk).
    """
    plan, S, last = lockstep_plan(table), table.num_stages, table.num_chunks - 1
    # Indices of idle slots are legal as well.
    for slot in (plan.F, plan.B, plan.W):
        assert {index.dtype.name for index in slot} <= {"bool", "int32"}
        limits = {"microbatch": table.num_microbatches - 1, "chunk": table.num_repeats - 1}
        limits |= {"residuals": plan.sizes.residuals, "stash": plan.sizes.stash}
        store = plan.sizes.activations if slot is plan.F else plan.sizes.gradients
        for name, index in slot._asdict().items():
            assert index.min() >= 0
            assert index.max() <= limits.get(name, max(store, 1)), name
    activations, gradients, residuals, stash, sent = {}, {}, {}, {}, []
    f_units, b_units, w_units = [], [], []
    for tick in range(table.num_ticks):
        t = plan.ticks(tick, tick + 1)
        F, B, W, ends = jax.tree.map(lambda a: a[0], (t.F, t.B, t.W, t.ends))
        f_out, b_out, from_head = {}, {}, None
        # F slots and the head.
        for s in np.flatnonzero(F.active):
            unit = (F.microbatch[s], F.chunk[s] * S + s)
            assert F.embeds[s] == (unit[1] == 0)
            assert F.embeds[s] == (F.reads[s] == plan.sizes.activations)
            if F.embeds[s]:
                assert ends.embed == unit[0]
            else:
                assert activations[s, F.reads[s]] == unit
            residuals[s, F.residuals[s]] = f_out[s] = unit
            f_units.append(unit)
            if unit[1] == last:
                assert ends.head == unit[0]
                from_head = unit
        assert (ends.embed == -1) == (not F.embeds.any())
        assert (ends.head == -1) == (from_head is None)
        # B slots.
        for s in np.flatnonzero(B.active):
            unit = (B.microbatch[s], B.chunk[s] * S + s)
            assert residuals[s, B.residuals[s]] == unit
            assert (from_head if B.from_head[s] else gradients[s, B.reads[s]]) == unit
            b_out[s] = (unit[0], unit[1] - 1)
            b_units.append(unit)
            if plan.splits_backward:
                stash[s, B.stash[s]] = unit
            if unit[1] == 0:
                assert ends.embed_backward == unit[0]
        # W slots.
        for s in np.flatnonzero(W.active):
            unit = (W.microbatch[s], W.chunk[s] * S + s)
            assert residuals[s, W.residuals[s]] == unit
            assert stash[s, W.stash[s]] == unit
            w_units.append(unit)
        # The head's gradient and the transfers.
        for s in range(S):
            if ends.head_gradient[s] < plan.sizes.gradients:
                assert s == S - 1
                gradients[s, ends.head_gradient[s]] = from_head
        sent.append((f_out, b_out))
        if tick + 1 >= table.forwarding_delay:
            f_out, b_out = sent[-table.forwarding_delay]
            for s in range(S):
                if F.arrival[s] < plan.sizes.activations:
                    microbatch, chunk = f_out[(s - 1) % S]
                    activations[s, F.arrival[s]] = (microbatch, chunk + 1)
                if B.arrival[s] < plan.sizes.gradients:
                    gradients[s, B.arrival[s]] = b_out[(s + 1) % S]
    units = {(m, g) for m in range(table.num_microbatches) for g in range(last + 1)}
    assert sorted(f_units) == sorted(units)
    assert sorted(b_units) == (sorted(units) if len(table.kinds) > 1 else [])
    assert sorted(w_units) == (sorted(units) if "W" in table.kinds else [])
    embedded = sorted(m for m in plan.ends.embed_backward if m >= 0)
    assert embedded == (list(range(table.num_microbatches)) if len(table.kinds) > 1 else [])
    return plan


@given(tables(placements=("loop",)))
def test_plan_of_a_random_loop_table_replays(table):
    replay(table)
    replay(forward_only(table))


@pytest.mark.parametrize(
    "name",
    ["lockstep_1f1b", "lockstep_zb", "circular", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"],
)
@pytest.mark.parametrize(("S", "M", "V"), [(1, 4, 2), (2, 3, 2), (4, 8, 2), (4, 11, 3), (4, 2, 2)])
def test_plan_of_a_schedule_replays(name, S, M, V):
    schedule = SCHEDULES[name]
    for delay in (1, 2) if schedule.delays else (1,):
        for slack in (0, 1, 2) if schedule.overlaps else (0,):
            repeats = schedule.repeats_for(V)
            replay(load_schedule(name, S, M, repeats, forwarding_delay=delay, slack=slack))


def test_plan_text_of_the_worked_example_is_in_the_stage_programs_docstring():
    text = plan_text(lockstep_plan(load_schedule("lockstep_1f1b", 2, 3, 1)))
    assert textwrap.indent(text, "    ") in stage_program.__doc__


def test_plan_text_of_split_backwards_names_stash_and_stored_head_gradients():
    lines = plan_text(lockstep_plan(load_schedule("lockstep_zb", 2, 3, 1, slack=1))).split("\n")
    assert lines[2].split() == ["1", "idle", "a0"]
    assert lines[6] == f"{'':<5} 1      {'1F1: a0 -> r1; head 1 -> g0; 1I0: g0 r0 -> s0':<56} a0"
    assert lines[7].startswith("3     0      0I0: g0 r0 -> s0 embedding; 0W0: r0 s0 ")


def slots_in_use(plan):
    rows = []
    for start, stop in plan.phases:
        phase = plan.ticks(start, stop)
        slots = (phase.F.active, phase.ends.head >= 0, phase.B.active, phase.W.active)
        rows.append((start, stop, *(bool(slot.any()) for slot in slots)))
    return rows


def test_phases_of_lockstep_schedules_have_the_slots_that_run():
    """F; F, head and B; B. Of split backwards W runs from the first stage's first I on."""
    S, M, V = 4, 8, 2
    D = V * S - 1
    table = load_schedule("lockstep_1f1b", S, M, V)
    expected = [
        (0, D, True, False, False, False),
        (D, M * V + S - 1, True, True, True, False),
        (M * V + S - 1, D + M * V + S - 1, False, False, True, False),
    ]
    assert slots_in_use(lockstep_plan(table)) == expected
    assert [(p.start, p.stop) for p in phases(table)] == [p[:2] for p in expected]
    assert [p.kinds for p in phases(table)] == [("F",), ("F", "B"), ("B",)]
    assert slots_in_use(lockstep_plan(load_schedule("lockstep_zb", S, M, V))) == [
        (0, D, True, False, False, False),
        (D, D + S - 1, True, True, True, False),
        (D + S - 1, M * V + S - 1, True, True, True, True),
        (M * V + S - 1, D + M * V + S - 1, False, False, True, True),
    ]
    # With slack the head comes before the first B.
    plan = lockstep_plan(load_schedule("lockstep_1f1b", S, M, 1, slack=1))
    assert [has_head for _, _, _, has_head, _, _ in slots_in_use(plan)] == [True, True, False]
    assert (plan.ends.head_gradient < plan.sizes.gradients).sum() == M


def test_plan_of_a_table_that_the_engine_has_no_slots_for_is_refused():
    # One stage, two microbatches: the first backward full, the second split.
    ticks = {"F": [[0], [1]], "B": [[2], [-1]], "I": [[-1], [3]], "W": [[-1], [4]]}
    mixed = from_ticks("mixed", 1, 1, {kind: np.array(tick) for kind, tick in ticks.items()})
    for table, reason in (
        (load_schedule("dualpipe_v", 2, 4, 2), "places chunks as 'v'"),
        (mixed, "both B and I units"),
    ):
        validate(table)
        with pytest.raises(ScheduleError, match=f"run on the scheduled engine: it .*{reason}"):
            lockstep_plan(table)

import numpy as np
import pytest
from helpers.random_tables import tables
from hypothesis import given

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.engines.scheduled.plan import lockstep_plan
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.table import ScheduleError, forward_only, from_ticks, phases
from maxpipe.pipeline.schedules.validate import validate


def replay(table):
    """Moves the names of values through the plan's slots as the engine moves the values, and checks every
    read."""
    plan, S, last = lockstep_plan(table), table.num_stages, table.num_chunks - 1
    activations, gradients, residuals, stash, sent = {}, {}, {}, {}, []
    f_units, b_units, w_units = [], [], []
    for tick in range(table.num_ticks):
        f_out, b_out, from_head = {}, {}, None
        for s in np.flatnonzero(plan.f_active[tick]):
            microbatch, chunk = plan.f_microbatch[tick, s], plan.f_chunk[tick, s] * S + s
            if chunk:
                assert activations[s, plan.f_in_slot[tick, s]] == (microbatch, chunk)
            else:
                assert plan.f_in_slot[tick, s] == -1
            residuals[s, plan.residual_slot_f[tick, s]] = f_out[s] = (microbatch, chunk)
            f_units.append((microbatch, chunk))
            if chunk == last:
                assert plan.head_microbatch[tick] == microbatch
                from_head = (microbatch, last)
        assert (from_head is None) == (plan.head_microbatch[tick] == -1)
        for s in np.flatnonzero(plan.b_active[tick]):
            unit = (plan.b_microbatch[tick, s], plan.b_chunk[tick, s] * S + s)
            slot = plan.b_in_slot[tick, s]
            assert residuals[s, plan.residual_slot_b[tick, s]] == unit
            assert (gradients[s, slot] if slot >= 0 else from_head) == unit
            b_out[s] = (unit[0], unit[1] - 1)
            b_units.append(unit)
            if plan.splits_backward:
                stash[s, plan.stash_slot_b[tick, s]] = unit
            if unit[1] == last:
                assert plan.head_used_at[np.flatnonzero(plan.head_microbatch == unit[0])] == tick
        for s in np.flatnonzero(plan.w_active[tick]):
            unit = (plan.w_microbatch[tick, s], plan.w_chunk[tick, s] * S + s)
            assert residuals[s, plan.residual_slot_w[tick, s]] == unit
            assert stash[s, plan.stash_slot_w[tick, s]] == unit
            w_units.append(unit)
        if plan.head_gradient_slot[tick] >= 0:
            gradients[S - 1, plan.head_gradient_slot[tick]] = from_head
        sent.append((f_out, b_out))
        if tick + 1 >= table.forwarding_delay:
            f_out, b_out = sent[-table.forwarding_delay]
            for s in range(S):
                if plan.arrive_f_slot[tick, s] >= 0:
                    microbatch, chunk = f_out[(s - 1) % S]
                    activations[s, plan.arrive_f_slot[tick, s]] = (microbatch, chunk + 1)
                if plan.arrive_b_slot[tick, s] >= 0:
                    gradients[s, plan.arrive_b_slot[tick, s]] = b_out[(s + 1) % S]
    units = {(m, g) for m in range(table.num_microbatches) for g in range(last + 1)}
    assert sorted(f_units) == sorted(units)
    assert sorted(b_units) == (sorted(units) if len(table.kinds) > 1 else [])
    assert sorted(w_units) == (sorted(units) if "W" in table.kinds else [])
    return plan


@given(tables(placements=("loop",)))
def test_replays_any_loop_placed_table(table):
    replay(table)
    replay(forward_only(table))


@pytest.mark.parametrize(
    "name",
    ["lockstep_1f1b", "lockstep_zb", "circular", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"],
)
@pytest.mark.parametrize(("S", "M", "V"), [(1, 4, 2), (2, 3, 2), (4, 8, 2), (4, 11, 3), (4, 2, 2)])
def test_replays_schedules(name, S, M, V):
    schedule = SCHEDULES[name]
    for delay in (1, 2) if schedule.delays else (1,):
        for slack in (0, 1, 2) if schedule.overlaps else (0,):
            replay(
                load_schedule(
                    name, S, M, schedule.repeats_for(V), forwarding_delay=delay, slack=slack
                )
            )


def test_indices_are_legal_where_nothing_runs():
    plan = lockstep_plan(load_schedule("lockstep_1f1b", 4, 8, 2))
    for array in (plan.f_microbatch, plan.f_chunk, plan.b_microbatch, plan.b_chunk):
        assert array.dtype == np.int32
        assert array.min() == 0
    assert (
        plan.f_in_slot.dtype == plan.arrive_b_slot.dtype == plan.head_microbatch.dtype == np.int32
    )


def test_phases_of_lockstep_1f1b_are_forward_both_backward():
    S, M, V = 4, 8, 2
    table = load_schedule("lockstep_1f1b", S, M, V)
    D = V * S - 1
    expected = [
        (0, D, True, False, False, False),
        (D, M * V + S - 1, True, True, True, False),
        (M * V + S - 1, D + M * V + S - 1, False, False, True, False),
    ]
    assert [tuple(p) for p in lockstep_plan(table).phases] == expected
    assert [(p.start, p.stop) for p in phases(table)] == [p[:2] for p in expected]
    assert [p.kinds for p in phases(table)] == [("F",), ("F", "B"), ("B",)]


def test_phases_of_lockstep_zb_have_weight_gradients_where_every_stage_may_have_one():
    S, M, V = 4, 8, 2
    D = V * S - 1
    assert [tuple(p) for p in lockstep_plan(load_schedule("lockstep_zb", S, M, V)).phases] == [
        (0, D, True, False, False, False),
        (D, D + S - 1, True, True, True, False),
        (D + S - 1, M * V + S - 1, True, True, True, True),
        (M * V + S - 1, D + M * V + S - 1, False, False, True, True),
    ]


def test_slack_moves_the_head_into_the_first_phase():
    plan = lockstep_plan(load_schedule("lockstep_1f1b", 4, 8, 1, slack=1))
    assert [p.has_head for p in plan.phases] == [True, True, False]
    assert (plan.head_gradient_slot >= 0).sum() == 8


def test_phases_stay_few_however_often_a_table_alternates():
    table = load_schedule("1f1b", 1, 16)
    assert len(phases(table)) > 8
    assert len(lockstep_plan(table).phases) == 3


@pytest.mark.parametrize(
    ("name", "reason"), [("dualpipe_v", "places chunks as 'v'"), ("mixed", "both B and I units")]
)
def test_what_the_engine_has_no_slot_for_is_refused(name, reason):
    if name == "mixed":
        # One stage, two microbatches: the first backward whole, the second in two.
        ticks = {"F": [[0], [1]], "B": [[2], [-1]], "I": [[-1], [3]], "W": [[-1], [4]]}
        table = from_ticks(name, 1, 1, {kind: np.array(tick) for kind, tick in ticks.items()})
    else:
        table = load_schedule(name, 2, 4, 2)
    validate(table)
    with pytest.raises(
        ScheduleError, match=f"{name}: cannot run on the scheduled engine: it .*{reason}"
    ):
        lockstep_plan(table)

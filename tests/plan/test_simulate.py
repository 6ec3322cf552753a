import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.order import dependency
from maxpipe.pipeline.schedules.table import forward_only
from maxpipe.plan.simulate import Costs, simulate

FREE_RUNNING = [
    *("1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zb"),
    *("zb_h2", "zb_v", "v_half", "v_min", "dualpipe_v"),
]
COST = st.sampled_from([0.0, 0.5, 1.0, 2.0])


def build(name, S, M, V=1, **options):
    schedule = SCHEDULES[name]
    return load_schedule(name, S, M, schedule.repeats_for(V), **options)


@given(
    name=st.sampled_from(FREE_RUNNING),
    S=st.integers(1, 4),
    M=st.integers(1, 9),
    V=st.integers(1, 3),
    communication=COST,
    head=COST,
    data=st.data(),
)
def test_free_running_units_start_as_soon_as_they_can(name, S, M, V, communication, head, data):
    table = build(name, S, M, V)
    count = data.draw(st.sampled_from([S, table.num_chunks]), label="times of stages or of chunks")
    one_each = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=count, max_size=count)
    times = {kind: data.draw(one_each) for kind in "FBIW"}
    run = simulate(table, Costs(*times.values(), communication=communication, head=head))
    order = sorted(
        (tick, stage, kind, m, int(table.global_chunk(c, stage)))
        for kind in table.kinds
        for tick, stage, m, c in zip(*(a.tolist() for a in table.units(kind)), strict=True)
    )
    units = {unit[2:] for unit in order}
    free, ended = [0.0] * S, {}
    for _, stage, kind, m, g in order:
        needs = dependency((kind, m, g), table.num_chunks - 1, units)
        far = needs is not None and table.stage_of_chunk[needs[2]] != stage
        begin = max(free[stage], ended[needs] + far * communication if needs else 0.0)
        assert run.start[kind][m, g] == pytest.approx(begin)
        assert run.end[kind][m, g] == pytest.approx(begin + times[kind][stage if count == S else g])
        free[stage] = ended[kind, m, g] = run.end[kind][m, g] + head * (
            kind == "F" and g == table.num_chunks - 1
        )
    assert run.makespan == pytest.approx(max(free))
    assert run.work.sum() == pytest.approx(
        sum(np.nansum(run.end[k] - run.start[k]) for k in table.kinds) + M * head
    )


def test_lockstep_pays_for_a_transfer_after_every_tick_but_the_last():
    S, M, V, communication = 4, 8, 2, 0.25
    table = build("lockstep_1f1b", S, M, V)
    costs = Costs(1, 2, communication=communication)
    assert simulate(table, costs).makespan == pytest.approx(
        (M * V + S - 1) * 3 + (table.num_ticks - 1) * communication
    )


def test_delayed_forwarding_hides_transfers_that_are_no_longer_than_a_slot():
    for name in ("circular", "lockstep_1f1b", "lockstep_zb"):
        table = build(name, 4, 8, 2, forwarding_delay=2)
        free = simulate(table, Costs(1, 2)).makespan
        assert simulate(table, Costs(1, 2, communication=1)).makespan == pytest.approx(free)
        assert simulate(table, Costs(1, 2, communication=1.5)).makespan > free


def test_slack_lets_collectives_run_during_the_other_slot():
    S, M, F, B = 4, 16, 1.0, 2.0
    costs = Costs(F, B, collectives=0.25)
    plain = simulate(build("lockstep_1f1b", S, M), costs)
    slack = simulate(build("lockstep_1f1b", S, M, slack=1), costs)
    ticks_with_both = M + S - 1 - S
    assert plain.makespan == pytest.approx((M + S - 1) * (F + B))
    assert slack.makespan == pytest.approx((M + S - 1) * (F + B) - ticks_with_both * 0.25 * (F + B))
    assert all((slack.end[kind] <= slack.makespan + 1e-9).all() for kind in "FB")


def test_slack_overlaps_the_input_gradient_and_leaves_the_weight_gradient_behind_it():
    S, M, F, I, W = 4, 16, 1.0, 2.0, 1.5
    run = simulate(build("lockstep_zb", S, M, slack=1), Costs(F, I + W, I, W, collectives=0.25))
    ticks_with_both = M + S - 1 - S
    assert run.makespan == pytest.approx(
        M * (F + I + W) + (S - 1) * (F + I) - ticks_with_both * 0.25 * (F + I)
    )
    assert (run.end["I"] <= run.start["W"] + 1e-9).all()
    assert all((run.end[kind] <= run.makespan + 1e-9).all() for kind in "FIW")


def test_the_slowest_stage_sets_the_tick():
    slow = Costs([1, 1, 1, 3], [2, 2, 2, 6])
    lockstep, free = (simulate(build(name, 4, 8), slow) for name in ("lockstep_1f1b", "1f1b"))
    assert lockstep.makespan == pytest.approx((8 + 3) * 9)
    assert free.makespan == pytest.approx(8 * 9 + 3 * 3)
    assert free.work.tolist() == [24, 24, 24, 72]


def test_the_head_is_spread_over_lockstep_stages_and_sits_on_the_last_free_running_one():
    S, M, head = 4, 8, 2.0
    lockstep, free = (
        simulate(build(name, S, M), Costs(head=head)) for name in ("lockstep_1f1b", "1f1b")
    )
    assert lockstep.work.tolist() == [3 * M + head * M / S] * S
    assert lockstep.makespan == pytest.approx((M + S - 1) * 3 + M * head / S)
    assert free.work.tolist() == [3 * M] * (S - 1) + [(3 + head) * M]
    assert (lockstep.head_start >= lockstep.end["F"][:, -1] - 1e-9).all()
    assert (lockstep.head_end <= lockstep.start["B"][:, -1] + 1e-9).all()
    assert (free.head_start == free.end["F"][:, -1]).all()
    assert (free.head_end - free.head_start == head).all()


def test_bytes_sent():
    run = simulate(build("lockstep_1f1b", 4, 8, 2), Costs(activation_bytes=10))
    assert run.bytes_sent.tolist() == [8 * 10 * n for n in (3, 4, 4, 3)]
    assert simulate(forward_only(run.table)).bytes_sent.tolist() == [16, 16, 16, 8]
    assert simulate(build("lockstep_1f1b", 1, 8, 2)).bytes_sent.tolist() == [0]


def test_in_flight_curve_starts_and_ends_empty_and_moves_by_one():
    run = simulate(build("lockstep_1f1b", 4, 8, 2))
    for stage in range(4):
        times, count = run.in_flight(stage)
        assert count[-1] == 0
        assert count.max() == run.peak_in_flight[stage]
        assert set(np.abs(np.diff(count, prepend=0)).tolist()) == {1}
        assert (np.diff(times) >= -1e-9).all()


def test_forward_alone():
    run = simulate(forward_only(build("circular", 4, 8, 2)), Costs(forward=2))
    assert run.makespan == pytest.approx(2 * (16 + 3))
    assert run.bubble == pytest.approx(2 * 3)

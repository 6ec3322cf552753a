"""Schedules against their published time and memory, for many stages, microbatches and repeats."""

import inspect
import itertools
import math

import pytest

from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.plan.simulate import Costs, simulate

STAGES = (1, 2, 3, 4, 8)
REPEATS = (1, 2, 3, 4)
F, B = 1.0, 2.5
COSTS = Costs(forward=F, backward=B)


def grid(*axes):
    return list(itertools.product(*axes))


def for_each(cases):
    """Run a test on each case, in one item of pytest: these cases take less time than an item."""

    def decorate(test):
        def run_all():
            for case in cases:
                try:
                    test(*case)
                except BaseException as error:
                    error.add_note(f"case {inspect.signature(test).bind(*case).arguments}")
                    raise

        run_all.__name__, run_all.__doc__ = test.__name__, test.__doc__
        return run_all

    return decorate


@for_each(grid(STAGES, REPEATS, (1, 2), (0, 1), (1, 2)))
def test_circular_has_its_published_time_and_memory(S, V, multiple, extra, delay):
    M = multiple * delay * S + extra
    run = simulate(load_schedule("circular", S, M, V, forwarding_delay=delay), COSTS)
    assert run.table.num_ticks == 2 * (M * V + delay * (S - 1))
    assert run.bubble_fraction == pytest.approx(delay * (S - 1) / (M * V + delay * (S - 1)))
    assert run.peak_in_flight.tolist() == [M * V] * S
    if V == 1:
        gpipe = load_schedule("gpipe", S, M, forwarding_delay=delay)
        assert to_csv(gpipe) == to_csv(run.table)


@for_each(grid(STAGES, (2, 3), (1, 2)))
def test_circular_with_fewer_microbatches_than_stages_waits_for_the_ring(S, V, M):
    table = load_schedule("circular", S, M, V)
    assert table.num_ticks == 2 * ((V - 1) * max(M, S) + M + S - 1)


@for_each(grid(STAGES, REPEATS, (2, 3), (1, 2), (0, 1)))
def test_lockstep_1f1b_has_its_published_time_and_memory(S, V, groups, delay, slack):
    M = groups * delay * S
    table = load_schedule("lockstep_1f1b", S, M, V, forwarding_delay=delay, slack=slack)
    run = simulate(table, COSTS)
    assert run.makespan == pytest.approx((M * V + delay * (S - 1)) * (F + B))
    expected = [min(M * V, delay * ((V + 1) * S - 2 - 2 * s) + 1 + slack) for s in range(S)]
    assert run.peak_in_flight.tolist() == expected
    assert activation_slots(table).residuals.peak.tolist() == expected


@for_each(grid(STAGES, REPEATS, (2, 3), (1, 2), (0, 1)))
def test_lockstep_zb_has_its_published_time_and_memory(S, V, groups, delay, slack):
    M, I, W = groups * delay * S, 1.5, 1.25
    table = load_schedule("lockstep_zb", S, M, V, forwarding_delay=delay, slack=slack)
    run, slots = simulate(table, Costs(F, I + W, I, W)), activation_slots(table)
    assert run.makespan == pytest.approx(M * V * (F + I + W) + delay * (S - 1) * (F + I))
    assert run.bubble == pytest.approx(delay * (S - 1) * (F + I))
    expected = [min(M * V, delay * ((V + 1) * S - 2 - s) + 1 + slack) for s in range(S)]
    assert run.peak_in_flight.tolist() == slots.residuals.peak.tolist() == expected
    stash = [min(M * V, delay * s + 1) for s in range(S)]
    assert run.peak_stash.tolist() == slots.stash.peak.tolist() == stash
    full = load_schedule("lockstep_1f1b", S, M, V, forwarding_delay=delay, slack=slack)
    assert slots.residuals.size == activation_slots(full).residuals.size


@for_each(grid((2, 3, 4, 8), (1, 2, 3)))
def test_lockstep_zb_with_any_number_of_microbatches_saves_time(S, V):
    for M, delay in grid(range(1, 3 * S), (1, 2)):
        split, full = (
            simulate(load_schedule(name, S, M, V, forwarding_delay=delay), Costs(1, 2, 1, 1))
            for name in ("lockstep_zb", "lockstep_1f1b")
        )
        assert split.makespan == pytest.approx(full.makespan - delay * (S - 1))


@for_each(grid((2, 3, 4, 8), REPEATS, (9, 14, 17, 30)))
def test_lockstep_1f1b_with_a_ragged_number_of_microbatches_costs_no_time(S, V, M):
    run = simulate(load_schedule("lockstep_1f1b", S, M, V), COSTS)
    assert run.makespan == pytest.approx((M * V + S - 1) * (F + B))
    larger = -(-(M % S) // (M // S))
    expected = [min(M * V, (V + 1) * S - 1 - 2 * s + (V - 1) * larger) for s in range(S)]
    assert (run.peak_in_flight <= expected).all()


@for_each(grid((2, 4, 8), (1, 2, 4)))
def test_lockstep_1f1b_with_fewer_microbatches_than_stages_waits_only_for_dependencies(S, V):
    for M in range(1, S):
        run = simulate(load_schedule("lockstep_1f1b", S, M, V), COSTS)
        assert run.makespan == pytest.approx((V * S + M - 1) * (F + B))


@for_each(grid(STAGES, (1, 2, 5, 8, 13, 32), (("1f1b", 1), ("eager_1f1b", 2))))
def test_1f1b_and_eager_1f1b_have_their_published_time_and_memory(S, M, schedule):
    name, delay = schedule
    run = simulate(load_schedule(name, S, M), COSTS)
    assert run.makespan == pytest.approx((M + S - 1) * (F + B))
    assert run.bubble == pytest.approx((S - 1) * (F + B))
    assert run.peak_in_flight.tolist() == [min(M, delay * (S - 1 - s) + 1) for s in range(S)]


@pytest.mark.parametrize("S", [2, 4, 8])
def test_eager_1f1b_hides_transfers_that_1f1b_waits_for(S):
    M, communication = 6 * S, 0.3
    costs = Costs(forward=1, backward=1, communication=communication)
    ends = (S - 1) * (2 + 2 * communication)
    assert simulate(load_schedule("eager_1f1b", S, M), costs).bubble == pytest.approx(ends)
    assert simulate(load_schedule("1f1b", S, M), costs).bubble > ends + M * communication / 2


@for_each(grid(STAGES, REPEATS, (1, 2, 4)))
def test_interleaved_1f1b_has_its_published_time_and_memory(S, V, groups):
    M = groups * S
    run = simulate(load_schedule("interleaved_1f1b", S, M, V), COSTS)
    ideal = M * V * (F + B)
    assert run.bubble / ideal == pytest.approx((S - 1) / (V * M))
    assert run.peak_in_flight.tolist() == [min(V * M, (V + 1) * S - 1 - 2 * s) for s in range(S)]


SPLIT_COSTS = [(1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 0.5), (2, 3, 1), (3, 1, 2)]


@for_each(grid(STAGES, (0, 1, 7), SPLIT_COSTS, (("zb_h1", 1), ("zb_h2", 2))))
def test_zb_h1_and_zb_h2_have_their_published_time_and_memory(S, extra, costs, schedule):
    F, I, W = costs
    name, delay = schedule
    peak = delay * (S - 1) + 1
    run = simulate(load_schedule(name, S, peak + extra), Costs(F, F, I, W))
    assert run.idle_in_span == pytest.approx((S - 1) * (F + I - delay * W))
    assert run.peak_in_flight.tolist() == [peak] * S


def test_bubble_is_the_idle_share_of_all_stages_in_a_step():
    """Both take 27 for work of 24, though the stages of ZB-H2 never wait within their spans."""
    for name, idle in (("zb_h1", 3), ("zb_h2", 0)):
        run = simulate(load_schedule(name, 4, 8))
        assert (run.makespan, run.work.tolist(), run.bubble) == (27, [24] * 4, 3)
        assert run.bubble_fraction == pytest.approx(3 / 27)
        assert run.idle_in_span == idle
    # The idle time of stages that take less counts, too.
    run = simulate(load_schedule("1f1b", 2, 1), Costs(forward=[1, 3], backward=[2, 6]))
    assert run.bubble_fraction == pytest.approx(0.5)  # one of two stages works, always
    assert run.slowest == (1, pytest.approx(0.5))  # 9 where the mean is 6


@for_each(grid(STAGES, REPEATS, (1, 2, 4), SPLIT_COSTS[:3]))
def test_interleaved_zb_has_its_published_time_and_memory(S, V, groups, costs):
    F, I, W = costs
    M = groups * S
    run = simulate(load_schedule("interleaved_zb", S, M, V), Costs(F, I + W, I, W))
    assert run.bubble == pytest.approx((S - 1) * (F + I - W))
    assert run.peak_in_flight.tolist() == [V * S] * S


def torch_interleaved_zero_bubble(rank, S, M, V):
    """Return what a rank of torch's ScheduleInterleavedZeroBubble runs, operation by operation."""
    per_round = M // max(1, M // S)
    warmup = min((V - 1) * per_round + S - 1 - rank, M * V)
    counters = {}

    def unit(kind, operation):
        repeat = operation // per_round % V
        chunk = rank + S * (repeat if kind == "F" else V - 1 - repeat)
        counters[kind, chunk] = counters.get((kind, chunk), -1) + 1
        return f"{chunk}{kind}{counters[kind, chunk]}"

    units = []
    for operation in range(M * V + warmup):
        if operation < M * V:
            units.append(unit("F", operation))
        if operation >= warmup:
            units.append(unit("I", operation - warmup))
        if operation - warmup >= rank:
            units.append(unit("W", operation - warmup - rank))
    return units + [unit("W", number) for number in range(max(M * V - rank, 0), M * V)]


@for_each(grid((1, 2, 3, 4, 5, 6, 8), REPEATS))
def test_interleaved_zb_is_torchs_order_at_every_size_that_torch_accepts(S, V):
    for M in range(1, 4 * S + 4):
        if M % max(1, M // S) == 0:
            rows = to_csv(load_schedule("interleaved_zb", S, M, V)).splitlines()
            for rank, row in enumerate(rows):
                units = [cell for cell in row.split(",") if cell]
                assert units == torch_interleaved_zero_bubble(rank, S, M, V)


def test_interleaved_zb_with_one_chunk_per_stage_is_zb_h1():
    for S, M in grid(STAGES, (1, 2, 5, 8, 13)):
        assert to_csv(load_schedule("interleaved_zb", S, M, 1)) == to_csv(
            load_schedule("zb_h1", S, M)
        )


V_STAGES = (1, 2, 3, 4, 5, 6, 8, 16)


@for_each(grid(V_STAGES, (-1, 0, 1, 7)))
def test_zb_v_has_its_published_time_and_memory(S, extra):
    run = simulate(load_schedule("zb_v", S, max(2 * S + extra, 2), 2), Costs(1, 2, 1, 1))
    assert run.idle_in_span == 0
    assert run.peak_in_flight.tolist() == [2 * S] * S


@for_each(grid((2, 3, 4, 5, 6, 7, 8, 9, 12, 16), (0, 1, 7)))
def test_v_half_and_v_min_have_their_published_time_and_memory(S, extra):
    """1F1B has 2S chunks in flight and a bubble of 6(S-1): half of both, a third and two thirds."""
    half, least = (
        simulate(load_schedule(name, S, 2 * S + extra, 2), Costs(1, 2, 1, 1))
        for name in ("v_half", "v_min")
    )
    assert half.bubble == (1 if S == 2 else 3 * S - (4 if S % 2 else 7))
    assert half.peak_in_flight.max() == S + (1 if S % 2 else 2)
    assert least.bubble == 4 * S - (5 if S % 3 else 7)
    assert least.peak_in_flight.max() == 2 * math.ceil((S + 2) / 3)


@pytest.mark.parametrize("name", ["v_half", "v_min"])
@pytest.mark.parametrize("S", [5, 8, 9])
def test_squeezed_blocks_lose_no_time_per_period_when_weight_gradients_are_short(name, S):
    """Only the ends are squeezed: the steady state loses what the block itself loses."""
    costs = Costs(1, 2.2, 0.9, 1.3)
    few, many = (simulate(load_schedule(name, S, M, 2), costs).bubble for M in (2 * S, 4 * S))
    assert many == pytest.approx(few)


@for_each(grid(V_STAGES, (0, 1, 7), SPLIT_COSTS[:3]))
def test_dualpipe_v_has_its_published_time_and_memory(S, extra, costs):
    F, I, W = costs
    B = I + W
    run = simulate(load_schedule("dualpipe_v", S, 2 * S + extra, 2), Costs(F, B, I, W))
    assert run.bubble <= (S - 1) * (F + 2 * B - 3 * W) + 1e-9
    assert run.peak_in_flight.tolist() == [2 * S + 1] * S

"""The schedule solver: never worse than what is known, within its memory, and its bound holds."""

import itertools

import pytest

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.improve import improve
from maxpipe.pipeline.schedules.list_scheduling import policies, schedule_units
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.lockstep import throttled
from maxpipe.pipeline.schedules.order import place, stage_orders
from maxpipe.pipeline.schedules.timed_orders import Orders, Workload
from maxpipe.pipeline.schedules.validate import validate
from maxpipe.plan.simulate import Costs, simulate
from maxpipe.plan.solve import Task, solve

SPLIT = Costs(1, 2.3, 1.4, 0.9, 0.1)
CHEAP_B = Costs(1, 2, 1.4, 0.9, 0.05, head=0.3)
UNEVEN = Costs([1, 1.5, 0.5], [2, 3, 1], [1, 2, 0.5], [1, 1, 0.5], 0.2)


def workload(S, M, V, placement, costs, max_in_flight):
    return Workload(S, M, V, placement, costs.unit_times(S, V, placement), max_in_flight)


@pytest.fixture(autouse=True)
def _short_search(monkeypatch):
    monkeypatch.setattr("maxpipe.plan.solve.UNITS_TIMED", 50_000)


def found(task, seconds=0.0):
    return solve(task, seconds, lambda makespan: None)


def test_timed_orders_agree_with_the_simulation():
    for name in [n for n in SCHEDULES if "mpmd" in SCHEDULES[n].engines]:
        for costs in (SPLIT, CHEAP_B, UNEVEN):
            S, M, V = 3, 5, SCHEDULES[name].repeats_for(2)
            table = load_schedule(name, S, M, V)
            work = workload(S, M, V, table.placement, costs, M * V)
            orders = work.orders(stage_orders(table))
            free = place(name, S, M, V, work.raw(orders), table.placement)
            run, timing = simulate(free, costs), work.time(orders)
            assert timing.makespan == pytest.approx(run.makespan), (name, costs)
            assert timing.span == pytest.approx(run.span.max()), (name, costs)
            assert [
                work.peak(row, orders.whole) for row in orders.stages
            ] == run.peak_in_flight.tolist()
            assert work.lower_bound() <= timing.makespan + 1e-9, (name, costs)


def test_list_scheduling_under_any_cap_runs_every_unit_within_it():
    for whole in (False, True):
        for S, M, V, placement, cap in (
            (3, 5, 1, "loop", 1),
            (3, 5, 2, "loop", 2),
            (3, 4, 3, "v", 4),
            (3, 5, 2, "v", 7),
        ):
            work = workload(S, M, V, placement, UNEVEN, cap)
            for policy in policies(work, whole):
                orders = schedule_units(work, policy)
                table = place("list", S, M, V, work.raw(orders), placement)
                validate(table)
                assert simulate(table, UNEVEN).peak_in_flight.max() <= cap, (whole, S)


def test_throttled_lockstep_table_under_any_cap_is_valid_and_within_it():
    for splits in (False, True):
        for S, M, V, placement in itertools.product((1, 3), (1, 5), (1, 2, 3), ("loop", "v")):
            for cap in range(V, 2 * V * S):
                table = throttled("throttled", S, M, V, placement, cap, splits)
                validate(table)
                assert simulate(table).peak_in_flight.max() <= cap, splits


def test_improve_joins_and_moves_units_and_keeps_the_memory():
    """The published order is the worse, the less F, I and W are equal."""
    work = workload(4, 8, 1, "loop", CHEAP_B, 5)
    orders = work.orders(stage_orders(load_schedule("zb_h1", 4, 8)))
    improved = improve(work, orders, 1000)
    assert work.time(improved).makespan < work.time(orders).makespan - 1
    assert improved.whole
    assert work.fits(improved)
    assert improve(work, orders, 1000) == improved


CASES = [
    (4, 8, 1, "loop", None, 5),
    (3, 6, 2, "v", None, 6),
    (4, 4, 2, "v", False, 4),
    (3, 7, 2, "loop", True, 11),
]


@pytest.mark.parametrize(("S", "M", "V", "placement", "lockstep", "cap"), CASES)
def test_solve_is_never_worse_than_a_named_schedule_that_fits(
    S, M, V, placement, lockstep, cap, monkeypatch
):
    """However short the search is."""
    monkeypatch.setattr("maxpipe.plan.solve.UNITS_TIMED", 2_000)
    for costs in (SPLIT, CHEAP_B, Costs(1, 2, 1, 1, head=2)):
        solution = found(Task(S, M, V, placement, lockstep, cap, costs))
        assert lockstep in (None, solution.run.table.lockstep)
        assert solution.run.peak_in_flight.max() <= cap
        assert solution.bound <= solution.run.makespan + 1e-9
        named = [
            run
            for name, facts in SCHEDULES.items()
            if facts.repeats_for(V) == V
            and (run := simulate(load_schedule(name, S, M, V), costs)).table.placement == placement
            and run.peak_in_flight.max() <= cap
            # A head that is spread over the stages is for lockstep tables alone.
            and (run.table.lockstep or not lockstep)
            and (not run.table.lockstep or lockstep is not False or not costs.head)
        ]
        assert {run.table.name for run in solution.named} == {run.table.name for run in named}
        assert len(solution.named) == len(named) > 0
        assert all(solution.run.makespan <= run.makespan + 1e-9 for run in named)
        assert all(solution.run.makespan <= run.makespan + 1e-9 for run in solution.named)


def test_solve_with_a_large_head_takes_the_form_that_is_faster():
    """The last of four stages computes it alone, or each stage a quarter."""
    for lockstep, makespan, forms in (
        (None, 17, "free-running or lockstep"),
        (False, 21.5, "free-running"),
        (True, 17, "lockstep"),
    ):
        solution = found(Task(4, 4, 2, "loop", lockstep, 8, Costs(0.5, 1, 0.5, 0.5, head=2)))
        assert solution.run.makespan == pytest.approx(makespan), (lockstep, makespan)
        assert solution.run.makespan <= solution.named[0].makespan, (lockstep, makespan)
        assert solution.run.table.lockstep == (lockstep is not False), (lockstep, makespan)
        assert solution.forms == forms, (lockstep, makespan)
        assert solution.bound <= makespan + 1e-9, (lockstep, makespan)


def test_solve_under_a_cap_that_no_named_schedule_fits_still_finds_one():
    for lockstep in (False, True):
        solution = found(Task(4, 6, 1, "loop", lockstep, 2, SPLIT))
        assert solution.named == []
        assert solution.run.peak_in_flight.max() == 2


class TestExact:
    @pytest.fixture(autouse=True)
    def _needs_the_extra(self):
        pytest.importorskip("ortools")

    def test_solve_proves_the_least_makespan_of_all_orders(self):
        """Two microbatches on two stages have few enough orders to try them all."""
        for placement, V, cap in (("loop", 1, 1), ("loop", 1, 2), ("v", 2, 2), ("loop", 2, 3)):
            for costs in (Costs(1, 2, 1, 1), Costs(1, 1.5, 1, 1, 0.25)):
                S, M = 2, 2 if V == 1 else 1
                solution = found(Task(S, M, V, placement, False, cap, costs), seconds=20.0)
                assert solution.is_optimal, (placement, V)
                work = workload(S, M, V, placement, costs, cap)
                assert solution.run.makespan == pytest.approx(shortest(work)), (placement, V)

    def test_solve_in_lockstep_proves_the_least_makespan_of_all_tables(self):
        for cap in (2, 3):
            costs = Costs(1, 2.5, 1.4, 0.9, 0.1, head=0.5)
            solution = found(Task(2, 3, 1, "loop", True, cap, costs), seconds=20.0)
            assert solution.is_optimal, cap
            known = simulate(load_schedule("lockstep_zb", 2, 3), costs)
            assert known.peak_in_flight.max() == 3, cap
            if cap == 3:
                assert solution.run.makespan == pytest.approx(known.makespan), cap
            else:
                assert solution.run.makespan > known.makespan + 1, cap
            validate(solution.run.table)

    def test_solve_proves_the_least_makespan_in_every_unit_of_time(self):
        for unit in (1e-12, 1e6):
            costs = Costs(1.234 * unit, 2.871 * unit, 1.4355 * unit, 1.4355 * unit)
            solution = found(Task(4, 8, 1, "loop", None, 3, costs), seconds=20.0)
            assert solution.is_optimal, unit
            assert solution.run.makespan == pytest.approx(42.0825 * unit, rel=1e-9), unit
            assert solution.bound <= solution.run.makespan, unit


def shortest(work):
    """Return the least makespan of all orders, by trying all that keep microbatches in order."""
    pairs = work.num_pairs
    best = float("inf")
    times = work.times
    splits_are_best = times.backward[0] >= times.input_gradient[0] + times.weight_gradient[0]
    for size in range(1 if splits_are_best else pairs + 1):
        for whole in map(frozenset, itertools.combinations(range(pairs), size)):
            rows = []
            for stage in range(work.num_stages):
                units = [
                    unit
                    for unit in range(3 * pairs)
                    if work.stage(unit) == stage
                    and not (unit >= 2 * pairs and unit - 2 * pairs in whole)
                ]
                rows.append(
                    [
                        row
                        for row in itertools.permutations(units)
                        if all(
                            row.index(a) < row.index(b)
                            for a, b in itertools.combinations(sorted(units), 2)
                            if a % pairs == b % pairs
                        )
                        and work.peak(row, whole) <= work.max_in_flight
                    ]
                )
            for stages in itertools.product(*rows):
                timing = work.time(Orders(stages, whole))
                if timing is not None:
                    best = min(best, timing.makespan)
    return best

"""Orders that follow the times of units: valid, never worse than the published ones, in memory."""

import io
import subprocess
import sys
from contextlib import redirect_stdout

import pytest

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules import adapt
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.validate import validate
from maxpipe.plan.simulate import Costs, simulate

EQUAL = Costs(1, 2, 1, 1)
SLOW_I = Costs(1, 2, 1.4, 0.9)  # a B would take less
SLOW_W = Costs(1, 2.2, 0.9, 1.3, 0.2)
WITH_HEAD = Costs(1, 1.7, 1.2, 0.5, 0.05, head=0.7)


def uneven(S):
    rows = ([t * (1.5 if s == S - 1 else 1) for s in range(S)] for t in (2.5, 1.3, 1.2))
    return Costs([0.3, *[1.0] * (S - 1)], *rows, 0.1)


def adapted(name, S, M, costs):
    V = SCHEDULES[name].repeats_for(1)
    published = load_schedule(name, S, M, V)
    times = costs.unit_times(S, V, published.placement)
    return simulate(published, costs), simulate(load_schedule(name, S, M, V, times=times), costs)


@pytest.fixture
def short_search(monkeypatch):
    monkeypatch.setattr(adapt, "UNITS_TIMED", 3_000)
    adapt._best.cache_clear()
    yield
    adapt._best.cache_clear()


TIMED = [name for name, facts in SCHEDULES.items() if facts.timed]
MOST_IN_FLIGHT = {"zb_v": 2, "zb_h2": 2}  # chunks for each stage


@pytest.mark.parametrize("costs", [EQUAL, SLOW_I, SLOW_W, WITH_HEAD, uneven])
@pytest.mark.parametrize("name", TIMED)
def test_adapted_order_of_any_size_is_valid_and_no_worse_in_its_memory(name, costs, short_search):
    for S in (1, 2, 3, 4, 6):
        for M in (1, 2, S, 2 * S - 1, 2 * S + 3):
            before, now = adapted(name, S, M, costs(S) if callable(costs) else costs)
            validate(now.table)
            assert now.table.kinds == ("F", "I", "W")
            assert now.makespan <= before.makespan + 1e-9
            assert now.span.max() <= before.span.max() + 1e-9
            assert now.peak_in_flight.max() <= MOST_IN_FLIGHT[name] * S
            if name == "zb_v":
                assert now.peak_in_flight.max() <= max(before.peak_in_flight.max(), 2 * min(M, S))


# Bubbles of the published scheduler for the same times and memory, research of peers.
@pytest.mark.parametrize(("name", "published", "theirs"), [("zb_v", 3.0, 2.1), ("zb_h2", 1.8, 1.4)])
def test_adapted_order_with_slow_input_gradients_waits_no_longer_than_the_authors(
    name, published, theirs
):
    before, now = adapted(name, 4, 8, SLOW_I)
    assert before.idle_in_span == pytest.approx(published)
    assert now.idle_in_span <= theirs + 1e-9


@pytest.mark.parametrize(("name", "M"), [("zb_v", 8), ("zb_v", 3), ("zb_h2", 8)])
def test_adapted_order_takes_less_time_where_the_published_one_waits(name, M):
    before, now = adapted(name, 4, M, EQUAL if M == 3 else WITH_HEAD)
    assert now.makespan < before.makespan - 0.05


@pytest.mark.parametrize("name", TIMED)
def test_order_whose_stages_never_wait_stays_the_published_one(name):
    before, now = adapted(name, 4, 8, EQUAL)
    assert before.idle_in_span == 0
    assert to_csv(now.table) == to_csv(before.table)
    # Others do not follow times at all.
    before, now = adapted("zb_h1", 4, 8, SLOW_I)
    assert to_csv(now.table) == to_csv(before.table)


def test_adapted_order_is_the_same_in_every_process():
    """Neither hashes of strings, which differ by process, nor the clock decide."""
    program = (
        "from maxpipe.pipeline.schedules.csv_files import to_csv\n"
        "from maxpipe.pipeline.schedules.load import load_schedule\n"
        "from maxpipe.plan.simulate import Costs\n"
        "for name, V, placement in (('zb_v', 2, 'v'), ('zb_h2', 1, 'loop')):\n"
        "    times = Costs(1, 2.3, 1.4, 0.9, 0.3).unit_times(4, V, placement)\n"
        "    print(to_csv(load_schedule(name, 4, 8, V, times=times)))\n"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        check=True,
        text=True,
    )
    with redirect_stdout(io.StringIO()) as here:
        exec(program)
    assert here.getvalue() == other.stdout != ""

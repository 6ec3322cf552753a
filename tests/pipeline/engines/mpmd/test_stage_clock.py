"""Seconds of a stage without its waiting: with arrays that are ready at a known time."""

import math
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from maxpipe.pipeline.engines.mpmd import stage_clock
from maxpipe.pipeline.engines.mpmd.stage_clock import StageClock, timed

SLACK = 0.15  # of a busy machine, s
LONG = 0.4


class Ready:
    """Stand for an array that is ready some seconds from now."""

    def __init__(self, after):
        self.at = time.perf_counter() + after

    def block_until_ready(self):
        time.sleep(max(0.0, self.at - time.perf_counter()))


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(stage_clock, "ready_after", lambda arrays: arrays[0])
    return StageClock()


def test_units_count_and_the_wait_for_their_inputs_does_not(clock):
    with timed([clock]):
        clock.dispatched(Ready(LONG))
        clock.will_read([Ready(3 * LONG)])
        clock.dispatched(Ready(4 * LONG))
        clock.end(Ready(5 * LONG))
    assert clock.take_seconds() == pytest.approx(2 * LONG, abs=SLACK)


def test_an_input_that_arrives_during_the_unit_before_costs_no_wait(clock):
    with timed([clock]):
        clock.dispatched(Ready(2 * LONG))
        clock.will_read([Ready(LONG)])
        clock.dispatched(Ready(3 * LONG))
        clock.end(Ready(0))
    assert clock.take_seconds() == pytest.approx(3 * LONG, abs=SLACK)


def test_what_the_process_does_too_late_counts(clock):
    with timed([clock]):
        time.sleep(LONG)
        clock.will_read([Ready(0)])
        clock.dispatched(Ready(0))
        clock.end(Ready(0))
    assert clock.take_seconds() == pytest.approx(LONG, abs=SLACK)


def test_steps_follow_each_other_without_a_gap(clock):
    for _ in range(2):
        with timed([clock]):
            clock.dispatched(Ready(LONG))
            clock.end(Ready(0))
        time.sleep(2 * LONG)
    assert clock.take_seconds() == pytest.approx(LONG, abs=SLACK)
    assert clock.take_seconds() == pytest.approx(2 * LONG, abs=SLACK)


def test_resume_leaves_the_time_between_steps_out(clock):
    with timed([clock]):
        clock.end(Ready(0))
    clock.take_seconds()
    time.sleep(2 * LONG)
    clock.resume()
    time.sleep(LONG)
    with timed([clock]):
        clock.end(Ready(0))
    assert clock.take_seconds() == pytest.approx(LONG, abs=SLACK)


def test_arrays_that_the_unit_donates_are_waited_for():
    clock = StageClock()
    x = jnp.zeros(3)
    with timed([clock]):
        clock.will_read([x])
        x = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        clock.dispatched(x)
        clock.end(x)
    assert clock.take_seconds() >= 0


def test_error_in_a_step_abandons_it():
    clock = StageClock()
    with pytest.raises(KeyError), timed([clock]):  # noqa: PT012
        clock.dispatched(Ready(0))
        raise KeyError
    assert math.isnan(clock.take_seconds())


def test_thread_ends_with_the_clock():
    before = {*threading.enumerate()}
    clock = StageClock()
    with timed([clock]):
        clock.end(Ready(0))
    clock.take_seconds()
    (thread,) = {*threading.enumerate()} - before
    del clock
    thread.join(10)
    assert not thread.is_alive()

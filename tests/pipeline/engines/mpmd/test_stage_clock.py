"""Seconds of a stage without its waiting: with arrays that are ready at a known time."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from maxpipe.pipeline.engines.mpmd import stage_clock
from maxpipe.pipeline.engines.mpmd.stage_clock import StageClock, timed

BEGIN = 100.0


class Time:
    """A time that passes only when something is waited for, s."""

    now = BEGIN

    def __call__(self):
        return self.now

    def until(self, seconds):
        self.now = max(self.now, BEGIN + seconds)

    def ready(self, at):
        return SimpleNamespace(block_until_ready=lambda: self.until(at))


@pytest.fixture
def time():
    return Time()


@pytest.fixture
def clock(time, monkeypatch):
    monkeypatch.setattr(stage_clock, "ready_after", lambda arrays: arrays[0])
    return StageClock(time)


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        # Units count, and the wait for their inputs does not.
        ("done 1, read 3, done 4, end 5", 2),
        # An input that arrives during the unit before costs no wait.
        ("done 2, read 1, done 3, end 0", 3),
        # What the process does too late counts.
        ("until 1, read 0, done 0, end 0", 1),
    ],
)
def test_seconds_of_a_step_are_those_of_its_units(events, seconds, clock, time):
    act = {
        "done": lambda at: clock.dispatched(time.ready(at)),
        "read": lambda at: clock.will_read([time.ready(at)]),
        "end": lambda at: clock.end(time.ready(at)),
        "until": time.until,
    }
    with timed([clock]):
        for event in events.split(", "):
            name, at = event.split()
            act[name](int(at))
    assert clock.take_seconds() == seconds


def test_steps_follow_each_other_without_a_gap_and_the_oldest_is_taken_first(clock, time):
    for at in (1, 3):
        with timed([clock]):
            clock.dispatched(time.ready(at))
            clock.end(time.ready(0))
    assert [clock.take_seconds(), clock.take_seconds()] == [1, 2]


def test_resume_leaves_the_time_between_steps_out(clock, time):
    seconds = []
    for at in (0, 3):
        time.until(at)
        with timed([clock]):
            clock.end(time.ready(0))
        seconds.append(clock.take_seconds())
        time.until(2)
        clock.resume()
    assert seconds == [0, 1]


def test_arrays_that_the_unit_donates_are_waited_for():
    clock = StageClock()
    x = jnp.zeros(3)
    with timed([clock]):
        clock.will_read([x])
        x = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        clock.dispatched(x)
        clock.end(x)
    assert clock.take_seconds() >= 0


def test_error_in_a_step_abandons_it(clock, time):
    with pytest.raises(KeyError), timed([clock]):  # noqa: PT012
        clock.dispatched(time.ready(0))
        raise KeyError
    assert math.isnan(clock.take_seconds())

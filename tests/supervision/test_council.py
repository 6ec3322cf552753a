"""What the council of a run's supervisors decides, told by a clock that the tests move."""

import signal

import pytest

from maxpipe.supervision.council import (
    Council,
    End,
    Ended,
    Finish,
    Joined,
    Policy,
    Start,
    Stopping,
    decode,
    encode,
    verdict,
)


class Supervised:
    """A council of some supervisors, and what it has said."""

    def __init__(self, count=2, **policy):
        self.now = 0.0
        self.log = []
        self.council = Council(
            count,
            Policy(**policy),
            "job",
            free_port=lambda: 7,
            log=self.log.append,
            clock=lambda: self.now,
        )
        self.count = count

    def join(self, *members):
        for member in members or range(self.count):
            self.council.receive(member, Joined(self.count, f"host{member}"))
        return self.orders()

    def end(self, *codes):
        """Let trainers end in order, given as (member, code), and return the orders that follow."""
        orders = []
        for member, code in codes:
            self.council.receive(member, Ended(self.council.status.attempt, code))
            orders += self.orders()
        return orders

    def orders(self, after=0.0):
        self.now += after
        return self.council.take_orders() + self.council.take_orders()


@pytest.fixture
def run():
    """Return a council of two, in its first attempt."""
    run = Supervised(pause_seconds=4, max_restarts=3)
    run.join()
    return run


@pytest.mark.parametrize(
    ("codes", "decisive"),
    [
        ((0, 0), 0),
        ((75, 75), 75),
        ((0, -9), -9),
        ((-9, 134), -9),
        ((-9, 1), -9),
        ((134, 1, -6), 134),
        ((1, 134), 1),
        ((75, 1), 1),
        ((134, 2), 2),
        ((-6, 42), 42),
        ((130, 75), 130),
        ((124, 124), 124),
    ],
)
def test_verdict_of_several_codes_is_the_cause(codes, decisive):
    assert verdict(codes) == decisive


@pytest.mark.parametrize(
    "message", [Joined(2, "a"), Ended(1, -9), Stopping(15), Start(3, 7, "j"), End(3, 2.0)]
)
def test_message_decoded_is_what_was_encoded(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '{"kind": "Fly"}',
        '{"kind": "End"}',
        '{"kind": "Ended", "attempt": 1, "code": "x"}',
        "[" * 9999,
    ],
)
def test_decode_of_a_stranger_s_line_raises_value_error(line):
    with pytest.raises(ValueError):  # noqa: PT011
        decode(line)


def test_council_starts_when_all_supervisors_are_there():
    run = Supervised(3)
    assert run.join(0, 2) == []
    (start,) = run.join(1)
    assert (type(start), start.port, start.job) == (Start, 7, "job")


def test_council_without_all_supervisors_gives_up_with_134():
    run = Supervised(3, wait_seconds=60)
    run.join(1)
    assert run.orders(after=59) == []
    (finish,) = run.orders(after=2)
    assert finish == Finish(134, "no supervisor of process 0, 2 has come in 60 s")


def test_council_of_other_size_than_a_supervisor_says_ends_with_2():
    run = Supervised(2)
    run.council.receive(0, Joined(4, "a"))
    assert [order.code for order in run.orders()] == [2]


@pytest.mark.parametrize("code", [75, 124, 134, -9, -6, -11])
def test_council_restarts_all_after_a_pause(run, code):
    first = run.council.status.attempt
    ended = run.end((0, code), (1, 134))
    assert [type(order) for order in ended] == ([] if code == 75 else [End])
    assert run.orders(after=3) == []
    (start,) = run.orders(after=1)
    assert start.attempt > first
    assert run.council.status.restarts == 1
    assert run.council.status.last_end.startswith("process 0 on host0 ended by ")


@pytest.mark.parametrize("code", [0, 1, 2, 42, 130, 3])
def test_council_finishes_with_a_final_code(run, code):
    orders = run.end((0, code), (1, code))
    assert orders[-1] == Finish(code, "")


def test_council_ends_the_others_soon_after_a_loss_and_later_after_an_error(run):
    assert run.end((1, -9)) == [End(run.council.status.attempt, 2.0)]
    other = Supervised()
    other.join()
    assert other.end((1, 1)) == [End(other.council.status.attempt, 60.0)]


def test_council_doubles_pauses_and_gives_up(run):
    pauses = []
    for _ in range(3):
        run.end((0, -9), (1, 134))
        began = run.now
        while not run.orders(after=0.5):
            pass
        pauses.append(run.now - began)
    assert pauses == [4, 8, 16]
    assert run.end((0, -9), (1, 134))[-1] == Finish(137, "giving up after 3 restarts")


def test_council_forgets_restarts_after_half_an_hour(run):
    for _ in range(8):
        run.now += 1800
        run.end((0, -9), (1, 134))
        assert [type(order) for order in run.orders(after=4)] == [Start]


def test_council_asked_to_stop_finishes_with_75(run):
    run.council.receive(1, Stopping(signal.SIGTERM))
    assert run.end((0, 75), (1, 75))[-1] == Finish(75, "asked to stop")


def test_council_asked_to_stop_does_not_restart_a_trainer_that_hangs(run):
    run.council.receive(1, Stopping(signal.SIGTERM))
    assert run.end((0, 124), (1, 134))[-1] == Finish(124, "asked to stop")
    assert run.council.status.restarts == 0


def test_council_asked_to_stop_in_a_pause_finishes_with_the_last_code(run):
    run.end((0, 124), (1, 124))
    run.council.receive(1, Stopping(signal.SIGTERM))
    assert run.orders() == [Finish(124, "asked to stop")]


def test_council_asked_to_stop_before_trainers_listen_finishes_with_75(run):
    run.council.receive(0, Stopping(signal.SIGTERM))
    assert run.end((0, -15), (1, -6))[-1] == Finish(75, "asked to stop")


def test_council_that_loses_a_supervisor_ends_the_others_and_waits_for_it(run):
    run.council.lose(1)
    assert run.orders() == [End(run.council.status.attempt, 2.0)]
    assert run.end((0, 134)) == []
    assert run.orders(after=100) == []
    assert [type(order) for order in run.join(1)] == [Start]


def test_council_ignores_the_end_of_an_earlier_attempt(run):
    run.council.receive(0, Ended(1, 42))
    assert run.orders() == []

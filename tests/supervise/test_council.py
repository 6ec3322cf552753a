"""What the council of a run's supervisors decides, told by a clock that the tests move."""

import signal

import pytest

from maxpipe.devices.cluster import Sizes
from maxpipe.supervise import council as module
from maxpipe.supervise.council import (
    Council,
    End,
    Ended,
    Finish,
    Joined,
    Policy,
    Save,
    Start,
    Stopping,
    verdict,
)
from maxpipe.supervise.process import Progress


class Supervised:
    def __init__(self, count=2, **policy):
        self.now = 1.0
        self.log = []
        self.progress = Progress()
        self.council = Council(
            count, Policy(**policy), "job", lambda: self.progress, self.log.append, lambda: self.now
        )
        self.count = count

    def join(self, *members):
        for member in members or range(self.count):
            self.council.receive(member, Joined(self.count, f"host{member}"))
        return self.orders()

    def end(self, *codes):
        orders = []
        for member, code in codes:
            self.council.receive(member, Ended(self.council.status.attempt, code))
            orders += self.orders()
        return orders

    def orders(self, after=0.0):
        self.now += after
        return self.council.take_orders() + self.council.take_orders()

    def trained(self, seconds):
        self.now += seconds
        self.progress = Progress(self.council.status.attempt, at=1.0)
        self.council._look()


@pytest.fixture(autouse=True)
def _port(monkeypatch):
    monkeypatch.setattr(module, "free_port", lambda: 7)


@pytest.fixture
def run():
    run = Supervised(pause_seconds=4, max_restarts=3)
    run.join()
    return run


@pytest.mark.parametrize(
    ("codes", "decisive"),
    [
        *(((0, 0), 0), ((75, 75), 75), ((0, -9), -9), ((-9, 134), -9), ((-9, 1), -9)),
        *(((134, 1, -6), 134), ((1, 134), 1), ((75, 1), 1), ((134, 2), 2), ((-6, 42), 42)),
        ((130, 75), 130),
    ],
)
def test_verdict_of_several_codes_is_the_cause(codes, decisive):
    assert verdict(codes) == decisive


def test_council_starts_when_all_supervisors_are_there_and_ends_if_some_never_come():
    run = Supervised(3, wait_seconds=60)
    assert run.join(0, 2) == []
    (start,) = run.join(1)
    assert (type(start), start.port, start.job) == (Start, 7, "job")
    late = Supervised(3, wait_seconds=60)
    late.join(1)
    assert late.orders(after=59) == []
    (finish,) = late.orders(after=2)
    assert finish == Finish(134, "no supervisor of process 0, 2 has come in 60 s")
    other = Supervised(2)
    other.council.receive(0, Joined(4, "a"))
    (finish,) = other.orders()
    assert finish.code == 2
    assert finish.why.startswith("the supervisors count 2 and 4 processes: set JAX_NUM_PROCESSES")


@pytest.mark.parametrize(
    ("member", "count", "why"),
    [
        (2, 3, "the supervisors count 2 and 3 processes"),
        (1, 2, "process 1 on host1 has a supervisor already: give each its own JAX_PROCESS_ID"),
    ],
)
def test_council_refuses_a_supervisor_that_is_not_its_own_and_trains_on(run, member, count, why):
    refusal = run.council.receive(member, Joined(count, "stranger"))
    assert refusal.code == 2
    assert refusal.why.startswith(why)
    assert run.orders() == []
    assert run.council.status.members == {0: "host0", 1: "host1"}


def test_council_tells_a_supervisor_that_comes_too_late_how_the_run_has_ended(run):
    run.council.receive(0, Ended(1, 42))  # of an earlier attempt
    assert run.orders() == []
    run.end((0, 42), (1, 42))
    assert run.council.receive(1, Joined(2, "host1")) == Finish(42, "")


@pytest.mark.parametrize("code", [75, 124, 134, -9])
def test_council_restarts_all_after_a_pause(run, code):
    first = run.council.status.attempt
    run.trained(0)
    ended = run.end((0, code), (1, 134))
    assert ended == [End(1800.0 if code == 75 else 2.0, run.council.status.last_end)]
    assert run.orders(after=3) == []
    (start,) = run.orders(after=1)
    assert start.attempt > first == start.previous
    assert run.council.status.restarts == 1
    assert run.council.status.last_end.startswith("process 0 on host0 ended by ")


@pytest.mark.parametrize(
    ("codes", "seconds"),
    [
        ((75, 75), [1800.0, 1800.0]),
        ((75, 134), [1800.0, 2.0]),
        ((75, 1), [1800.0, 60.0]),
        ((-9, 1), [2.0, 60.0]),
        # Before a step there is nothing to save.
        ((None, 75), [60.0]),
        ((None, 130), [60.0]),
        ((None, 0), [1800.0]),
    ],
)
def test_council_ends_other_processes_as_soon_as_an_end_asks_for(codes, seconds):
    run = Supervised(3)
    run.join()
    if codes[0] is not None:
        run.trained(0)
    orders = run.end(*((i, code) for i, code in enumerate(codes) if code is not None))
    assert [order.seconds for order in orders] == seconds


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


@pytest.mark.parametrize(
    ("codes", "expected"), [((75, 75), 75), ((124, 134), 124), ((-15, -6), 75)]
)
def test_council_asked_to_stop_restarts_nothing(run, codes, expected):
    run.council.receive(1, Stopping(signal.SIGTERM))
    assert run.end(*enumerate(codes))[-1] == Finish(expected, "asked to stop")
    assert run.council.status.restarts == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_council_asked_to_stop_in_a_pause_finishes_with_the_signal_s_code(run, number, code):
    run.end((0, -9), (1, 134))
    run.council.receive(1, Stopping(number))
    assert run.orders() == [Finish(code, "asked to stop")]


def test_council_that_loses_a_supervisor_ends_the_others_and_waits_for_it(run):
    run.council.lose(1)
    assert run.orders() == [End(2.0, "process 1 ended by the loss of its supervisor")]
    assert run.end((0, 134)) == []
    assert run.orders(after=100) == []
    assert [type(order) for order in run.join(1)] == [Start]


def elastic(count=4, counts=(1, 2), **policy):
    run = Supervised(count, pause_seconds=1, wait_seconds=600, **policy)
    run.join()
    run.progress = Progress(run.council.status.attempt, sizes=Sizes(counts, 60.0, "whole"))
    run.orders()
    return run


def lose(run, *members):
    running = [i for i in run.council.status.members if i in run.council._attempt.running]
    for member in members:
        run.council.lose(member)
    return run.end(*((i, 134) for i in running if i not in members))


@pytest.mark.parametrize(
    ("lost", "counts", "members"),
    [
        ([3], (1, 2, 3), (0, 1, 2)),
        ([3], (1, 2), (0, 1)),
        ([1], (1, 2), (0, 2)),
        ([1, 2, 3], (1, 2), (0,)),
        ([1, 2], (3,), None),
        ([1, 2], (), None),
        ([0], (1, 2, 3), None),
    ],
)
def test_council_of_an_elastic_run_goes_on_with_as_many_as_can(lost, counts, members):
    run = elastic(counts=counts)
    lose(run, *lost)
    assert run.orders(after=59) == []
    starts = run.orders(after=1.5)
    if members is None:
        assert starts == []
        (finish,) = run.orders(after=600)
        assert finish.code == 134
    else:
        (start,) = starts
        assert (start.members, start.whole) == (members, "whole")
        names = ", ".join(map(str, members))
        assert f"with {len(members)} of 4 processes ({names})" in run.council.status.state
        told = run.log[-1]
        assert told.endswith("has not come back in 60 s (mesh.elastic.wait_seconds)")


def test_council_of_an_elastic_run_waits_for_a_host_and_starts_with_all_when_it_is_back():
    run = elastic()
    lose(run, 2)
    assert run.orders(after=59) == []
    assert "waits for process 2, 60 s at most" in run.log
    (start,) = run.join(2)
    assert (start.members, start.whole) == ((0, 1, 2, 3), "")


@pytest.fixture
def shrunk():
    run = elastic()
    lose(run, 3)
    (start,) = run.orders(after=62)
    assert start.members == (0, 1)
    run.trained(1)
    return run


def test_council_that_goes_on_with_fewer_ends_only_these(shrunk):
    assert shrunk.end((2, 42)) == []
    shrunk.council.lose(2)
    assert shrunk.orders() == []
    assert shrunk.end((1, 0), (0, 0))[-1] == Finish(0, "")
    assert shrunk.council.status.last_end == "process 1 on host1 finished"


def test_council_lets_a_waiting_host_that_is_asked_to_stop_go_alone(shrunk):
    alone = Finish(75, "asked to stop")
    assert shrunk.council.receive(2, Stopping(signal.SIGTERM)) == alone
    assert shrunk.orders() == []
    assert 2 not in shrunk.council.status.members
    shrunk.join(2)
    lose(shrunk, 1)
    assert shrunk.council.receive(2, Stopping(signal.SIGTERM)) == alone
    assert shrunk.orders(after=2.5) == []
    (start,) = shrunk.join(1)
    assert start.members == (0, 1)


def test_council_puts_a_waiting_host_in_the_place_of_a_lost_one_at_once(shrunk):
    shrunk.end((0, -9), (1, 134))
    (start,) = shrunk.orders(after=2.5)
    assert start.members == (0, 1), "without another wait"
    lose(shrunk, 1)
    (start,) = shrunk.orders(after=4.5)
    assert start.members == (0, 2)


def test_council_grows_at_a_clean_point_when_a_host_has_come_back(shrunk):
    assert shrunk.join(3) == []
    assert shrunk.log[-1] == "process 3 on host3 has joined, and waits: the others have gone on"
    assert [type(order) for order in shrunk.orders(after=2)] == [Save]
    assert shrunk.orders(after=1) == [], "it asks once"
    restarts = shrunk.council.status.restarts
    orders = shrunk.end((0, 75), (1, 75))
    assert orders[-1].members == (0, 1, 2, 3), "without a pause"
    assert shrunk.council.status.restarts == restarts


def test_council_opens_memories_anew_when_others_take_part():
    run = elastic()
    for member in range(4):
        run.council.lose(member)
        run.council.receive(member, Joined(4, "host", f"host:{member}"))
    run.end(*((member, 134) for member in range(4)))
    (first,) = run.orders(after=1.5)
    assert first.memories == ("host:0", "host:1", "host:2", "host:3")
    run.end(*((member, 134) for member in range(4)))
    (again,) = run.orders(after=2.5)
    assert again.word == first.word
    lose(run, 2)
    (fewer,) = run.orders(after=66)
    assert fewer.memories == ("host:0", "host:1")
    assert fewer.word != first.word


def test_council_does_not_stop_an_attempt_for_others_before_it_was_worth_its_start():
    run = elastic()
    lose(run, 3)
    run.orders(after=62)
    run.join(3)
    assert run.orders(after=1000) == [], "without a step it would get nowhere"
    run.trained(0)
    assert run.orders(after=1999) == []
    assert [type(order) for order in run.orders(after=2)] == [Save]


def test_council_waits_no_longer_for_a_host_because_others_come_and_go():
    run = elastic(counts=(1, 2))
    lose(run, 3)
    for comes, goes in ((3, 2), (2, 3), (3, 2)):
        run.council.lose(goes)
        run.join(comes)
        assert run.orders(after=19) == []
    (start,) = run.orders(after=3.5)
    assert start.members == (0, 1)


def test_council_whose_fewer_processes_fail_tries_once_more_until_they_have_trained():
    run = elastic(counts=(1, 2, 3))
    lose(run, 2, 3)
    run.orders(after=62)
    run.end((0, 1), (1, 1))
    (start,) = run.orders(after=62)
    assert start.members == (0, 1), "without a step that was compiled ahead"
    run.trained(1)
    assert run.end((0, 1), (1, 1))[-1] == Finish(1, "")


def test_council_that_begins_anew_learns_sizes_and_the_attempt_from_the_others():
    sizes = Sizes((1, 2), 60.0, "whole")
    run = Supervised(4, wait_seconds=600)
    run.join(0)
    for member in (1, 2):
        run.council.receive(member, Joined(4, "host", "", 3_000_000_000 + member, sizes=sizes))
    assert run.orders(after=59) == []
    (start,) = run.orders(after=1.5)
    assert (start.members, start.whole) == ((0, 1), "whole")
    assert start.previous == 3_000_000_002
    assert start.attempt > start.previous


def test_council_believes_sizes_of_process_0_s_trainer_against_the_others():
    run = elastic()
    run.council.lose(3)
    run.council.receive(3, Joined(4, "host3", sizes=Sizes((1,), 1.0, "other")))
    for attempt, counts in ((1, (1, 2)), (run.council.status.attempt, (2,))):  # 1: an earlier one
        run.progress = Progress(attempt, sizes=Sizes((2,), 60.0, "whole"))
        run.council.take_orders()
        assert run.council._sizes.counts == counts

"""Decide for all supervisors of a run when their trainers start, end, and start again.

The council runs in supervisor 0. The others report to it and follow its orders; `link` carries
reports and orders. Imports no JAX.
"""

import math
import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.terminal import INTERRUPTED
from maxpipe.devices.cluster import Sizes
from maxpipe.supervision.ending import FAILED, LOST
from maxpipe.supervision.messages import (
    End,
    Ended,
    Finish,
    Joined,
    Order,
    Report,
    Save,
    Start,
    Stopping,
    Trained,
)
from maxpipe.supervision.signals import PREEMPTED
from maxpipe.supervision.watchdog import HUNG

RESTARTABLE = (PREEMPTED, HUNG, LOST)
LONGEST_PAUSE = 600.0
RESET_SECONDS = 1800.0  # length of an attempt after which earlier restarts no longer count

_AFTER_LOSS_SECONDS = 2.0  # for a trainer to end by itself when another one is lost
_AFTER_FAILURE_SECONDS = 60.0  # the same when another one has failed by itself
# The same when another one has ended normally: time for saves and copies. As long as a step may
# take by default, since a trainer stopped by SIGSTOP does not watch its own deadline.
_AFTER_END_SECONDS = 1800.0
_MAX_DOUBLINGS = 30.0  # of pauses
_QUIET_SECONDS = 10.0  # of waiting before the log says for whom
# Time without a supervisor coming or going before the others stop to take in new ones; doubled
# each time, like pauses, until an attempt has lasted.
_STEADY_SECONDS = 5.0
_STARTS_BEFORE_GROWTH = 2  # an attempt trains this many times its startup before it may grow
_NAMES_SHOWN = 8
_LOST_CODE = -int(signal.SIGKILL)  # assigned to a trainer whose supervisor is gone


@dataclass(frozen=True)
class Policy:
    """When to restart.

    Attributes:
      max_restarts: limit of restarts in a row; an attempt of half an hour or more begins a new row.
      pause_seconds: pause before the first restart of a row, doubled for each further one.
      wait_seconds: how long to wait for supervisors that have not come, or not come back.
    """

    max_restarts: int = 20
    pause_seconds: float = 1.0
    wait_seconds: float = 600.0


@dataclass(frozen=True)
class Status:
    """What `maxpipe supervise --status` shows.

    Attributes:
      state: what the run is doing.
      attempt: number of the latest attempt, 0 before the first.
      restarts: number of restarts so far.
      last_end: how the last attempt to end has ended; "" if there was none.
      members: index -> host of each connected supervisor.
      waiting: indices of the members that the others go on without for now.
    """

    state: str
    attempt: int = 0
    restarts: int = 0
    last_end: str = ""
    members: Mapping[int, str] = field(default_factory=dict)
    waiting: Sequence[int] = ()


def describe(code: int) -> str:
    """Return an exit code as text, such as "SIGKILL" or "exit code 75"."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def shell_code(code: int) -> int:
    """Return an exit code as a shell reports it: 128 + the signal's number for a signal."""
    return code if code >= 0 else 128 - code


def is_restartable(code: int) -> bool:
    """Return whether to start the same command again after a trainer ended with this code."""
    return code in RESTARTABLE or (code < 0 and code != -signal.SIGINT)


def verdict(codes: Sequence[int]) -> int:
    """Return the exit code that decides what follows an attempt.

    This is the first code that rules out a restart, unless that code follows from the loss of
    another process. If there is none, it is the earliest code that is not 0, or 0.

    Args:
      codes: exit codes of all trainers, in the order in which they ended.
    """
    for position, code in enumerate(codes):
        # A process that loses another one may fail at whatever it is doing.
        follows = code == FAILED and any(map(_is_loss, codes[:position]))
        if code and not is_restartable(code) and not follows:
            return code
    return next(filter(None, codes), 0)


def _is_loss(code: int) -> bool:
    return is_restartable(code) and code != PREEMPTED


class Council:
    """Restart all trainers of a run together, as one attempt.

    An attempt starts when all supervisors are there. The first trainer to end, or supervisor to be
    lost, ends it for all. The exit code decides whether another attempt follows.

    A run whose trainers have reported sizes is elastic: if some supervisors do not come back in
    time, the next attempt takes the first ones of the others, as many as the largest possible size.
    When enough are there for a larger size, the trainers save and end, and all go on together. A
    size with which trainers fail before their first step is not tried again, nor a smaller one.

    Args:
      count: number of the run's supervisors, one for each process.
      policy: when to restart.
      job: name of the run's job, for the lease of its directory.
      free_port: function that returns a port on which an attempt's coordinator may listen.
      log: function that receives a line for each event.
      clock: monotonic clock, in seconds.

    Attributes:
      status: the run's status; replaced as a whole, so that any thread may read it.
    """

    def __init__(
        self,
        count: int,
        policy: Policy,
        job: str,
        *,
        free_port: Callable[[], int],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.status = Status("waits for supervisors")
        self._count = count
        self._policy = policy
        self._job = job
        self._free_port = free_port
        self._log = log
        self._clock = clock
        self._memories: dict[int, str] = {}
        self._word = secrets.token_hex(16)
        self._orders: list[Order] = []
        self._sizes = Sizes()
        self._failed = 0  # size of an attempt that failed once before its first step
        self._fewest = 1  # smallest size not excluded by failures before the first step
        self._attempted: Sequence[int] = range(count)  # in the latest attempt; all before the first
        self._previous = 0  # number of the latest attempt, also of an earlier council
        self._is_to_grow = False  # the trainers have been asked to save for a larger attempt
        self._steady_seconds = _STEADY_SECONDS
        self._trained_at = math.inf  # when the first step of the attempt was finished
        self._running: set[int] = set()
        self._ends: list[int] = []
        self._is_in_attempt = False
        self._ended_by = math.inf  # deadline ordered for the trainers that still run
        self._stopped_by = 0  # the signal that asked a supervisor to stop
        self._finished: Finish | None = None
        self._restarts_in_row = 0  # restarts that count against the limit
        self._began = self._ended = self._changed = clock()
        # Since when each supervisor is absent, or back again but without a new attempt.
        self._absent_since = dict.fromkeys(range(count), self._began)
        self._pause_until = 0.0
        self._told_missing = ""

    def receive(self, member: int, report: Report) -> Finish | None:
        """Process a report of supervisor `member`; return an order for it if it has to leave."""
        match report:
            case Joined():
                return self._join(member, report)
            case Stopping():
                return self._stop(member, report.number)
            case Sizes():
                self._learn(member, report)
            case Trained() if report.attempt == self.status.attempt and self._is_in_attempt:
                self._trained_at = min(self._trained_at, self._clock())
            case Ended() if report.attempt == self.status.attempt:
                self._end(member, report.code, describe(report.code))
        return None

    def _stop(self, member: int, number: int) -> Finish | None:
        by = f"was asked to stop by {signal.Signals(number).name}"
        if member in self._attempted:
            self._stopped_by = number
            self._log(f"{self._name(member)} {by}")
            return None
        # The others have gone on without it already.
        self._log(f"{self._name(member)}, which waits, {by}; the others go on")
        self._leave(member)
        return self._asked_to_stop(number)

    def _learn(self, member: int, sizes: Sizes) -> None:
        """Note the sizes that process 0's trainer reports, or that an earlier council passed on.

        Raises:
          ValueError: they are not sizes of this run.
        """
        numbers = [int(text) for text in sizes.counts.split(",") if text]
        if not all(0 < number < self._count for number in numbers) or not sizes.wait_seconds >= 0:
            raise ValueError(f"no sizes of {self._count} processes: {sizes}")
        if sizes != self._sizes and (member == 0 or self._sizes == Sizes()):
            self._sizes = sizes
            self._orders.append(sizes)

    def lose(self, member: int) -> None:
        """Note that supervisor `member` is gone; its trainer counts as lost."""
        if self._finished:
            return  # it has its last order
        self._log(f"the supervisor of {self._name(member)} is lost")
        self._leave(member)
        self._end(member, _LOST_CODE, "the loss of its supervisor")

    def _leave(self, member: int) -> None:
        self._changed = self._clock()
        self._absent_since.setdefault(member, self._changed)
        self._show({i: host for i, host in self.status.members.items() if i != member})

    def _show(self, members: Mapping[int, str]) -> None:
        waiting = [member for member in members if member not in self._attempted]
        self.status = replace(self.status, members=members, waiting=waiting)

    def fail(self, why: str) -> None:
        """End the run because its supervisors cannot go on."""
        self._finish(FAILED, why)

    def take_orders(self) -> list[Order]:
        """Return new orders for all supervisors; to be called several times a second."""
        if self._finished:
            pass
        elif self._is_in_attempt:
            if not self._running:
                self._decide()
            elif not self._ends and not self._stopped_by and not self._is_to_grow:
                self._grow()
        elif self._stopped_by:
            order = self._asked_to_stop(self._stopped_by)
            self._finish(order.code, order.why)
        elif self._clock() >= self._pause_until:
            self._gather()
        orders, self._orders = self._orders, []
        return orders

    def _join(self, member: int, report: Joined) -> Finish | None:
        if self._finished:
            return self._finished
        host = self.status.members.get(member)
        why = ""
        if report.count != self._count:
            sides = f"{self._count} and {report.count}"
            why = f"the supervisors count {sides} processes: set JAX_NUM_PROCESSES alike for all"
        elif member not in range(self._count):
            why = f"there is no process {member} of {self._count}: set JAX_PROCESS_ID from 0 on"
        elif host is not None:
            why = f"process {member} has a supervisor already, on {host}"
            why += ": give each its own JAX_PROCESS_ID"
        if not why:
            self._show({**self.status.members, member: report.host})
            self._memories[member] = report.memory
            self._previous = max(self._previous, report.attempt)
            self._changed = self._clock()
            if self._sizes.counts:
                self._orders.append(self._sizes)
            if self._is_in_attempt and not self._ends:
                self._log(f"{self._name(member)} has joined, and waits: the others have gone on")
            return None
        self._log(f"a supervisor on {report.host} is refused: {why}")
        if not self.status.attempt and host is None:
            # One of the run's own: the others would wait for it in vain.
            self._finish(CONFIG_ERROR, why)
        return Finish(CONFIG_ERROR, why)

    def _gather(self) -> None:
        """Start an attempt if all supervisors are there, or enough to go on with."""
        usable = self._usable()
        missing = {*range(self._count)} - self.status.members.keys()
        # A supervisor that comes and goes without an attempt does not prolong the wait.
        absent_since = max((self._absent_since[member] for member in missing), default=0.0)
        names = _listed(missing)
        reason = self._reason_to_go_on(usable, names, self._clock() - absent_since)
        if reason is not None:
            self._start(usable, reason)
            return
        waited = self._clock() - max(absent_since, self._ended)
        state = f"waits for process {names}"
        if usable:
            seconds = self._sizes.wait_seconds
            state += f", {seconds:g} s at most, then goes on with {len(usable)} of {self._count}"
        self.status = replace(self.status, state=state)
        if not usable and waited > self._policy.wait_seconds:
            seconds = self._policy.wait_seconds
            self._finish(LOST, f"no supervisor of process {names} has come in {seconds:g} s")
        elif (usable or waited > _QUIET_SECONDS) and state != self._told_missing:
            self._told_missing = state
            self._log(state)

    def _usable(self) -> Sequence[int]:
        """Return the supervisors with which an attempt could start now, as many as possible."""
        smaller = [int(text) for text in self._sizes.counts.split(",") if text]
        there = sorted(self.status.members)
        # The council's own host runs the coordinator of every attempt.
        fitting = [
            number
            for number in (*smaller, self._count)
            if self._fewest <= number <= len(there) and there[0] == 0
        ]
        return there[: max(fitting, default=0)]

    def _reason_to_go_on(self, usable: Sequence[int], missing: str, absent: float) -> str | None:
        """Return why to start with these supervisors, "" with all of them; None to wait."""
        if len(usable) == self._count:
            return ""
        if not usable:
            return None
        if len(usable) >= len(self._attempted):
            return "as before"
        if absent < self._sizes.wait_seconds:
            return None
        seconds = f"{self._sizes.wait_seconds:g} s (mesh.elastic.wait_seconds)"
        return f"process {missing} has not come back in {seconds}"

    def _grow(self) -> None:
        """Ask the trainers to save when supervisors for a larger attempt have come to stay.

        The attempt must have been worth its startup by then, so that the run always gets further.
        """
        usable = self._usable()
        least = self._trained_at + _STARTS_BEFORE_GROWTH * (self._trained_at - self._began)
        now = self._clock()
        is_steady = now - self._changed >= self._steady_seconds and now >= least
        if len(usable) <= len(self._attempted) or not is_steady:
            return
        self._is_to_grow = True
        self._steady_seconds = min(LONGEST_PAUSE, 2 * self._steady_seconds)
        state = f"saves, to go on with {len(usable)} of {self._count} processes"
        self.status = replace(self.status, state=state)
        self._log(state)
        self._orders.append(Save(self.status.attempt))

    def _start(self, members: Sequence[int], reason: str) -> None:
        # Later attempts have higher numbers even if supervisor 0 itself was restarted.
        attempt = max(self.status.attempt + 1, self._previous + 1, int(time.time()))
        is_changed = [*members] != [*self._attempted]
        is_whole = len(members) == self._count
        those = f"{len(members)} of {self._count} processes ({_listed(members)})"
        state = "trains" if is_whole else f"trains with {those}"
        self.status = replace(self.status, attempt=attempt, state=state)
        self._running, self._ends, self._ended_by = {*members}, [], math.inf
        self._told_missing, self._attempted, self._is_to_grow = "", members, False
        self._is_in_attempt, self._began, self._trained_at = True, self._clock(), math.inf
        for member in members:
            self._absent_since.pop(member, None)
        self._show(self.status.members)
        if is_changed:  # a memory may hold copies of one that it no longer follows
            self._word = secrets.token_hex(16)
        several = f" with {self._count} processes" if self._count > 1 else ""
        several = several if is_whole else f" with {those}: {reason}"
        self._log(f"starts attempt {attempt}{several}")
        memories = [self._memories[member] for member in members]
        shared = (",".join(memories), self._word) if all(memories) else ("", "")
        named = ",".join(map(str, members))
        whole = "" if is_whole else self._sizes.whole
        port = self._free_port()
        self._orders.append(
            Start(attempt, port, self._job, named, *shared, whole, previous=self._previous)
        )
        self._previous = attempt

    def _end(self, member: int, code: int, how: str) -> None:
        if member not in self._running:
            return
        self._running.discard(member)
        is_first = not self._ends
        self._ends.append(code)
        if is_first:
            self.status = replace(self.status, last_end=f"{self._name(member)} ended by {how}")
            self._log(self.status.last_end)
        seconds = _AFTER_FAILURE_SECONDS
        if _is_loss(code):
            seconds = _AFTER_LOSS_SECONDS
        elif code == 0 or (code in (PREEMPTED, INTERRUPTED) and self._trained_at < math.inf):
            seconds = _AFTER_END_SECONDS  # a process that is stopped before a step saves nothing
        if self._running and self._clock() + seconds < self._ended_by:
            self._ended_by = self._clock() + seconds
            self._orders.append(End(self.status.attempt, seconds))

    def _decide(self) -> None:
        """Finish after an attempt, or start another one after a pause."""
        self._is_in_attempt, self._ended = False, self._clock()
        code = verdict(self._ends)
        if self._stopped_by and code == -signal.SIGTERM:
            code = PREEMPTED  # the signal came before the trainer could handle it
        if self._stopped_by or (not is_restartable(code) and not self._is_too_small(code)):
            self._finish(shell_code(code), "asked to stop" if self._stopped_by else "")
            return
        if self._clock() - self._began >= RESET_SECONDS:
            self._restarts_in_row = 0
            self._steady_seconds = _STEADY_SECONDS
        if self._is_to_grow and code in (PREEMPTED, -signal.SIGTERM):
            self._pause_until = self._clock()
            return
        number = len(self._attempted)
        # One failure is not enough: the next attempt does not begin with a step compiled ahead.
        is_first_failure = self._failed != number
        if self._is_too_small(code) and is_first_failure:
            self._failed = number
        elif self._is_too_small(code):
            self._fewest = number + 1
            which = f"{number} or fewer of {self._count} processes"
            self._log(f"{describe(code)} before a step: the run cannot go on with {which}")
            self._pause_until = self._clock()
            return
        if self._restarts_in_row >= self._policy.max_restarts:
            self._finish(shell_code(code), f"giving up after {self._restarts_in_row} restarts")
            return
        doubled = 2.0 ** min(self._restarts_in_row, _MAX_DOUBLINGS)
        pause = min(LONGEST_PAUSE, self._policy.pause_seconds * doubled)
        self._restarts_in_row += 1
        self.status = replace(self.status, restarts=self.status.restarts + 1, state="restarts")
        self._pause_until = self._clock() + pause
        limit = f"{self._restarts_in_row} of at most {self._policy.max_restarts}"
        self._log(f"{describe(code)}: restart {limit} in {pause:g} s")

    def _is_too_small(self, code: int) -> bool:
        """Return whether an attempt may have ended with this code for want of processes."""
        is_shrunken = len(self._attempted) < self._count
        return is_shrunken and code in (FAILED, CONFIG_ERROR) and self._trained_at == math.inf

    def _asked_to_stop(self, number: int) -> Finish:
        return Finish(INTERRUPTED if number == signal.SIGINT else PREEMPTED, "asked to stop")

    def _finish(self, code: int, why: str) -> None:
        self._finished = Finish(code, why)
        state = f"has ended with exit code {code}{why and f': {why}'}"
        self.status = replace(self.status, state=state)
        self._orders.append(self._finished)

    def _name(self, member: int) -> str:
        host = self.status.members.get(member, "")
        return f"process {member}{host and f' on {host}'}"


def _listed(indices: Collection[int]) -> str:
    """Return indices as text, such as "0, 2" or the first few "and 12 more"."""
    shown = ", ".join(map(str, sorted(indices)[:_NAMES_SHOWN]))
    more = len(indices) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown

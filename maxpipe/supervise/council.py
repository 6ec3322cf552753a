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
from maxpipe.supervise.ending import FAILED, LOST
from maxpipe.supervise.messages import (
    End,
    Ended,
    Finish,
    Joined,
    Order,
    Report,
    Save,
    Start,
    Stopping,
)
from maxpipe.supervise.progress import Progress
from maxpipe.supervise.signals import PREEMPTED
from maxpipe.supervise.watchdog import HUNG

RESTARTABLE = (PREEMPTED, HUNG, LOST)
LONGEST_PAUSE = 600.0
RESET_SECONDS = 1800.0  # length of an attempt after which earlier restarts no longer count

_AFTER_LOSS_SECONDS = 2.0  # for a trainer to end by itself when another one is lost
_AFTER_FAILURE_SECONDS = 60.0  # the same when another one has failed by itself
# The same when another one has ended normally: time for saves and copies. As long as a step may
# take by default, since a trainer stopped by SIGSTOP does not watch its own deadline.
_AFTER_END_SECONDS = 1800.0
_MAX_DOUBLINGS = 30  # of pauses
_QUIET_SECONDS = 10.0  # of waiting before the log says for whom
_STEADY_SECONDS = 5.0  # no supervisor comes or goes before the others stop to take in new ones
_STARTS_BEFORE_GROWTH = 2  # an attempt trains this many times its startup before it may grow
_NAMES_SHOWN = 8
_LOST_CODE = -int(signal.SIGKILL)  # assigned to a trainer whose supervisor is gone


@dataclass(frozen=True)
class Policy:
    """When to restart, and how long to wait."""

    max_restarts: int = 20  # in a row; an attempt of half an hour or more begins a new row
    pause_seconds: float = 1.0  # before the first restart of a row, doubled for each further one
    wait_seconds: float = 600.0  # for supervisors that have not come, or not come back


@dataclass(frozen=True)
class Status:
    """What `maxpipe supervise --status` shows."""

    state: str
    attempt: int = 0  # number of the latest one
    restarts: int = 0
    last_end: str = ""  # how the last attempt to end has ended
    members: Mapping[int, str] = field(default_factory=dict)  # index -> host of each supervisor
    waiting: Sequence[int] = ()  # members that the others go on without for now


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
    """Return which of the exit codes of all trainers, in order of time, decides what follows.

    This is the first code that rules out a restart, unless that code follows from the loss of
    another process. If there is none, it is the earliest code that is not 0, or 0.
    """
    for position, code in enumerate(codes):
        # A process that loses another one may fail at whatever it is doing.
        follows = code == FAILED and any(map(_is_loss, codes[:position]))
        if code and not is_restartable(code) and not follows:
            return code
    return next(filter(None, codes), 0)


def _is_loss(code: int) -> bool:
    return is_restartable(code) and code != PREEMPTED


@dataclass
class _Gathering:
    """No trainer runs: the council waits for the end of a pause, and for supervisors."""

    since: float
    start_at: float  # no attempt begins earlier
    said: str = ""  # for whom the log has said that it waits


@dataclass
class _Attempt:
    """The trainers that were started together, and how they have ended."""

    number: int
    members: Sequence[int]  # the supervisors that take part
    began: float
    running: set[int]  # members whose trainers have not ended
    ends: list[int] = field(default_factory=list)  # exit codes of the others, in order of time
    end_by: float = math.inf  # deadline that the running trainers have been given
    trained_at: float = math.inf  # when the first step was finished
    is_to_grow: bool = False  # the trainers have been asked to save for a larger attempt

    @property
    def has_trained(self) -> bool:
        return self.trained_at < math.inf


class _Roster:
    """The supervisors that are there, and with how many of them the run can go on."""

    def __init__(self, count: int, now: float):
        self.there: dict[int, Joined] = {}
        self.changed = now  # when a supervisor last came or went
        self.sizes = Sizes()  # of an elastic run
        self.fewest = 1  # smallest size not excluded by failures before the first step
        self._count = count
        # Since when each supervisor is absent, or back again but without a new attempt.
        self._absent_since = dict.fromkeys(range(count), now)

    def join(self, member: int, report: Joined, now: float) -> None:
        self.there[member], self.changed = report, now
        if report.sizes is not None and not self.sizes.counts:
            self.sizes = report.sizes

    def leave(self, member: int, now: float) -> None:
        self.there.pop(member, None)
        self.changed = now
        self._absent_since.setdefault(member, now)

    def begin(self, members: Sequence[int]) -> None:
        """Note that an attempt begins with these."""
        for member in members:
            self._absent_since.pop(member, None)

    def usable(self) -> Sequence[int]:
        """Return the supervisors with which an attempt could start now, as many as possible."""
        there = sorted(self.there)
        # The council's own host runs the coordinator of every attempt.
        fitting = [
            number
            for number in (*self.sizes.counts, self._count)
            if self.fewest <= number <= len(there) and there[0] == 0
        ]
        return there[: max(fitting, default=0)]

    def missing(self, now: float) -> tuple[str, float]:
        """Return the supervisors that are missing, as text, and how long all of them have been.

        A supervisor that comes and goes without an attempt does not prolong that time.
        """
        missing = {*range(self._count)} - self.there.keys()
        return _listed(missing), now - max((self._absent_since[i] for i in missing), default=now)

    def name(self, member: int) -> str:
        where = f" on {self.there[member].host}" if member in self.there else ""
        return f"process {member}{where}"


class Council:
    """Restart all trainers of a run together, as one attempt.

    It gathers supervisors, then has an attempt under way, and so on, until the run has finished. An
    attempt starts when all supervisors are there. The first trainer to end, or supervisor to be
    lost, ends it for all. The exit code decides whether another attempt follows.

    A run whose trainers have reported sizes is elastic: if some supervisors do not come back in
    time, the next attempt takes the first ones of the others, as many as the largest possible size.
    When enough are there for a larger size, the trainers save and end, and all go on together. A
    size with which trainers fail twice before their first step is not tried again, nor a smaller
    one.

    Args:
      count: number of the run's supervisors, one for each process.
      policy: when to restart.
      job: name of the run's job, for the lease of its directory.
      free_port: returns a port for an attempt's coordinator.
      progress: returns how far process 0's trainer is.
      log: receives a line for each event.
      clock: monotonic, in seconds.
    """

    def __init__(
        self,
        count: int,
        policy: Policy,
        job: str,
        *,
        free_port: Callable[[], int],
        progress: Callable[[], Progress],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        # Replaced as a whole, so that any thread may read it.
        self.status = Status("waits for supervisors")
        self._count, self._policy, self._job = count, policy, job
        self._free_port, self._progress, self._log, self._clock = free_port, progress, log, clock
        now = clock()
        self._state: _Gathering | _Attempt | Finish = _Gathering(now, now)
        self._attempt = _Attempt(0, range(count), now, set())  # the latest
        self._roster = _Roster(count, now)
        self._orders: list[Order] = []
        self._word = ""
        self._previous = 0  # number of the latest attempt, also of an earlier council
        self._stopped_by = 0  # the signal that asked a supervisor to stop
        self._restarts_in_row = 0  # restarts that count against the limit
        self._failed_once = 0  # size of an attempt that failed once before its first step

    def receive(self, member: int, report: Report) -> Finish | None:
        """Process a report of supervisor `member`; return an order for it if it has to leave."""
        match report:
            case Joined():
                return self._join(member, report)
            case Stopping():
                return self._stop(member, report.number)
            case Ended() if report.attempt == self._attempt.number:
                self._look()
                self._end(member, report.code, describe(report.code))
        return None

    def lose(self, member: int) -> None:
        """Note that supervisor `member` is gone; its trainer counts as lost."""
        if isinstance(self._state, Finish):
            return  # it has its last order
        self._log(f"the supervisor of {self._roster.name(member)} is lost")
        self._roster.leave(member, self._clock())
        self._end(member, _LOST_CODE, "the loss of its supervisor")

    def fail(self, why: str) -> None:
        """End the run because its supervisors cannot go on."""
        self._finish(FAILED, why)

    def take_orders(self) -> list[Order]:
        """Return new orders for all supervisors; to be called several times a second."""
        match self._state:
            case _Attempt(running=running) as attempt if not running:
                self._follow_up(attempt)
            case _Attempt() as attempt:
                self._look()
                self._grow(attempt)
            case _Gathering() if self._stopped_by:
                self._finish(_stop_code(self._stopped_by), "asked to stop")
            case _Gathering() as gathering if self._clock() >= gathering.start_at:
                self._gather(gathering)
        members = {member: joined.host for member, joined in self._roster.there.items()}
        waiting = [member for member in members if member not in self._attempt.members]
        self.status = replace(self.status, members=members, waiting=waiting)
        orders, self._orders = self._orders, []
        return orders

    def _join(self, member: int, report: Joined) -> Finish | None:
        if isinstance(self._state, Finish):
            return self._state
        there = self._roster.there.get(member)
        why = ""
        if report.count != self._count:
            sides = f"{self._count} and {report.count}"
            why = f"the supervisors count {sides} processes: set JAX_NUM_PROCESSES alike for all"
        elif member not in range(self._count):
            why = f"there is no process {member} of {self._count}: set JAX_PROCESS_ID from 0 on"
        elif there is not None:
            why = f"process {member} has a supervisor already, on {there.host}"
            why += ": give each its own JAX_PROCESS_ID"
        if why:
            self._log(f"a supervisor on {report.host} is refused: {why}")
            if not self._attempt.number and there is None:
                # One of the run's own: the others would wait for it in vain.
                self._finish(CONFIG_ERROR, why)
            return Finish(CONFIG_ERROR, why)
        self._roster.join(member, report, self._clock())
        self._previous = max(self._previous, report.attempt)
        if isinstance(self._state, _Attempt) and not self._state.ends:
            self._log(f"{self._roster.name(member)} has joined, and waits: the others have gone on")
        return None

    def _stop(self, member: int, number: int) -> Finish | None:
        by = f"was asked to stop by {signal.Signals(number).name}"
        if member in self._attempt.members:
            self._stopped_by = number
            self._log(f"{self._roster.name(member)} {by}")
            return None
        # The others have gone on without it already.
        self._log(f"{self._roster.name(member)}, which waits, {by}; the others go on")
        self._roster.leave(member, self._clock())
        return Finish(_stop_code(number), "asked to stop")

    def _look(self) -> None:
        """Note the sizes and the first step that process 0's trainer has told."""
        progress = self._progress()
        if progress.attempt != self._attempt.number:
            return
        self._roster.sizes = progress.sizes or self._roster.sizes
        if progress.at:
            self._attempt.trained_at = min(self._attempt.trained_at, self._clock())

    def _gather(self, gathering: _Gathering) -> None:
        """Start an attempt if all supervisors are there, or enough to go on with."""
        usable, now = self._roster.usable(), self._clock()
        names, absent = self._roster.missing(now)
        patience = self._roster.sizes.wait_seconds
        waited = min(absent, now - gathering.since)
        if len(usable) == self._count:
            self._start(usable, "")
        elif usable and len(usable) >= len(self._attempt.members):
            self._start(usable, "as before")
        elif usable and absent >= patience:
            key = "mesh.elastic.wait_seconds"
            self._start(usable, f"process {names} has not come back in {patience:g} s ({key})")
        elif not usable and waited > self._policy.wait_seconds:
            limit = f"{self._policy.wait_seconds:g} s"
            self._finish(LOST, f"no supervisor of process {names} has come in {limit}")
        else:
            state = f"waits for process {names}"
            if usable:
                state += (
                    f", {patience:g} s at most, then goes on with {len(usable)} of {self._count}"
                )
            self.status = replace(self.status, state=state)
            if state != gathering.said and (usable or waited > _QUIET_SECONDS):
                gathering.said = state
                self._log(state)

    def _start(self, members: Sequence[int], reason: str) -> None:
        """Start an attempt with these members; `reason` says why without the others."""
        # Later attempts have higher numbers even if supervisor 0 itself was restarted.
        number = max(self._previous + 1, int(time.time()))
        if not self._word or [*members] != [*self._attempt.members]:
            self._word = secrets.token_hex(16)  # a memory may hold copies of one it followed before
        is_whole = len(members) == self._count
        those = f"{len(members)} of {self._count} processes ({_listed(members)})"
        several = f" with {self._count} processes" if self._count > 1 else ""
        self._log(f"starts attempt {number}{several if is_whole else f' with {those}: {reason}'}")
        state = "trains" if is_whole else f"trains with {those}"
        self.status = replace(self.status, attempt=number, state=state)
        self._state = self._attempt = _Attempt(number, members, self._clock(), {*members})
        self._roster.begin(members)
        memories = tuple(self._roster.there[member].memory for member in members)
        order = Start(
            number,
            self._free_port(),
            self._job,
            tuple(members),
            memories=memories if all(memories) else (),
            word=self._word,
            whole="" if is_whole else self._roster.sizes.whole,
            previous=self._previous,
        )
        self._orders.append(order)
        self._previous = number

    def _grow(self, attempt: _Attempt) -> None:
        """Ask the trainers to save when supervisors for a larger attempt have come to stay.

        The attempt must have been worth its startup by then, so that the run always gets further.
        """
        if attempt.ends or attempt.is_to_grow or self._stopped_by or not attempt.has_trained:
            return
        number, now = len(self._roster.usable()), self._clock()
        startup = attempt.trained_at - attempt.began
        is_worth_it = now >= attempt.trained_at + _STARTS_BEFORE_GROWTH * startup
        is_steady = now - self._roster.changed >= _STEADY_SECONDS
        if number > len(attempt.members) and is_worth_it and is_steady:
            attempt.is_to_grow = True
            state = f"saves, to go on with {number} of {self._count} processes"
            self.status = replace(self.status, state=state)
            self._log(state)
            self._orders.append(Save(attempt.number))

    def _end(self, member: int, code: int, how: str) -> None:
        """Note how a trainer has ended, and let the others end, too."""
        attempt = self._attempt
        if member not in attempt.running:
            return
        attempt.running.discard(member)
        attempt.ends.append(code)
        if len(attempt.ends) == 1:
            self.status = replace(
                self.status, last_end=f"{self._roster.name(member)} ended by {how}"
            )
            self._log(self.status.last_end)
        seconds = _AFTER_FAILURE_SECONDS
        if _is_loss(code):
            seconds = _AFTER_LOSS_SECONDS
        elif code == 0 or (code in (PREEMPTED, INTERRUPTED) and attempt.has_trained):
            seconds = _AFTER_END_SECONDS  # a process that is stopped before a step saves nothing
        if attempt.running and self._clock() + seconds < attempt.end_by:
            attempt.end_by = self._clock() + seconds
            self._orders.append(End(attempt.number, seconds))

    def _follow_up(self, attempt: _Attempt) -> None:
        """Finish after an attempt, or let another one follow."""
        code, number, now = verdict(attempt.ends), len(attempt.members), self._clock()
        self._state = _Gathering(now, now)
        has_failed = code in (FAILED, CONFIG_ERROR) and not attempt.has_trained
        is_too_small = has_failed and number < self._count  # perhaps
        if now - attempt.began >= RESET_SECONDS:
            self._restarts_in_row = 0
        if self._stopped_by:
            # The signal may have come before the trainer could handle it.
            code = PREEMPTED if code == -signal.SIGTERM else shell_code(code)
            self._finish(code, "asked to stop")
        elif not is_restartable(code) and not is_too_small:
            self._finish(shell_code(code), "")
        elif attempt.is_to_grow and code in (PREEMPTED, -signal.SIGTERM):
            pass
        # One failure is not enough: the next attempt does not begin with a step compiled ahead.
        elif is_too_small and self._failed_once == number:
            self._roster.fewest = number + 1
            which = f"{number} or fewer of {self._count} processes"
            self._log(f"{describe(code)} before a step: the run cannot go on with {which}")
        elif self._restarts_in_row >= self._policy.max_restarts:
            self._finish(shell_code(code), f"giving up after {self._restarts_in_row} restarts")
        else:
            self._failed_once = number if is_too_small else self._failed_once
            doubled = 2.0 ** min(self._restarts_in_row, _MAX_DOUBLINGS)
            pause = min(LONGEST_PAUSE, self._policy.pause_seconds * doubled)
            self._state.start_at += pause
            self._restarts_in_row += 1
            self.status = replace(self.status, restarts=self.status.restarts + 1, state="restarts")
            limit = f"{self._restarts_in_row} of at most {self._policy.max_restarts}"
            self._log(f"{describe(code)}: restart {limit} in {pause:g} s")

    def _finish(self, code: int, why: str) -> None:
        self._state = Finish(code, why)
        state = f"has ended with exit code {code}{why and f': {why}'}"
        self.status = replace(self.status, state=state)
        self._orders.append(self._state)


def _stop_code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else PREEMPTED


def _listed(indices: Collection[int]) -> str:
    """Return indices as text, such as "0, 2" or the first few "and 12 more"."""
    shown = ", ".join(map(str, sorted(indices)[:_NAMES_SHOWN]))
    more = len(indices) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown

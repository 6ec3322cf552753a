"""Decide for all supervisors of a run when their trainers start, end, and start again.

The council runs in supervisor 0; `link` carries the others' reports and its orders. No JAX.
"""

import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.terminal import INTERRUPTED
from maxpipe.devices.cluster import Sizes, free_port
from maxpipe.supervise.ending import FAILED, LOST, PREEMPTED, stop_code
from maxpipe.supervise.process import HUNG, Progress

LONGEST_PAUSE = 600.0
QUIET_SECONDS = 10.0  # of waiting before the log says for whom
RESET_SECONDS = 1800.0  # length of an attempt after which earlier restarts no longer count

_AFTER_LOSS_SECONDS = 2.0  # for a trainer to end by itself when another one is lost
_AFTER_FAILURE_SECONDS = 60.0  # the same when another one has failed by itself
# The same when another one has ended normally: time for saves and copies. As long as a step may
# take by default, since a trainer stopped by SIGSTOP does not watch its own deadline.
_AFTER_END_SECONDS = 1800.0
_STARTS_BEFORE_GROWTH = 2  # an attempt trains this many times its startup before it may grow
_LOST_CODE = -int(signal.SIGKILL)  # assigned to a trainer whose supervisor is gone


class Joined(NamedTuple):
    """A supervisor is there, and has no trainer running; the first report on a line."""

    processes: int
    host: str
    memory: str = ""  # HOST:PORT where its replicas are served
    attempt: int = 0  # the last one in which it took part, of which it has replicas
    member: int = 0
    sizes: Sizes | None = None  # told by its last trainer, for a council that begins anew


class Ended(NamedTuple):  # a trainer
    attempt: int
    code: int  # negative for a signal


class Stopping(NamedTuple):  # a supervisor, which has passed the signal on to its trainer
    number: int


class Start(NamedTuple):
    """Start a trainer."""

    attempt: int
    port: int  # where the attempt's coordinator listens, on supervisor 0's host
    job: str
    members: tuple[int, ...] = (0,)  # who takes part: processes 0, 1, ... of the attempt
    memories: tuple[str, ...] = ()  # HOST:PORT of their memories; empty without
    word: str = ""  # secret of these memories
    whole: str = ""  # what trainers have to know if not all take part, see `Sizes`
    previous: int = 0  # who took no part in this one has replicas of another history


class Save(NamedTuple):
    """Make the trainer save and end, by SIGTERM, because others have come to join."""


class End(NamedTuple):  # the trainer
    seconds: float  # unless it has ended by itself by then; the most urgent order counts
    why: str = ""


class Finish(NamedTuple):  # the supervisor
    code: int
    why: str


Report = Joined | Ended | Stopping
Order = Start | Save | End | Finish


class Policy(NamedTuple):
    """When to restart, and how long to wait."""

    max_restarts: int = 20  # in a row; an attempt of half an hour or more begins a new row
    pause_seconds: float = 1.0  # before the first restart of a row, doubled for each further one
    wait_seconds: float = 600.0  # for supervisors that have not come, or not come back


class Status(NamedTuple):
    """What `maxpipe supervise --status` shows."""

    state: str
    attempt: int = 0  # number of the latest one
    restarts: int = 0
    last_end: str = ""  # how the last attempt to end has ended
    members: Mapping[int, str] = {}  # index -> host of each supervisor


def describe(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def is_restartable(code: int) -> bool:
    return code in (PREEMPTED, HUNG, LOST) or (code < 0 and code != -signal.SIGINT)


def is_loss(code: int) -> bool:
    return is_restartable(code) and code != PREEMPTED


def verdict(codes: Sequence[int]) -> int:
    """Return which of the exit codes of all trainers, in order of time, decides what follows.

    The first code that rules out a restart does, or else the earliest one that is not 0.
    """
    for position, code in enumerate(codes):
        # A process that loses another one may fail at whatever it is doing.
        follows = code == FAILED and any(map(is_loss, codes[:position]))
        if code and not is_restartable(code) and not follows:
            return code
    return next(filter(None, codes), 0)


@dataclass
class _Attempt:
    """The trainers that were started together, and how they have ended."""

    number: int
    members: Sequence[int]
    began: float
    running: set[int]  # members whose trainers have not ended
    ends: list[int] = field(default_factory=list)  # exit codes of the others, in order of time
    trained_at: float = 0.0  # when the first step was finished; 0 before
    is_to_grow: bool = False  # the trainers have been asked to save for a larger attempt


class Council:
    """Restart all trainers of a run together, as one attempt.

    An attempt starts when all supervisors are there. The first trainer to end, or supervisor to be
    lost, ends it for all. The exit code decides whether another attempt follows.

    A run whose trainers have reported sizes is elastic: if some supervisors do not come back in
    time, the next attempt takes the first ones of the others, as many as the largest possible size.
    When enough are there for a larger size, the trainers save and end, and all go on together.

    `progress` returns how far process 0's trainer is; `log` receives a line for each event.
    """

    def __init__(
        self,
        count: int,  # supervisors, one for each process
        policy: Policy,
        job: str,  # its name, for the lease of the run's directory
        progress: Callable[[], Progress],
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ):
        # Replaced as a whole, so that any thread may read it.
        self.status = Status("waits for supervisors")
        self._count, self._policy, self._job = count, policy, job
        self._progress, self._log, self._clock = progress, log, clock
        self._there: dict[int, Joined] = {}  # the supervisors that are there
        # Since when no trainer runs, and how long the pause lasts.
        self._since = self._start_at = clock()
        self._attempt = _Attempt(0, range(count), self._since, set())  # the latest
        self._is_gathering = True
        self._finish: Finish | None = None  # the last order
        self._orders: list[Order] = []
        self._sizes = Sizes()  # of an elastic run
        self._word = ""
        self._previous = 0  # number of the latest attempt, also of an earlier council
        self._stopped_by = 0  # the signal that asked a supervisor to stop
        self._restarts_in_row = 0  # restarts that count against the limit

    def receive(self, member: int, report: Report) -> Finish | None:
        """Process a supervisor's report; return an order for it if it has to leave."""
        if isinstance(report, Joined):
            return self._join(member, report)
        if isinstance(report, Stopping):
            return self._stop(member, report.number)
        if report.attempt == self._attempt.number:
            self._look()
            self._end(member, report.code, describe(report.code))
        return None

    def lose(self, member: int) -> None:
        """Note that a supervisor is gone; its trainer counts as lost."""
        if self._finish is None:
            self._log(f"the supervisor of {self._name(member)} is lost")
            self._there.pop(member, None)
            self._end(member, _LOST_CODE, "the loss of its supervisor")

    def finish(self, code: int, why: str = "") -> None:
        """End the run; the code may be that of a trainer, negative for a signal."""
        self._finish = Finish(code if code >= 0 else 128 - code, why)
        self._show(state=f"has ended with exit code {self._finish.code}{why and f': {why}'}")
        self._orders.append(self._finish)

    def take_orders(self) -> list[Order]:
        """Return new orders for all supervisors; to be called several times a second."""
        if self._finish is not None:
            pass
        elif self._attempt.running:
            self._look()
            self._grow()
        elif not self._is_gathering:
            self._follow_up()
        elif self._stopped_by:
            self.finish(stop_code(self._stopped_by), "asked to stop")
        elif self._clock() >= self._start_at:
            self._gather()
        self._show(members={member: joined.host for member, joined in self._there.items()})
        orders, self._orders = self._orders, []
        return orders

    def _show(self, **changes: Any) -> None:
        self.status = self.status._replace(**changes)

    def _name(self, member: int) -> str:
        where = f" on {self._there[member].host}" if member in self._there else ""
        return f"process {member}{where}"

    def _join(self, member: int, report: Joined) -> Finish | None:
        if self._finish is not None:
            return self._finish
        there, why = self._there.get(member), ""
        if report.processes != self._count:
            sides = f"{self._count} and {report.processes}"
            why = f"the supervisors count {sides} processes: set JAX_NUM_PROCESSES alike for all"
        elif there is not None:
            why = f"{self._name(member)} has a supervisor already: give each its own JAX_PROCESS_ID"
        if why:
            self._log(f"a supervisor on {report.host} is refused: {why}")
            if not self._attempt.number and there is None:
                # One of the run's own: the others would wait for it in vain.
                self.finish(CONFIG_ERROR, why)
            return Finish(CONFIG_ERROR, why)
        self._there[member] = report
        self._previous = max(self._previous, report.attempt)
        if report.sizes is not None and not self._sizes.counts:
            self._sizes = report.sizes
        if self._attempt.running and not self._attempt.ends:
            self._log(f"{self._name(member)} has joined, and waits: the others have gone on")
        return None

    def _stop(self, member: int, number: int) -> Finish | None:
        self._log(f"{self._name(member)} was asked to stop by {signal.Signals(number).name}")
        if member in self._attempt.members:
            self._stopped_by = number
            return None
        del self._there[member]  # it has only waited: the others go on
        return Finish(stop_code(number), "asked to stop")

    def _look(self) -> None:
        progress = self._progress()
        if progress.attempt != self._attempt.number:
            return
        self._sizes = progress.sizes or self._sizes
        if progress.at and not self._attempt.trained_at:
            self._attempt.trained_at = self._clock()

    def _usable(self) -> Sequence[int]:
        """Return the most supervisors with which an attempt could start now."""
        there = sorted(self._there)
        if 0 not in there:  # its host runs the coordinator of every attempt
            return []
        sizes = (*self._sizes.counts, self._count)
        return there[: max((size for size in sizes if size <= len(there)), default=0)]

    def _gather(self) -> None:
        usable, waited = self._usable(), self._clock() - self._since
        missing = ", ".join(str(i) for i in range(self._count) if i not in self._there)
        patience = self._sizes.wait_seconds
        if len(usable) == self._count:
            self._start(usable, "")
        elif usable and len(usable) >= len(self._attempt.members):
            self._start(usable, "as before")
        elif usable and waited >= patience:
            key = "mesh.elastic.wait_seconds"
            self._start(usable, f"process {missing} has not come back in {patience:g} s ({key})")
        elif not usable and waited > self._policy.wait_seconds:
            limit = f"{self._policy.wait_seconds:g} s"
            self.finish(LOST, f"no supervisor of process {missing} has come in {limit}")
        elif usable or waited > QUIET_SECONDS:
            limit = f", {patience:g} s at most" if usable else ""
            state = f"waits for process {missing}{limit}"
            if state != self.status.state:
                self._show(state=state)
                self._log(state)

    def _start(self, members: Sequence[int], reason: str) -> None:
        """Start an attempt with these members; `reason` says why without the others."""
        # Higher than earlier ones even if supervisor 0 itself was restarted.
        number = max(self._previous + 1, int(time.time()))
        if not self._word or [*members] != [*self._attempt.members]:
            self._word = secrets.token_hex(16)  # a memory may hold copies of one it followed before
        those = whole = ""
        if reason:
            names = ", ".join(map(str, members))
            those = f" with {len(members)} of {self._count} processes ({names})"
            whole = self._sizes.whole
        self._log(f"starts attempt {number}{those}{reason and f': {reason}'}")
        self._show(attempt=number, state=f"trains{those}")
        self._attempt = _Attempt(number, members, self._clock(), {*members})
        self._is_gathering = False
        memories = tuple(self._there[member].memory for member in members)
        start = number, free_port(), self._job, tuple(members), memories, self._word, whole
        self._orders.append(Start(*start, self._previous))
        self._previous = number

    def _grow(self) -> None:
        attempt, number = self._attempt, len(self._usable())
        if attempt.ends or attempt.is_to_grow or self._stopped_by or not attempt.trained_at:
            return
        # It must have been worth its startup by then, so that the run always gets further.
        startup = attempt.trained_at - attempt.began
        grows_at = attempt.trained_at + _STARTS_BEFORE_GROWTH * startup
        if number > len(attempt.members) and self._clock() >= grows_at:
            attempt.is_to_grow = True
            self._show(state=f"saves, to go on with {number} of {self._count} processes")
            self._log(self.status.state)
            self._orders.append(Save())

    def _end(self, member: int, code: int, how: str) -> None:
        attempt = self._attempt
        if member not in attempt.running:
            return
        attempt.running.discard(member)
        attempt.ends.append(code)
        why = ""
        if len(attempt.ends) == 1:
            why = f"{self._name(member)} {f'ended by {how}' if code else 'finished'}"
            self._show(last_end=why)
            self._log(why)
        seconds = _AFTER_FAILURE_SECONDS
        if is_loss(code):
            seconds = _AFTER_LOSS_SECONDS
        elif code == 0 or (code in (PREEMPTED, INTERRUPTED) and attempt.trained_at):
            seconds = _AFTER_END_SECONDS  # a process that is stopped before a step saves nothing
        if attempt.running:
            self._orders.append(End(seconds, why))

    def _follow_up(self) -> None:
        """Finish after an attempt, or let another one follow."""
        attempt, code = self._attempt, verdict(self._attempt.ends)
        self._since = self._start_at = self._clock()
        self._is_gathering = True
        is_smaller = len(attempt.members) < self._count and not attempt.trained_at
        if self._since - attempt.began >= RESET_SECONDS:
            self._restarts_in_row = 0
        if self._stopped_by:
            # The signal may have come before the trainer could handle it.
            self.finish(PREEMPTED if code == -signal.SIGTERM else code, "asked to stop")
        # The step of fewer hosts may have been compiled ahead; the next attempt compiles its own.
        elif not is_restartable(code) and not (is_smaller and code == FAILED):
            self.finish(code)
        elif attempt.is_to_grow and code in (PREEMPTED, -signal.SIGTERM):
            pass
        elif self._restarts_in_row >= self._policy.max_restarts:
            self.finish(code, f"giving up after {self._restarts_in_row} restarts")
        else:
            doublings = min(self._restarts_in_row, 30)
            pause = min(LONGEST_PAUSE, self._policy.pause_seconds * 2.0**doublings)
            self._start_at += pause
            self._restarts_in_row += 1
            self._show(restarts=self.status.restarts + 1, state="restarts")
            limit = f"{self._restarts_in_row} of at most {self._policy.max_restarts}"
            self._log(f"{describe(code)}: restart {limit} in {pause:g} s")

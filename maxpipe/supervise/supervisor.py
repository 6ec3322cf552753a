"""Supervise the trainer of one host, as the run's council orders.

Imports no JAX, so that a supervisor costs next to no memory and JAX cannot abort it.
"""

import json
import os
import platform
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from maxpipe.checkpoint.steps import OWN
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.devices.cluster import WHOLE, Place, Sizes, job_of_process
from maxpipe.storage.local_files import write_atomically
from maxpipe.supervise import council, ending, process
from maxpipe.supervise.council import Council, Ended, Joined, Order, Policy, Report, Start
from maxpipe.supervise.link import SILENCE_SECONDS, Hub, Inbox, Line
from maxpipe.supervise.memory import Partners, hold, shared_memory
from maxpipe.supervise.secret import CALLER, prove, run_secret

_LOOK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_STATUS_SECONDS = 2.0
_LAST_STATUS_SECONDS = 10.0  # for the last status to be written
_STACKS_SECONDS = 5.0  # from SIGABRT, after which a trainer writes its stacks, to SIGKILL


class TrainerProcess:
    """A running trainer, in a session of its own; ended with all its children."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            start_new_session=True,  # a terminal's Ctrl-C comes once, from the supervisor
            preexec_fn=ending.die_with_parent(os.getpid()),
        )
        self.send = self._process.send_signal
        self._abort_at = self._kill_at = float("inf")

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs. End it if due."""
        code, now = self._process.poll(), time.monotonic()
        if code is not None or now >= self._kill_at:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # worker processes may outlive it
        elif now >= self._abort_at:
            self._abort_at, self._kill_at = float("inf"), now + _STACKS_SECONDS
            self.send(signal.SIGABRT)  # Python writes the stacks of all threads
        return code

    def end_within(self, seconds: float) -> None:
        """Let `poll` end it after some seconds, if it has not ended by itself."""
        self._abort_at = min(self._abort_at, time.monotonic() + seconds)


class Supervisor:
    """Follows the orders of a council for one host; see `supervise`.

    `memory` holds replicas, the trainer's and a partner's, and its progress; `port` is that of
    `partners`.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        log: Callable[[str], None],
        memory: Path,
        partners: Partners,
        port: int,
    ):
        self.code: int | None = None  # exit code, once the run has ended
        self.progress_file = memory / "progress.json"  # written by the trainer
        self._command, self._place, self._log = command, place, log
        self._memory, self._partners, self._port = memory, partners, port
        self._name = f"process {place.index}"
        self._line: Line | None = None  # to the council
        self._stopped_by = 0  # the signal that was passed on to the trainer
        self._trainer: TrainerProcess | None = None
        # An order to start, which waits until lost replicas are here again.
        self._starting: tuple[Start, threading.Event] | None = None
        self._took_part = 0  # the latest attempt in which this supervisor was to take part
        self._downtime = ""
        self._sizes: Sizes | None = None  # of the latest trainer that has told any

    def follow(
        self, address: tuple[str, int], secret: str, wait_seconds: float, signals: list[int]
    ) -> int:
        """Join the council at `address`, again if it is lost, and follow its orders.

        Returns the exit code. `signals` receives those that ask to stop.
        """
        since, told = time.monotonic(), ""
        while self.code is None:
            if asked := (self._stopped_by or (signals and signals[0])):
                return ending.stop_code(asked)
            try:
                self._converse(address, secret, signals)
            except OSError as error:
                text, waited = told, time.monotonic() - since
                if self._line is not None:
                    text = f"the line to supervisor 0 is lost ({error}); {self._name} ends"
                    self._line.close()
                    self._line, since = None, time.monotonic()
                    self.end()
                elif waited > min(council.QUIET_SECONDS, wait_seconds):  # it may start a bit later
                    where = f"{address[0]}:{address[1]}"
                    text = f"no supervisor 0 at {where} ({error}); let hosts reach this port"
                if text != told:
                    told = text
                    self._log(text)
                if time.monotonic() - since > wait_seconds:
                    code = ending.LOST
                    self._log(f"supervisor 0 has not come in {wait_seconds:g} s; exit code {code}")
                    return code
                time.sleep(_RETRY_SECONDS)
        return self.code

    def _converse(self, address: tuple[str, int], secret: str, signals: list[int]) -> None:
        """Join over a new line, and follow orders up to the last one; OSError if it is lost."""
        connection = socket.create_connection(address, SILENCE_SECONDS)
        try:
            prove(connection, secret, CALLER)
            greeting = self.greeting(connection.getsockname()[0])
        except OSError:
            connection.close()
            raise
        inbox: Inbox = queue.SimpleQueue()
        self._line = Line(connection, inbox)
        self._line.send(greeting)
        while self.code is None:
            if signals:
                self._stop(signals.pop())
            with suppress(queue.Empty):
                self.handle(inbox.get(timeout=_LOOK_SECONDS)[1])
            self._line.ping()
            self.look()
        self._line.close()

    def greeting(self, host: str) -> Joined:
        """Return the first report; `host` is this host's address on the way to supervisor 0."""
        # Supervisor 0 reaches itself by an address that the others cannot use.
        served = f"{host if self._place.index else self._place.host}:{self._port}"
        there = self._place.count, platform.node(), served
        return Joined(*there, self._took_part, self._place.index, self._sizes)

    def handle(self, order: Order | Report | OSError) -> None:
        """Follow an order; raises OSError once there are no more."""
        match order:
            case Start():
                self._prepare(order)
            case council.Save() | council.End() if self._starting is not None:
                self._starting = None
                code = ending.PREEMPTED if isinstance(order, council.Save) else ending.LOST
                self._report(Ended(self._took_part, code))
            case council.Save() if self._trainer is not None:
                self._trainer.send(signal.SIGTERM)
            case council.End() if self._trainer is not None:
                self._trainer.end_within(order.seconds)
                if order.why and self._place.index > 0:
                    self._log(order.why)
            case council.Finish():
                self.code = order.code
                if order.why:
                    self._log(f"{order.why}; exit code {order.code}")
            case OSError():
                raise order

    def pass_on(self, number: int) -> None:
        """Pass a signal on that asks the trainer for something, if there is a trainer."""
        if self._trainer is not None:
            self._trainer.send(number)

    def _stop(self, number: int) -> None:
        # SIGHUP, which would kill the trainer, becomes SIGTERM.
        self._stopped_by = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        if self._trainer is not None:
            self._trainer.send(self._stopped_by)
        self._report(council.Stopping(self._stopped_by))

    def end(self) -> None:
        """End the trainer and wait for it."""
        self._starting = None
        if self._trainer is not None:
            self._trainer.end_within(0)
        while self._trainer is not None:
            self._take_end()
            time.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        """Start the trainer when its memory is ready; report its end."""
        with suppress(OSError):  # reported when the next trainer starts
            hold(self._memory)
        if self._starting is not None and self._starting[1].is_set():
            order, self._starting = self._starting[0], None
            self._start(order)
        if (code := self._take_end()) is not None:
            self._report(Ended(self._took_part, code))

    def _prepare(self, order: Start) -> None:
        """Let `look` start the trainer, with partners once lost replicas are fetched."""
        if self._place.index not in order.members:
            self._log(f"{self._name} waits: the others go on without it for now")
            self._partners.rest()
            return
        # Since it last took part, the others may have gone back, and on from there.
        is_stale = self._took_part != order.previous
        self._took_part = order.attempt
        memories = dict(zip(order.members, order.memories, strict=False))
        self._starting = order, self._partners.begin(memories, order.word, forgets=is_stale)

    def _start(self, order: Start) -> None:
        own = self._memory / OWN
        environment = {
            "MAXPIPE_ATTEMPT": str(order.attempt),
            "MAXPIPE_JOB": order.job,
            process.PROGRESS: str(self.progress_file),
            process.MEMORY: str(own),
            process.DOWNTIME: self._downtime,
            WHOLE: order.whole,
        }
        if self._place.count > 1:
            host = f"[{self._place.host}]" if ":" in self._place.host else self._place.host
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"{host}:{order.port}",
                "JAX_NUM_PROCESSES": str(len(order.members)),
                "JAX_PROCESS_ID": str(order.members.index(self._place.index)),
            }
        try:
            hold(self._memory)
            own.mkdir(exist_ok=True)
            self.progress_file.unlink(missing_ok=True)
            self._trainer = TrainerProcess(self._command, environment)
        except OSError as error:
            self._log(f"cannot start {self._command[0]}: {error.strerror}")
            self._report(Ended(self._took_part, CONFIG_ERROR))
            return
        if self._stopped_by:  # the signal came while the order was on its way
            self._trainer.send(self._stopped_by)

    def _report(self, report: Report) -> None:
        if self._line is not None:
            self._line.send(report)

    def _take_end(self) -> int | None:
        if self._trainer is None or (code := self._trainer.poll()) is None:
            return None
        self._trainer = None
        progress = process.read_progress(self.progress_file)
        self._sizes = progress.sizes or self._sizes
        # An attempt without a step counts as part of the restart after the previous one.
        if progress.at or not self._downtime:
            now = time.time()
            self._downtime = json.dumps((max(0.0, now - (progress.at or now)), now))
        if self._place.index > 0:  # the council reports on process 0
            self._log(f"{self._name}: {council.describe(code)}")
        return code


def supervise(
    command: Sequence[str], place: Place, policy: Policy, log: Callable[[str], None]
) -> int:
    """Keep the trainer of this host running until its run has ended; return the exit code.

    Process 0's supervisor runs the council for all. If it is lost, the others end their trainers
    and wait for it. Raises ConfigError if there is no secret, or the council's port is in use.
    """
    job = job_of_process()[0] or f"{platform.node()} {os.getpid()} {time.time():.0f}"
    secret = run_secret(command, place.count)
    signals: list[int] = []  # that ask to stop
    with ExitStack() as stack:
        # First, so that no signal leaves the memory behind.
        numbers = ending.numbers_to_pass_on()
        stack.enter_context(ending.handling(numbers, lambda n, _: signals.append(n)))
        memory = stack.enter_context(shared_memory())
        partners, address = Partners(memory, place.index), (place.host, place.port)
        port = stack.enter_context(partners.serving(address[0]))
        supervisor = Supervisor(command, place, log, memory, partners, port)
        stack.enter_context(ending.handling(ending.INQUIRIES, lambda n, _: supervisor.pass_on(n)))
        if place.index == 0:
            read_progress = partial(process.read_progress, supervisor.progress_file)
            head = Council(place.count, policy, job, read_progress, log)
            try:
                port = stack.enter_context(Hub(head).serving(*address, secret))
            except OSError as error:
                message = f"port {place.port} cannot be used: {error.strerror}; end what holds it, "
                message += "or choose another one in JAX_COORDINATOR_ADDRESS"
                raise ConfigError(Problem("", message)) from error
            address = "localhost", port
            write_status = partial(_write_status, head, supervisor.progress_file)
            # A file system may stall for longer than other supervisors tolerate silence.
            stack.enter_context(process.running(write_status, "status", _LAST_STATUS_SECONDS))
        stack.callback(supervisor.end)
        return supervisor.follow(address, secret, policy.wait_seconds, signals)


def _write_status(head: Council, progress: Path, closed: threading.Event) -> None:
    """Write `supervisor.json` into the run's directory every few seconds, and at the end."""
    run, is_last = "", False
    while not is_last:
        is_last = closed.wait(_STATUS_SECONDS)
        if run := run or process.read_progress(progress).run:
            text = json.dumps(head.status._asdict())
            with suppress(OSError):
                write_atomically(Path(run) / process.STATUS_FILE, [text.encode()])

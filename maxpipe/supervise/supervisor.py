"""Supervise the trainer of one host: start it, watch it, end it, as the run's council orders.

Imports no JAX, so that a supervisor costs next to no memory and JAX cannot abort it.
"""

import json
import os
import platform
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from maxpipe.checkpoint.steps import OWN
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.terminal import INTERRUPTED
from maxpipe.devices.cluster import WHOLE, Place, Sizes, free_port, job_of_process
from maxpipe.storage.local_files import write_atomically
from maxpipe.supervise.council import Council, Policy, describe
from maxpipe.supervise.ending import LOST, die_with_parent
from maxpipe.supervise.link import SILENCE_SECONDS, Hub, Inbox, Line, LinkLost
from maxpipe.supervise.memory import MEMORY, hold, shared_memory
from maxpipe.supervise.messages import (
    End,
    Ended,
    Finish,
    Joined,
    Message,
    Report,
    Save,
    Start,
    Stopping,
)
from maxpipe.supervise.partner import Partners
from maxpipe.supervise.progress import (
    DOWNTIME,
    PROGRESS,
    STATUS_FILE,
    Progress,
    downtime_variable,
    read_progress,
)
from maxpipe.supervise.secret import CALLER, Unproved, prove, run_secret
from maxpipe.supervise.signals import PREEMPTED, as_passed_on, handling, numbers_to_pass_on

_LOOK_SECONDS = 0.1
_RETRY_SECONDS = 0.5
_STATUS_SECONDS = 2.0
_LAST_STATUS_SECONDS = 10.0  # for the last status to be written
_STACKS_SECONDS = 5.0  # from SIGABRT, after which a trainer writes its stacks, to SIGKILL
_OTHERS = "another program answers, or a supervisor with another output_dir or MAXPIPE_SECRET"


class TrainerProcess:
    """A running trainer, in a session of its own; ended with all its children."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            start_new_session=True,  # a terminal's Ctrl-C comes once, from the supervisor
            preexec_fn=die_with_parent(os.getpid()),
        )
        self._abort_at = self._kill_at = float("inf")

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs; end it if due."""
        code = self._process.poll()
        now = time.monotonic()
        if code is not None or now >= self._kill_at:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # worker processes may outlive it
        elif now >= self._abort_at:
            self._abort_at, self._kill_at = float("inf"), now + _STACKS_SECONDS
            self.send(signal.SIGABRT)  # Python writes the stacks of all threads
        return code

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def end_within(self, seconds: float) -> None:
        """Let `poll` end it after some seconds, if it has not ended by itself."""
        self._abort_at = min(self._abort_at, time.monotonic() + seconds)


class Supervisor:
    """Follows the orders of a council for one host; see `supervise`.

    Args:
      directory: directory for this supervisor's files.
      memory: directory in memory for replicas, the trainer's and a partner's; None without one.
      partners: exchange of replicas with other supervisors; None without these or without memory.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        log: Callable[[str], None],
        directory: Path,
        memory: Path | None,
        partners: Partners | None = None,
    ):
        self.code: int | None = None  # exit code, once the run has ended
        self.line: Line | None = None  # to the council
        self.progress_file = directory / "progress.json"  # written by the trainer
        self._stopped_by = 0  # the signal that was passed on to the trainer
        self._command, self._place, self._log = command, place, log
        self._name = f"process {place.index}"
        self._memory, self._partners = memory, partners
        self._trainer: TrainerProcess | None = None
        # An order to start, which waits until lost replicas are here again.
        self._starting: tuple[Start, threading.Event | None] | None = None
        self._attempt = 0
        self._took_part = 0  # the latest attempt in which this supervisor was to take part
        self._downtime = ""
        self._sizes: Sizes | None = None  # of the latest trainer that has told any

    def follow(
        self, address: tuple[str, int], secret: str, wait_seconds: float, signals: list[int]
    ) -> int:
        """Join the council, again if it is lost, and follow its orders; return the exit code.

        Supervisor 0, at `address`, may be away for `wait_seconds`. `signals` receives signals that
        ask to stop, as they come.
        """
        until, is_told = time.monotonic() + wait_seconds, False
        while self.code is None:
            if asked := (self._stopped_by or (signals and signals[0])):
                return INTERRUPTED if asked == signal.SIGINT else PREEMPTED
            self.line = None
            try:
                self._converse(address, secret, signals)
            except (LinkLost, Unproved) as error:
                is_unproved = isinstance(error, Unproved)
                reason = _OTHERS if is_unproved else str(error)
                if self.line is not None:
                    self._log(f"the line to supervisor 0 is lost ({reason}); {self._name} ends")
                    self.end()
                    if self.line.is_answered:
                        until = time.monotonic() + wait_seconds
                where = f"{address[0]}:{address[1]}"
                remedy = "start it there, and let hosts reach this port"
                absence = f"no supervisor 0 at {where} ({reason}); {remedy}"
                if time.monotonic() > until:
                    self._log(f"{absence}; exit code {LOST}")
                    return LOST
                if is_unproved and not is_told:
                    is_told = True
                    self._log(absence)
                time.sleep(_RETRY_SECONDS)
            finally:
                if self.line is not None:
                    self.line.close()
        return self.code

    def _converse(self, address: tuple[str, int], secret: str, signals: list[int]) -> None:
        """Join over a new line, and follow orders up to the last one.

        Raises:
          LinkLost: supervisor 0 cannot be reached, or is gone.
          Unproved: another program answers, or a supervisor with another secret.
        """
        try:
            connection = socket.create_connection(address, SILENCE_SECONDS)
            prove(connection, secret, CALLER)
            greeting = self.greeting(connection.getsockname()[0])
        except Unproved:
            connection.close()
            raise
        except OSError as error:
            raise LinkLost(str(error)) from error
        inbox: Inbox = queue.SimpleQueue()
        self.line = Line(connection, inbox)
        self.line.send(greeting)
        while self.code is None:
            if signals:
                self._stop(signals.pop())
            with suppress(queue.Empty):
                self.handle(inbox.get(timeout=_LOOK_SECONDS)[1])
            self.line.ping()
            self.look()

    def greeting(self, host: str) -> Joined:
        """Return the first report; `host` is this host's address on the way to supervisor 0."""
        # Supervisor 0 reaches itself by an address that the others cannot use.
        reached = self._place.host if self._place.index == 0 else host
        served = self._partners.listen(reached) if self._partners is not None else ""
        count, index = self._place.count, self._place.index
        return Joined(count, platform.node(), served, self._took_part, index, self._sizes)

    def handle(self, order: Message | LinkLost) -> None:
        """Follow an order; raises `LinkLost` once there are no more."""
        is_of_attempt = isinstance(order, End | Save) and order.attempt == self._attempt
        match order:
            case Start():
                self._attempt = order.attempt
                self._prepare(order)
            case End() | Save() if is_of_attempt and self._starting is not None:
                self._starting = None
                self._report(Ended(self._attempt, LOST if isinstance(order, End) else PREEMPTED))
            case Save() if is_of_attempt and self._trainer is not None:
                self._trainer.send(signal.SIGTERM)
            case End() if is_of_attempt and self._trainer is not None:
                self._trainer.end_within(order.seconds)
            case LinkLost():
                raise order
            case Finish():
                self.code = order.code
                if order.why:
                    self._log(f"{order.why}; exit code {order.code}")

    def _stop(self, number: int) -> None:
        """Pass a signal that asks to stop on to the trainer, and tell the council."""
        self._stopped_by = number
        if self._trainer is not None:
            self._trainer.send(number)
        self._report(Stopping(number))

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
        if self._memory is not None:
            with suppress(OSError):  # reported when the next trainer starts
                hold(self._memory)
        if self._starting is not None:
            order, ready = self._starting
            if ready is None or ready.is_set():
                self._starting = None
                self._start(order)
        if (code := self._take_end()) is not None:
            self._report(Ended(self._attempt, code))

    def _prepare(self, order: Start) -> None:
        """Let `look` start the trainer, with partners once lost replicas are fetched."""
        if self._place.index not in order.members:
            self._log(f"{self._name} waits: the others go on without it for now")
            if self._partners is not None:
                self._partners.rest()
            return
        # Since it last took part, the others may have gone back, and on from there.
        is_stale = self._took_part != order.previous
        self._took_part = order.attempt
        ready = None
        if self._partners is not None:
            memories = dict(zip(order.members, order.memories, strict=False))
            ready = self._partners.begin(memories, order.word, forgets=is_stale)
        self._starting = order, ready

    def _start(self, order: Start) -> None:
        environment = {
            "MAXPIPE_ATTEMPT": str(order.attempt),
            "MAXPIPE_JOB": order.job,
            PROGRESS: str(self.progress_file),
        }
        if self._memory is not None:
            try:
                hold(self._memory)
                (self._memory / OWN).mkdir(exist_ok=True)
                environment[MEMORY] = str(self._memory / OWN)
            except OSError as error:
                self._log(f"the trainer gets no directory in memory: {error}")
        if self._downtime:
            environment[DOWNTIME] = self._downtime
        if order.whole:
            environment[WHOLE] = order.whole
        if self._place.count > 1:
            host = f"[{self._place.host}]" if ":" in self._place.host else self._place.host
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"{host}:{order.port}",
                "JAX_NUM_PROCESSES": str(len(order.members)),
                "JAX_PROCESS_ID": str(order.members.index(self._place.index)),
            }
        self.progress_file.unlink(missing_ok=True)
        try:
            self._trainer = TrainerProcess(self._command, environment)
        except OSError as error:
            self._log(f"cannot start {self._command[0]}: {error.strerror}")
            self._report(Ended(self._attempt, CONFIG_ERROR))
            return
        if self._stopped_by:  # the signal came while the order was on its way
            self._trainer.send(self._stopped_by)

    def _report(self, report: Report) -> None:
        if self.line is not None:
            self.line.send(report)

    def _take_end(self) -> int | None:
        if self._trainer is None or (code := self._trainer.poll()) is None:
            return None
        self._trainer = None
        progress = read_progress(self.progress_file)
        self._sizes = progress.sizes or self._sizes
        # An attempt without a step counts as part of the restart after the previous one.
        if progress.at or not self._downtime:
            self._downtime = downtime_variable(progress, time.time())
        if self._place.index > 0:  # the council reports on process 0
            self._log(f"{self._name}: {describe(code)}")
        return code


def supervise(
    command: Sequence[str], place: Place, policy: Policy, log: Callable[[str], None]
) -> int:
    """Keep the trainer of this host running until its run has ended; return the exit code.

    With several hosts, each has a supervisor; process 0's runs the council for all. If it is lost,
    the others end their trainers and wait for it to come back.

    Args:
      command: command line that starts the trainer.
      place: this host's place in the run.
      policy: when to restart; supervisor 0's counts.
      log: function that receives a line for each event.

    Raises:
      ConfigError: there is no secret, or the council's port is in use.
    """
    job = job_of_process()[0] or f"{platform.node()} {os.getpid()} {time.time():.0f}"
    secret = run_secret(command, place.count)
    signals: list[int] = []  # that ask to stop
    with ExitStack() as stack:
        # First, so that no signal leaves the memory behind.
        numbers = numbers_to_pass_on()
        stack.enter_context(handling(numbers, lambda n, _: signals.append(as_passed_on(n))))
        memory = stack.enter_context(shared_memory())
        if memory is not None:
            directory = memory  # which ends with this process, however it ends
        else:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maxpipe-")))
        address = (place.host, place.port)
        partners = None
        if memory is not None and place.count > 1:
            partners = stack.enter_context(Partners(memory, place.index))
        supervisor = Supervisor(command, place, log, directory, memory, partners)
        if place.index == 0:
            progress = partial(read_progress, supervisor.progress_file)
            council = Council(
                place.count, policy, job, free_port=free_port, progress=progress, log=log
            )
            hub = stack.enter_context(_hub(council, place, secret))
            address = hub.address
            stack.enter_context(_writing_status(council, progress))
        stack.callback(supervisor.end)
        return supervisor.follow(address, secret, policy.wait_seconds, signals)


def _hub(council: Council, place: Place, secret: str) -> Hub:
    """Return the hub of a council; raises ConfigError if its port is in use."""
    # A single process with an announced address starts JAX's own coordinator at that port.
    host, port = (place.host, place.port) if place.count > 1 else ("localhost", 0)
    try:
        return Hub(council, host, port, secret)
    except OSError as error:
        message = (
            f"port {place.port} of the coordinator's address cannot be used: {error.strerror}; "
            "end the process that holds it, or choose another port in JAX_COORDINATOR_ADDRESS"
        )
        raise ConfigError(Problem("", message)) from error


@contextmanager
def _writing_status(council: Council, progress: Callable[[], Progress]) -> Iterator[None]:
    """Write `supervisor.json` into the run's directory every few seconds, and at the end.

    A thread does so: a file system may stall for longer than the other supervisors tolerate
    silence.
    """
    closed = threading.Event()

    def serve() -> None:
        run, is_last = "", False
        while not is_last:
            is_last = closed.wait(_STATUS_SECONDS)
            if run := run or progress().run:
                text = json.dumps(asdict(council.status))
                with suppress(OSError):
                    write_atomically(Path(run) / STATUS_FILE, [text.encode()])

    thread = threading.Thread(target=serve, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(_LAST_STATUS_SECONDS)

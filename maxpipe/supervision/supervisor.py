"""Supervise the trainer of one host: start it, watch it, end it, as the run's council orders.

Imports no JAX, so that a supervisor costs next to no memory and outlives what JAX aborts.
"""

import contextlib
import ctypes
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from types import FrameType

from maxpipe.checkpoint.steps import OWN
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.terminal import INTERRUPTED
from maxpipe.devices.cluster import Place, job_of_process
from maxpipe.storage.local_files import write_atomically
from maxpipe.supervision.council import (
    Council,
    End,
    Ended,
    Finish,
    Joined,
    Message,
    Policy,
    Report,
    Start,
    Status,
    Stopping,
    describe,
    encode,
)
from maxpipe.supervision.ending import LOST
from maxpipe.supervision.link import Hub, Line, LinkLost, connect, exchange, free_port
from maxpipe.supervision.memory import MEMORY, shared_memory
from maxpipe.supervision.partner import Partners
from maxpipe.supervision.progress import (
    DOWNTIME,
    PROGRESS,
    STATUS_FILE,
    downtime_variable,
    read_progress,
)
from maxpipe.supervision.signals import PREEMPTED

_LOOK_SECONDS = 0.1
_RETRY_SECONDS = 1.0
_STATUS_SECONDS = 5.0
_STACKS_SECONDS = 5.0  # from SIGABRT, after which a trainer writes its stacks, to SIGKILL
_KILL_WITH_PARENT = (1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG of Linux's prctl


class TrainerProcess:
    """A running trainer, in a session of its own.

    Args:
      command: with its arguments.
      environment: added to this process's.

    Raises:
      OSError: the command cannot be started.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str]):
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            start_new_session=True,  # a terminal's Ctrl-C comes once, from the supervisor
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._abort_at = self._kill_at = float("inf")

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while it runs; end it if due."""
        code = self._process.poll()
        if code is not None:
            self._kill_group()  # worker processes may outlive it
            return code
        now = time.monotonic()
        if now >= self._kill_at:
            self._kill_group()
        elif now >= self._abort_at:
            self._abort_at, self._kill_at = float("inf"), now + _STACKS_SECONDS
            self.send(signal.SIGABRT)  # Python writes the stacks of all threads
        return None

    def send(self, number: int) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def end_within(self, seconds: float) -> None:
        """Let `poll` end it after some seconds, if it has not ended by itself."""
        self._abort_at = min(self._abort_at, time.monotonic() + seconds)

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


class Supervisor:
    """Follow the orders of a council for one host.

    Args:
      command: starts the trainer.
      place: of this host in the run.
      log: takes a line for each event.
      directory: for files of this supervisor.
      memory: a directory for replicas, the trainer's and a partner's; None if there is none.
      partners: those with whom replicas are exchanged; None without them or without memory.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Place,
        log: Callable[[str], None],
        directory: Path,
        memory: Path | None,
        partners: Partners | None,
    ):
        self.code: int | None = None
        self.progress_file = directory / "progress.json"
        self._command = command
        self._place = place
        self._log = log
        self._memory = memory
        self._partners = partners
        self._starting: tuple[Start, Thread | None] | None = None
        self._attempt = 0
        self._trainer: TrainerProcess | None = None
        self._line: Line | None = None
        self._downtime = ""
        self._stopped_by = 0

    def join(self, line: Line) -> None:
        """Report over this line to the council from now on."""
        self._line = line
        if self._stopped_by:
            self._report(Stopping(self._stopped_by))

    def handle(self, order: Message) -> None:
        """Follow an order."""
        match order:
            case Start():
                self._attempt = order.attempt
                self._starting = order, self._begin_fetch(order)
            case End() if order.attempt == self._attempt and self._starting is not None:
                self._starting = None
                self._report(Ended(self._attempt, LOST))
            case End() if order.attempt == self._attempt and self._trainer is not None:
                self._trainer.end_within(order.seconds)
            case Finish():
                self.code = order.code
                if order.why:
                    self._log(f"{order.why}; exit code {order.code}")

    def stop(self, number: int) -> None:
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
        """Start the trainer when its memory is ready; report its end, if it has ended."""
        if self._starting is not None:
            order, fetching = self._starting
            if fetching is None or not fetching.is_alive():
                self._starting = None
                self._start(order)
        code = self._take_end()
        if code is not None:
            self._report(Ended(self._attempt, code))

    def _begin_fetch(self, order: Start) -> Thread | None:
        """Return a thread that fetches what this host's memory has lost; None if none is needed."""
        if self._partners is None or not order.memories:
            return None
        return self._partners.begin(order.memories.split(","), order.word)

    def _start(self, order: Start) -> None:
        environment = {"MAXPIPE_ATTEMPT": str(order.attempt), PROGRESS: str(self.progress_file)}
        if order.job:
            environment["MAXPIPE_JOB"] = order.job
        if self._memory is not None:
            environment[MEMORY] = str(self._memory / OWN)
        if self._downtime:
            environment[DOWNTIME] = self._downtime
        if self._place.count > 1:
            host = f"[{self._place.host}]" if ":" in self._place.host else self._place.host
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"{host}:{order.port}",
                "JAX_NUM_PROCESSES": str(self._place.count),
                "JAX_PROCESS_ID": str(self._place.index),
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
        if self._line is not None:
            self._line.send(encode(report))

    def _take_end(self) -> int | None:
        if self._trainer is None or (code := self._trainer.poll()) is None:
            return None
        self._trainer = None
        self._downtime = downtime_variable(read_progress(self.progress_file), time.time())
        if self._place.index > 0:  # the council tells of process 0
            self._log(f"process {self._place.index}: {describe(code)}")
        return code


def supervise(
    command: Sequence[str], place: Place, policy: Policy, log: Callable[[str], None]
) -> int:
    """Keep the trainer of this host running until its run has ended; return the exit code.

    With several hosts, each has a supervisor; that of process 0 holds the council of all. If it is
    lost, the others end their trainers and wait for it to come back.

    Args:
      command: starts the trainer.
      place: of this host in the run.
      policy: when to start again; that of supervisor 0 counts.
      log: takes a line for each event.
    """
    job = job_of_process()[0] or f"{platform.node()} {os.getpid()} {time.time():.0f}"
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="maxpipe-")))
        memory = stack.enter_context(shared_memory())
        signals = stack.enter_context(_signals())
        address, council = (place.host, place.port), None
        if place.index == 0:
            council = Council(place.count, policy, job, free_port=free_port, log=log)
            # A single process, though announced, starts JAX's own coordinator at its port.
            port = place.port if place.count > 1 else 0
            hub = stack.enter_context(_hub(council, port))
            address = ("localhost", hub.port)
        if memory is not None:
            (memory / OWN).mkdir()
        partners = None
        if memory is not None and place.count > 1:
            partners = stack.enter_context(Partners(memory, place.index, place.count))
        supervisor = Supervisor(command, place, log, directory, memory, partners)
        stack.callback(supervisor.end)
        status = _StatusWriter(supervisor.progress_file)

        def greet(host: str) -> Joined:
            # Supervisor 0 reaches itself by an address that the others cannot use.
            reached = place.host if place.index == 0 else host
            served = f"{reached}:{partners.port}" if partners is not None else ""
            return Joined(place.count, platform.node(), served)

        while supervisor.code is None:
            try:
                seconds = policy.wait_seconds
                line = connect(address, place.index, greet, seconds, lambda: bool(signals))
            except LinkLost as error:
                log(f"{error}; exit code {LOST}")
                return LOST
            if line is None:
                return INTERRUPTED if signal.SIGINT in signals else PREEMPTED
            supervisor.join(line)
            try:
                while supervisor.code is None:
                    if signals:
                        supervisor.stop(signals.pop())
                    exchange(line, supervisor.handle, _LOOK_SECONDS)
                    supervisor.look()
                    if council is not None:
                        status.write(council.status)
            except LinkLost as error:
                log(f"the line to supervisor 0 is lost ({error}); ending process {place.index}")
                supervisor.end()
                time.sleep(_RETRY_SECONDS)
            line.close()
        if council is not None:
            status.write(council.status)
        return supervisor.code


def _hub(council: Council, port: int) -> Hub:
    """Return the hub of a council, or raise `ConfigError` if the port is in use."""
    try:
        return Hub(council, port)
    except OSError as error:
        message = f"port {port} of the coordinator's address cannot be used: {error.strerror}"
        raise ConfigError(Problem("", message)) from error


class _StatusWriter:
    """Writes `supervisor.json` into the run's directory when it changes, and now and then.

    Args:
      progress_file: where the trainer tells the run's directory.
    """

    def __init__(self, progress_file: Path):
        self._progress_file = progress_file
        self._run = ""
        self._written = ""
        self._at = 0.0

    def write(self, status: Status) -> None:
        """Write what supervisor 0 knows, if that is due."""
        self._run = self._run or read_progress(self._progress_file).run
        text = json.dumps(asdict(status))
        is_due = text != self._written or time.monotonic() - self._at > _STATUS_SECONDS
        if self._run and is_due:
            self._written, self._at = text, time.monotonic()
            with contextlib.suppress(OSError):
                write_atomically(Path(self._run) / STATUS_FILE, [text.encode()])


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C in a list."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {n: signal.signal(n, receive) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _die_with_parent(parent: int) -> Callable[[], None] | None:
    """Return what a child calls so that Linux kills it when its supervisor dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(*_KILL_WITH_PARENT)
        if os.getppid() != parent:  # dead already
            os._exit(LOST)

    return prepare

"""Supervise the trainer of one host: start it, watch it, end it, as the run's council orders.

Imports no JAX, so that a supervisor costs next to no memory and JAX cannot abort it.
"""

import contextlib
import json
import os
import platform
import resource
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType

from maxpipe.checkpoint.steps import OWN
from maxpipe.config.cli import CONFIG_ERROR
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.terminal import INTERRUPTED
from maxpipe.devices.cluster import WHOLE, Place, Sizes, free_port, job_of_process
from maxpipe.storage.local_files import write_atomically
from maxpipe.supervise.council import Council, Policy, describe
from maxpipe.supervise.ending import LOST, die_with_parent
from maxpipe.supervise.link import Hub, Line, LinkLost, connect, describe_absence
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
from maxpipe.supervise.run_secret import run_secret
from maxpipe.supervise.signals import PREEMPTED, as_passed_on, handling, numbers_to_pass_on

_LOOK_SECONDS = 0.1
_RETRY_SECONDS = 1.0
_STATUS_SECONDS = 5.0
_LAST_STATUS_SECONDS = 10.0  # for the last status to be written
_OTHER_FILES = 64  # that supervisor 0 has open
_STACKS_SECONDS = 5.0  # from SIGABRT, after which a trainer writes its stacks, to SIGKILL


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
            with contextlib.suppress(ProcessLookupError, PermissionError):
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
    """Follows the orders of a council for one host.

    Args:
      command: command line that starts the trainer.
      place: this host's place in the run.
      log: function that receives a line for each event.
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
        self.stopped_by = 0  # the signal that was passed on to the trainer
        self.progress_file = directory / "progress.json"  # written by the trainer
        self._command, self._place, self._log = command, place, log
        self._memory, self._partners = memory, partners
        self._own: Path | None = None  # the trainer's directory in memory
        self._line: Line | None = None
        self._trainer: TrainerProcess | None = None
        self._starting: tuple[Start, threading.Event] | None = None  # waits for lost replicas
        self._attempt = 0
        self._took_part = 0  # the latest attempt in which this supervisor was to take part
        self._downtime = ""
        self._sizes: Sizes | None = None  # the council's, for a council that replaces it

    def greeting(self, host: str) -> Joined:
        """Return the first report; `host` is this host's address on the way to supervisor 0."""
        # Supervisor 0 reaches itself by an address that the others cannot use.
        reached = self._place.host if self._place.index == 0 else host
        served = self._partners.listen(reached) if self._partners is not None else ""
        place, node = self._place, platform.node()
        return Joined(place.count, node, served, self._took_part, place.index)

    def join(self, line: Line) -> None:
        """Report over this line from now on, after the greeting; raises `LinkLost`."""
        self._line = line
        if self._sizes is not None:
            self._report(self._sizes)

    def handle(self, order: Message) -> None:
        """Follow an order."""
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
            case Sizes():
                self._sizes = order
            case Finish():
                self.code = order.code
                if order.why:
                    self._log(f"{order.why}; exit code {order.code}")

    def stop(self, number: int) -> None:
        """Pass a signal that asks to stop on to the trainer, and tell the council."""
        self.stopped_by = number
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
            with contextlib.suppress(OSError):  # reported when the next trainer starts
                hold(self._memory)
        if self._starting is not None and self._starting[1].is_set():
            order, _ = self._starting
            self._starting = None
            self._start(order)
        if (code := self._take_end()) is not None:
            self._report(Ended(self._attempt, code))

    def _prepare(self, order: Start) -> None:
        """Start the trainer; with partners let `look` start it once lost replicas are fetched."""
        if self._place.index not in order.members:
            self._log(f"process {self._place.index} waits: the others go on without it for now")
            if self._partners is not None:
                self._partners.rest()
            return
        # Since it last took part, the others may have gone back, and on from there.
        is_stale = self._took_part != order.previous
        self._took_part = order.attempt
        self._own = None
        if self._memory is not None:
            try:
                hold(self._memory)
                (self._memory / OWN).mkdir(exist_ok=True)
                self._own = self._memory / OWN
            except OSError as error:
                self._log(f"the trainer gets no directory in memory: {error}")
        if self._partners is None:
            self._start(order)
        else:
            memories = dict(zip(order.members, order.memories, strict=False))
            ready = self._partners.begin(memories, order.word, forgets=is_stale)
            self._starting = order, ready

    def _start(self, order: Start) -> None:
        environment = {"MAXPIPE_ATTEMPT": str(order.attempt), PROGRESS: str(self.progress_file)}
        if order.job:
            environment["MAXPIPE_JOB"] = order.job
        if self._own is not None:
            environment[MEMORY] = str(self._own)
        if self._downtime:
            environment[DOWNTIME] = self._downtime
        if self._place.count > 1:
            host = f"[{self._place.host}]" if ":" in self._place.host else self._place.host
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"{host}:{order.port}",
                "JAX_NUM_PROCESSES": str(len(order.members)),
                "JAX_PROCESS_ID": str(order.members.index(self._place.index)),
            }
        if order.whole:
            environment[WHOLE] = order.whole
        self.progress_file.unlink(missing_ok=True)
        try:
            self._trainer = TrainerProcess(self._command, environment)
        except OSError as error:
            self._log(f"cannot start {self._command[0]}: {error.strerror}")
            self._report(Ended(self._attempt, CONFIG_ERROR))
            return
        if self.stopped_by:  # the signal came while the order was on its way
            self._trainer.send(self.stopped_by)

    def _report(self, report: Report) -> None:
        if self._line is not None:
            self._line.send(report)

    def _take_end(self) -> int | None:
        if self._trainer is None or (code := self._trainer.poll()) is None:
            return None
        self._trainer = None
        progress = read_progress(self.progress_file)
        # An attempt without a step counts as part of the restart after the previous one.
        if progress.at or not self._downtime:
            self._downtime = downtime_variable(progress, time.time())
        if self._place.index > 0:  # the council reports on process 0
            self._log(f"process {self._place.index}: {describe(code)}")
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
    """
    job = job_of_process()[0] or f"{platform.node()} {os.getpid()} {time.time():.0f}"
    secret = run_secret(command, place.count)
    with contextlib.ExitStack() as stack:
        # First, so that no signal leaves the memory behind.
        signals = stack.enter_context(_signals())
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
        return _follow(supervisor, place, address, secret, policy.wait_seconds, signals, log)


def _follow(
    supervisor: Supervisor,
    place: Place,
    address: tuple[str, int],
    secret: str,
    wait_seconds: float,
    signals: list[int],
    log: Callable[[str], None],
) -> int:
    """Let a supervisor that has not joined follow the council; return the exit code.

    `signals` receives signals that ask to stop, as they come.
    """

    def is_stopped() -> bool:
        return bool(signals or supervisor.stopped_by)

    until = time.monotonic() + wait_seconds
    while supervisor.code is None:
        try:
            line = connect(address, secret, supervisor.greeting, until, is_stopped, log)
        except LinkLost as error:
            log(f"{error}; exit code {LOST}")
            return LOST
        if line is None:
            is_interrupted = signal.SIGINT in (*signals, supervisor.stopped_by)
            return INTERRUPTED if is_interrupted else PREEMPTED
        try:
            supervisor.join(line)
            while supervisor.code is None:
                if signals:
                    supervisor.stop(signals.pop())
                line.exchange(supervisor.handle, _LOOK_SECONDS)
                supervisor.look()
        except LinkLost as error:
            log(f"the line to supervisor 0 is lost ({error}); ending process {place.index}")
            supervisor.end()
            if line.is_answered:
                until = time.monotonic() + wait_seconds
            elif time.monotonic() > until:
                log(f"{describe_absence(address, str(error))}; exit code {LOST}")
                return LOST
            time.sleep(_RETRY_SECONDS)
        line.close()
    return supervisor.code


def _hub(council: Council, place: Place, secret: str) -> Hub:
    """Return the hub of a council; raises ConfigError if its port is in use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1 without a limit
    needed = place.count + _OTHER_FILES  # a line to each supervisor
    if 0 <= soft < needed:
        most = needed if hard < 0 else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
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


@contextlib.contextmanager
def _writing_status(council: Council, progress: Callable[[], Progress]) -> Iterator[None]:
    """Write `supervisor.json` into the run's directory when the status changes, and now and then.

    A thread does so: a file system may stall for longer than the other supervisors tolerate
    silence.
    """
    closed = threading.Event()

    def serve() -> None:
        run, written, at = "", "", 0.0
        is_last = False
        while not is_last:
            is_last = closed.wait(_LOOK_SECONDS)
            run = run or progress().run
            text = json.dumps(asdict(council.status))
            now = time.monotonic()
            if run and (text != written or now - at > _STATUS_SECONDS):
                written, at = text, now
                with contextlib.suppress(OSError):
                    write_atomically(Path(run) / STATUS_FILE, [text.encode()])

    thread = threading.Thread(target=serve, name="status", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closed.set()
        thread.join(_LAST_STATUS_SECONDS)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect signals that ask to stop in a list, converted by `as_passed_on`."""
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(as_passed_on(number))

    with handling(numbers_to_pass_on(), receive):
        yield received

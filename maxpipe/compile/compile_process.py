"""Compile a configuration in a process of its own, and read what the compiler says."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from maxpipe.compile import DOES_NOT_FIT, FITS
from maxpipe.compile.step import growing_silences
from maxpipe.config.catalog import ENGINES
from maxpipe.config.imports import import_words
from maxpipe.config.terminal import Note
from maxpipe.plan.search.candidate import Proof
from maxpipe.plan.search.seconds import Seconds
from maxpipe.storage.records import read_record
from maxpipe.supervise.ending import die_with_parent
from maxpipe.supervise.signals import handling, numbers_to_pass_on


def compile_configuration(yaml_text: str, note: Note, imports: Sequence[str] = ()) -> Proof:
    """Return what the compiler says about a configuration.

    Args:
      yaml_text: the complete configuration.
      note: function that prints a line now and then.
      imports: modules with the user's own variants.
    """
    with tempfile.TemporaryDirectory(prefix="maxpipe_plan_") as directory:
        file = Path(directory, "candidate.yml")
        file.write_text(yaml_text, encoding="utf-8")
        return compile_command([str(file), *import_words(imports)], note)


def compile_command(
    words: Sequence[str], note: Note, environment: Mapping[str, str] | None = None
) -> Proof:
    """Return what the compiler says about a command line.

    Args:
      words: the command line after the command.
      note: function that prints a line now and then.
      environment: variables in addition to those of this process.
    """
    started = time.perf_counter()
    report = report_of(words, note, environment)
    took = time.perf_counter() - started
    if isinstance(report, str):
        return Proof(None, None, False, f"not compiled: {report}", took)
    return _read(report, took)


def report_of(
    words: Sequence[str], note: Note, environment: Mapping[str, str] | None = None
) -> dict[str, object] | str:
    """Run `maxpipe.compile` in a process, and return its JSON report; or why there is none.

    Args:
      words: the command line after the command.
      note: function that prints a line now and then.
      environment: variables in addition to those of this process.
    """
    with tempfile.TemporaryDirectory(prefix="maxpipe_compile_") as directory:
        report, log = Path(directory, "report.json"), Path(directory, "log")
        command = [sys.executable, "-m", "maxpipe.compile", *words, "--json", str(report)]
        variables = {**os.environ, **(environment or {})}
        with log.open("wb") as output:
            code = _exit_code(command, variables, output, note)
        if code == -signal.SIGKILL:
            return "the compiler was ended by SIGKILL; this machine may have too little memory"
        if code not in (FITS, DOES_NOT_FIT) or not report.exists():
            problem = _last_problem(log.read_text(encoding="utf-8", errors="replace"))
            if code < 0:
                return f"the compiler was ended by {signal.Signals(-code).name}: {problem}"
            return problem
        return read_record(report, dict[str, object])


def _exit_code(
    command: Sequence[str], environment: Mapping[str, str], output: BinaryIO, note: Note
) -> int:
    """Run a command and return its exit code; stop it if a signal asks this process to stop.

    Raises:
      KeyboardInterrupt, SystemExit: such a signal came; only the main thread notices signals.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with _ending(processes) as told:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=die_with_parent(os.getpid()),
        )
        processes.append(process)
        try:
            if told:  # while the process was being started
                process.terminate()
            code = _wait(process, note)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if told:
        raise KeyboardInterrupt if told[0] == signal.SIGINT else SystemExit(128 + told[0])
    return code


def _wait(process: "subprocess.Popen[bytes]", note: Note) -> int:
    began, silences = time.perf_counter(), growing_silences()
    while True:
        try:
            return process.wait(next(silences))
        except subprocess.TimeoutExpired:
            note(f"            for {time.perf_counter() - began:.0f} s")


@contextmanager
def _ending(processes: "Sequence[subprocess.Popen[bytes]]") -> Iterator[list[int]]:
    """Terminate processes at the first signal that asks this one to stop; kill them at the second.

    Yields the list of the signals that have come so far.

    The handler raises nothing: an exception just after `Popen.wait` has taken its lock would leave
    it locked, and whoever waits for the process next would wait forever.
    """
    told: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        told.append(number)
        for process in processes:
            (process.terminate if len(told) == 1 else process.kill)()

    if threading.current_thread() is not threading.main_thread():
        yield told
        return
    heard = [n for n in numbers_to_pass_on() if signal.getsignal(n) != signal.SIG_IGN]
    with handling(heard, end):
        yield told


def _read(report: dict[str, object], took: float) -> Proof:
    memory, seconds = report["memory"], report["predicted_step_seconds"]
    assert isinstance(memory, dict)
    needed, fits = float(memory["needed_bytes"]), bool(report["fits"])
    if not seconds:
        return Proof(needed, None, fits, "", took)
    step = float(str(seconds))
    return Proof(needed, step, fits, "", took, _parts(report, step))


def _parts(report: dict[str, object], step: float) -> Seconds:
    """Return the parts of a compiled step that takes `step` seconds.

    The bubble is the time of idle slots; where their operations cannot be told from others, as on
    the circular engine, it is estimated by their share of all slots. In a step of one program, the
    same share of the time spent waiting for collectives is part of the bubble.
    """
    predicted = report["predicted"]
    assert isinstance(predicted, dict)
    bubble = predicted["bubble"]
    if bubble is None:
        bubble = float(str(report["bubble"] or 0.0)) * step
    communication = float(predicted["parts"]["collectives"])
    if ENGINES[str(report["engine"])].one_program:
        communication *= 1 - bubble / step
    return Seconds(step - communication - bubble, communication, bubble)


def _last_problem(text: str) -> str:
    """Return the first configuration error in full, since the remedy is at its end.

    Without one, return the start of the compiler's failed check, or else of the last line.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if problem := next((line for line in lines if line.startswith("config error")), None):
        return problem
    if failure := next((line for line in lines if "Check failed" in line), None):
        return failure[:200]
    return lines[-1][:200] if lines else "no output"

"""Compile a configuration in a process of its own, and read what the compiler says."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxpipe.compile import DOES_NOT_FIT, FITS
from maxpipe.compile.step import progress
from maxpipe.config.catalog import ENGINES
from maxpipe.config.imports import import_words
from maxpipe.config.terminal import Note
from maxpipe.plan.number import Seconds
from maxpipe.plan.search.candidate import Proof
from maxpipe.storage.records import read_record
from maxpipe.supervise.ending import die_with_parent, handling


def compile_configuration(yaml_text: str, note: Note, imports: Sequence[str] = ()) -> Proof:
    """Return what the compiler says about a complete configuration."""
    with tempfile.TemporaryDirectory(prefix="maxpipe_plan_") as directory:
        file = Path(directory, "candidate.yml")
        file.write_text(yaml_text, encoding="utf-8")
        return compile_command([str(file), *import_words(imports)], note)


def compile_command(
    words: Sequence[str], note: Note, environment: Mapping[str, str] | None = None
) -> Proof:
    """Return what the compiler says about a command line of `maxpipe.compile`.

    Args:
      words: the command line after the command.
      environment: variables in addition to those of this process.
    """
    started = time.perf_counter()
    with (
        # At SIGTERM, too, the compiler ends and its files are removed.
        handling([signal.SIGTERM], lambda number, _: sys.exit(128 + number)),
        tempfile.TemporaryDirectory(prefix="maxpipe_compile_") as directory,
    ):
        report, log = Path(directory, "report.json"), Path(directory, "log")
        command = [sys.executable, "-m", "maxpipe.compile", *words, "--json", str(report)]
        with log.open("wb") as output, progress("", note):
            code = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                preexec_fn=die_with_parent(os.getpid()),
            ).returncode
        took = time.perf_counter() - started
        if code in (FITS, DOES_NOT_FIT):
            return proof_of(read_record(report, dict[str, object]), took)
        failure = _last_problem(log.read_text(encoding="utf-8", errors="replace"))
    if code == -signal.SIGKILL:
        failure = "the compiler was ended by SIGKILL; this machine may have too little memory"
    elif code < 0:
        failure = f"the compiler was ended by {signal.Signals(-code).name}: {failure}"
    return Proof(None, None, False, f"not compiled: {failure}", took)


def proof_of(report: dict[str, object], took: float) -> Proof:
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
    """Return the first configuration error, the start of a failed check, or of the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if problem := next((line for line in lines if line.startswith("config error")), None):
        return problem
    if failure := next((line for line in lines if "Check failed" in line), None):
        return failure[:200]
    return lines[-1][:200] if lines else "no output"

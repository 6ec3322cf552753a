"""Prove the best rows of a plan: compile each in a process of its own, and rank them again."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from maxpipe.compiling.step import PROGRESS_SECONDS
from maxpipe.devices.chips import GIB
from maxpipe.planning.search.plan import Plan
from maxpipe.planning.search.rows import Proof, Row, with_reasons
from maxpipe.planning.search.written import file_text

FITS, DOES_NOT_FIT = 0, 3  # exit codes of maxpipe.compile
Note = Callable[[str], None]


def prove(plan: Plan, count: int, note: Note) -> Plan:
    """Compile the first rows until so many fit, and the user's own configuration.

    Args:
      plan: with at least one row.
      count: rows that shall fit; at most twice as many are compiled.
      note: prints a line.

    Returns:
      The plan with the proved rows first, by the compiler's prediction. Rows that were not compiled
      follow, and those that do not fit come last.
    """
    rows = [*plan.rows]
    proved: list[Row] = []
    for number, row in enumerate(rows[: 2 * count], 1):
        proved.append(_proved(plan, row, f"{number} of up to {min(2 * count, len(rows))}", note))
        if sum(_is_proof(row) for row in proved) == count:
            break
    own = plan.own
    if isinstance(own, Row):
        own = _proved(plan, own, own.name, note)
    good = [row for row in proved if _is_proof(row)]
    bad = [row for row in proved if not _is_proof(row)]
    if not good:
        return replace(plan, rows=(), misfits=bad, own=own)
    ranked = with_reasons(good, plan.request)
    unproved = [
        replace(row, reason=f"not compiled; by closed forms {row.reason or 'the fastest'}")
        for row in rows[len(proved) :]
    ]
    return replace(plan, rows=[*ranked, *unproved], misfits=[*plan.misfits, *bad], own=own)


def _is_proof(row: Row) -> bool:
    return row.proof is not None and row.proof.fits and row.proof.seconds is not None


def _proved(plan: Plan, row: Row, title: str, note: Note) -> Row:
    """Return the row with what the compiler says."""
    candidate = row.candidate
    note(
        f"compiling   {title}: {candidate.mesh_text()} {candidate.schedule_text()}, by closed "
        f"forms {row.seconds:.3g} s and {row.memory / GIB:.3g} GiB"
    )
    proof = compile_configuration(file_text(plan, row, ()), note)
    if proof.failure:
        note(f"            {proof.failure}")
    elif proof.memory is not None:
        seconds = "no step time" if proof.seconds is None else f"{proof.seconds:.4g} s"
        fits = "fits" if proof.fits else "does NOT fit"
        note(f"            {fits}: {seconds}, {proof.memory / GIB:.3g} GiB, {_took(proof)}")
    reason = proof.failure or ("" if proof.fits else _too_much(proof))
    return replace(row, proof=proof, reason=reason)


def compile_configuration(yaml_text: str, note: Note) -> Proof:
    """Run `maxpipe.compile` on a configuration in a process of its own.

    Args:
      yaml_text: the configuration, complete.
      note: prints a line every now and then.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="maxpipe_plan_") as directory:
        file, report = Path(directory, "candidate.yml"), Path(directory, "report.json")
        file.write_text(yaml_text, encoding="utf-8")
        words = [sys.executable, "-m", "maxpipe.compile", str(file), "--json", str(report)]
        log = Path(directory, "log")
        with log.open("wb") as output:
            code = _wait(subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT), note)
        took = time.perf_counter() - started
        if code not in (FITS, DOES_NOT_FIT) or not report.exists():
            text = log.read_text(encoding="utf-8", errors="replace")
            return Proof(None, None, False, f"not compiled: {_last_problem(text)}", took)
        return _read(json.loads(report.read_text(encoding="utf-8")), took)


def _wait(process: "subprocess.Popen[bytes]", note: Note) -> int:
    """Return the exit code; a process is not left behind when this one is interrupted."""
    began = time.perf_counter()
    try:
        while True:
            try:
                return process.wait(PROGRESS_SECONDS)
            except subprocess.TimeoutExpired:
                note(f"            for {time.perf_counter() - began:.0f} s")
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _read(report: dict[str, object], took: float) -> Proof:
    memory, seconds = report["memory"], report["predicted_step_seconds"]
    assert isinstance(memory, dict)
    needed = float(memory["needed_bytes"])
    return Proof(needed, float(str(seconds)) if seconds else None, bool(report["fits"]), "", took)


def _last_problem(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    problems = [line for line in lines if line.startswith("config error")]
    return next(iter([*problems, *reversed(lines)]), "no output")[:200]


def _too_much(proof: Proof) -> str:
    assert proof.memory is not None
    return f"does not fit: the compiler needs {proof.memory / GIB:.3g} GiB"


def _took(proof: Proof) -> str:
    return f"compiled in {proof.compiled_in:.0f} s"


def is_provable(plan: Plan) -> bool:
    """Return whether a compiler for the machine is at hand."""
    return plan.request.machine.is_compilable and bool(plan.rows)

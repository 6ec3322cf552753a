"""Prove the best rows of a plan: compile each in a process of its own, and rank them again."""

from collections.abc import Sequence
from dataclasses import replace

from maxpipe.compile.compile_process import compile_configuration
from maxpipe.compile.step import UNREADABLE
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.terminal import Note
from maxpipe.devices.chips import GIB
from maxpipe.plan.search.best import Plan, with_misfit_reasons
from maxpipe.plan.search.candidate import Row, loss_of, with_reasons
from maxpipe.plan.search.written import BASES, file_text

# By how much closed forms may misjudge one engine against another, as a share of a step.
ENGINES_APART = 0.2


def prove(plan: Plan, count: int, note: Note) -> Plan:
    """Compile the finalists until `count` of them fit, and the user's own configuration.

    At most twice as many are compiled. The result has the proved rows first, by the compiler's
    prediction; rows that were not compiled follow, and those that do not fit are among its misfits.
    It is the plan as it was if JAX cannot read what this libtpu compiles, as with any row.

    Raises:
      ConfigError: none of the rows could be compiled.
    """
    rows = finalists(plan.rows) if count > 1 else [*plan.rows]
    proved: list[Row] = []
    for number, row in enumerate(rows[: 2 * count], 1):
        proved.append(_proved(plan, row, f"{number} of up to {min(2 * count, len(rows))}", note))
        failure = proved[-1].proof.failure if proved[-1].proof else ""
        if UNREADABLE in failure or sum(_fits(row) for row in proved) == count:
            break
    good = [row for row in proved if _fits(row)]
    bad = [row for row in proved if not _fits(row)]
    failures = [row.proof.failure for row in bad if row.proof and row.proof.failure]
    if not good and failures and UNREADABLE in failures[-1]:
        note("            nothing more is compiled: the plan is by closed forms")
        return plan
    if not good and failures and len(failures) == len(bad):
        raise ConfigError(Problem("--compile", failures[0]))
    own = plan.own
    if isinstance(own, Row):
        own = _proved(plan, own, own.name, note)
    tried = {id(row) for row in rows[: len(proved)]}
    uncompiled = [row for row in plan.rows if id(row) not in tried]
    if not good:
        return replace(plan, rows=(), misfits=bad, own=own, uncompiled=len(uncompiled))
    ranked = with_reasons(good, plan.request)
    uncompiled = [replace(row, reason=loss_of(row, ranked[0])) for row in uncompiled]
    if isinstance(own, Row) and _fits(own):
        own = replace(own, reason=loss_of(own, ranked[0]))
    return replace(
        plan,
        rows=[*ranked, *uncompiled],
        misfits=[*with_misfit_reasons(plan.misfits, ranked[0], plan.request), *bad],
        own=own,
        uncompiled=len(uncompiled),
    )


def finalists(rows: Sequence[Row]) -> list[Row]:
    """Return ranked rows in the order in which they are compiled.

    The second one is the best of another engine, if it is less than `ENGINES_APART` slower: closed
    forms err alike on rows of one engine, so its next rows would be no second opinion. For the same
    reason a row that differs from a better one only in its loop over layers comes after all others
    that are as near.
    """
    best, *others = rows
    limit = (1 + ENGINES_APART) * best.per_sequence
    engine = best.candidate.engine
    second = next((row for row in others if row.candidate.engine != engine), None)
    near, twins, far = [best], [], []
    if second is not None and second.per_sequence < limit:
        near.append(second)
        others = [row for row in others if row is not second]
    for row in others:
        if row.per_sequence >= limit:
            far.append(row)
        elif any(row.candidate.is_twin(better.candidate) for better in near):
            twins.append(row)
        else:
            near.append(row)
    return [*near, *twins, *far]


def _fits(row: Row) -> bool:
    return row.proof is not None and row.proof.fits


def _proved(plan: Plan, row: Row, title: str, note: Note) -> Row:
    candidate = row.candidate
    note(
        f"compiling   {title}: {candidate.mesh_text()} {candidate.schedule_text()}, by "
        f"{BASES[row.basis]} {row.seconds:.3g} s and {row.memory / GIB:.3g} GiB"
    )
    proof = compile_configuration(file_text(plan, row, ()), note, plan.request.imports)
    if proof.failure:
        note(f"            {proof.failure}")
    elif proof.memory is not None:
        seconds = "no step time" if proof.seconds is None else f"{proof.seconds:.4g} s"
        fits = "fits" if proof.fits else "does NOT fit"
        took = f"compiled in {proof.compiled_in:.0f} s"
        note(f"            {fits}: {seconds}, {proof.memory / GIB:.3g} GiB, {took}")
    reason = proof.failure
    if not reason and not proof.fits:
        assert proof.memory is not None
        needed = f"{proof.memory / GIB:.3g} GiB"
        reason = f"does not fit: the program needs {needed}, says the compiler"
    return replace(row, proof=proof, reason=reason)

"""Rank the best rows of a plan by probes: compiled units in place of their closed forms."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from maxpipe.compile import probe_process
from maxpipe.compile.probe_process import Answer, probe_figures, stored_figures
from maxpipe.compile.units import TooLarge
from maxpipe.config.errors import ConfigError
from maxpipe.config.terminal import Note
from maxpipe.devices.chips import GIB
from maxpipe.plan.search.plan import Plan, with_misfit_reasons
from maxpipe.plan.search.probes import Probing
from maxpipe.plan.search.rows import Probed, Row, fits, loss_of, with_reasons

ROWS = 20  # how many of the best by closed forms are probed
_BAR = 20  # characters


def probe(plan: Plan, count: int, cache_dir: Path | None, note: Note) -> Plan:
    """Compile the probes of the first rows, and rank all rows again.

    Args:
      plan: a plan with at least one row.
      count: most probes to compile; those in the cache do not count.
      cache_dir: directory of the compilation cache, where figures are kept; None to keep none.
      note: function that prints a line.

    Returns:
      The plan with its rows ranked by their probes, and those without one by closed forms times
      the median ratio of probed seconds to closed-form seconds. Rows that do not fit by their
      probes are among the misfits; there may be no rows left.
    """
    head = plan.rows[:ROWS]
    probings = [_probing(plan, row) for row in head]
    wanted = {p.text: p for p in probings if isinstance(p, Probing)}
    if reasons := Counter(p for p in probings if isinstance(p, str)):
        reason, number = reasons.most_common(1)[0]
        note(f"probing     {number} of {len(head)} rows have no probe: {reason}")
    if not wanted:
        return plan
    cache = probe_process.figures_directory(cache_dir, plan.request.imports)
    answers: dict[str, Answer] = {
        text: figures for text, p in wanted.items() if (figures := stored_figures(p.probe, cache))
    }
    missing = [p for text, p in wanted.items() if text not in answers]
    answers |= _compiled(missing[:count], cache, note, plan.request.imports)
    answers |= {p.text: f"--probe {count} left it out" for p in missing[count:]}
    rows = [_probed(row, p, answers) for row, p in zip(head, probings, strict=True)]
    rows += [replace(row, unprobed=f"not among the {ROWS} best") for row in plan.rows[ROWS:]]
    return _ranked(plan, rows)


def _ranked(plan: Plan, rows: Sequence[Row]) -> Plan:
    """Return the plan with these rows ranked, probed or not."""
    ratios = [
        float(row.probed.seconds.step / row.candidate.seconds.step)
        for row in rows
        if row.probed and row.probed.seconds
    ]
    scale = statistics.median(ratios) if ratios else 1.0
    rows = [row if row.probed else replace(row, scale=scale) for row in rows]
    ranked = with_reasons([row for row in rows if fits(row, plan.request)], plan.request)
    too_large = [row for row in rows if not fits(row, plan.request)]
    own = plan.own
    if isinstance(own, Row):
        own = replace(own, scale=scale)  # no other row shares its probe
        if ranked and fits(own, plan.request):
            own = replace(own, reason=loss_of(own, ranked[0]))
    misfits = [replace(row, scale=scale) for row in plan.misfits]
    if ranked:
        misfits = with_misfit_reasons(misfits, ranked[0], plan.request)
    return replace(plan, rows=ranked, misfits=[*misfits, *too_large], own=own)


def _probing(plan: Plan, row: Row) -> Probing | str:
    """Return how a row is probed; or why it is not."""
    if not row.candidate.has_stages:
        return "without stages, compiling the step takes no longer than a probe"
    try:
        return Probing(row.config, plan.facts, plan.request.machine)
    except ConfigError as error:
        return str(error.problems[0])


def _compiled(
    probings: Sequence[Probing], cache: Path | None, note: Note, imports: Sequence[str]
) -> dict[str, Answer]:
    """Compile probes one by one, and return the compiler's answers by the probes' text."""
    if not probings:
        return {}
    if cache and (reason := probe_process.unwritable(cache)):
        note(f"probing     figures are not kept: cannot write to {cache}: {reason}")
    answers: dict[str, Answer] = {}
    started = time.perf_counter()
    total, failed = len(probings), 0
    for number, wanted in enumerate(probings):
        spent = time.perf_counter() - started
        left = f", about {_time(spent / number * (total - number))} left" if number else ""
        note(f"probing     [{progress_bar(number, total)}] {number} of {total}{left}")
        answer = answers[wanted.text] = probe_figures(wanted.probe, cache, note, imports)
        if isinstance(answer, str | TooLarge):
            failed += 1
            note(f"            {_too_much(answer) if isinstance(answer, TooLarge) else answer}")
    took = _time(time.perf_counter() - started)
    note(f"probing     [{progress_bar(1, 1)}] {total - failed} of {total} in {took}")
    return answers


def progress_bar(done: int, total: int) -> str:
    """Return a bar of `_BAR` characters."""
    filled = _BAR * done // total
    return "#" * filled + "." * (_BAR - filled)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"


def _probed(row: Row, probing: Probing | str, answers: Mapping[str, Answer]) -> Row:
    """Return a row with the figures of its probe, or with the reason why it has none."""
    answer = probing if isinstance(probing, str) else answers[probing.text]
    if isinstance(answer, TooLarge):
        return replace(row, probed=Probed(answer.needed, None), reason=_too_much(answer))
    if isinstance(answer, str) or isinstance(probing, str):
        return replace(row, unprobed=str(answer))
    try:
        probed = Probed(probing.memory(answer), probing.seconds(answer))
    except ValueError as error:  # such as a schedule that cannot be simulated
        return replace(row, unprobed=str(error))
    # Where it fits, ranking replaces this.
    return replace(row, probed=probed, reason="does not fit by its probe")


def _too_much(unit: TooLarge) -> str:
    return f"does not fit: {unit.name} of its probe needs {unit.needed / GIB:.3g} GiB"

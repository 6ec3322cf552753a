"""Rank the best rows of a plan by probes: compiled units in the place of their closed forms."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from maxpipe.compiling.compile_process import Note
from maxpipe.compiling.probe_process import Figures, probe_figures, stored_figures
from maxpipe.config.errors import ConfigError
from maxpipe.planning.search.plan import Plan
from maxpipe.planning.search.probes import Probe, Probing
from maxpipe.planning.search.rows import Probed, Row, fits, with_reasons

ROWS = 20  # of the best by closed forms
_BAR = 20  # characters


def probe(plan: Plan, count: int, cache_dir: Path | None, note: Note) -> Plan:
    """Compile the probes of the first rows, and rank the rows that have one.

    Args:
      plan: with at least one row.
      count: probes to compile at most; what the cache has is no compilation.
      cache_dir: of the compilation cache, in which figures are kept; None to keep none.
      note: prints a line.

    Returns:
      The plan with the probed rows first. What has no probe follows in its order, and what does
      not fit by its probe is among the misfits.
    """
    cache = cache_dir / "probes" if cache_dir else None
    probings = {n: p for n, row in enumerate(plan.rows[:ROWS]) if (p := _probing(plan, row))}
    known = _known(probings, cache)
    missing = [p.probe for p in probings.values() if p.probe.text() not in known]
    figures = known | _compiled(_distinct(missing)[:count], cache, note)
    probed = [
        _probed(row, probings.get(number), figures) for number, row in enumerate(plan.rows[:ROWS])
    ]
    own = plan.own
    if isinstance(own, Row):
        # Its probe is not compiled for its own sake: it may be one of the others'.
        own = _probed(own, _probing(plan, own), figures)
    first = [row for row in probed if row.probed and fits(row, plan.request)]
    if not first:
        return replace(plan, own=own)
    ranked = with_reasons(first, plan.request)
    unprobed = [
        replace(row, reason=f"{row.reason or 'the fastest'}; not probed")
        for row in [*(row for row in probed if not row.probed), *plan.rows[ROWS:]]
    ]
    too_large = [
        replace(row, reason="does not fit by its probe")
        for row in probed
        if row.probed and not fits(row, plan.request)
    ]
    return replace(plan, rows=[*ranked, *unprobed], misfits=[*plan.misfits, *too_large], own=own)


def _probing(plan: Plan, row: Row) -> Probing | None:
    """Return how a row is probed; None if its chunk does not run on the mpmd engine."""
    try:
        return Probing(row.config, plan.facts, plan.request.machine)
    except ConfigError:
        return None


def _known(probings: Mapping[int, Probing], cache: Path | None) -> dict[str, Figures]:
    """Return the figures that the cache has, by the text of their probe."""
    stored = {p.probe.text(): stored_figures(p.probe, cache) for p in probings.values()}
    return {text: figures for text, figures in stored.items() if figures}


def _distinct(probes: list[Probe]) -> list[Probe]:
    """Return each probe once, those that the fastest rows need first."""
    return [*{probe.text(): probe for probe in probes}.values()]


def _compiled(probes: list[Probe], cache: Path | None, note: Note) -> dict[str, Figures]:
    """Compile probes one by one; those that fail are left out, with a line on the reason."""
    figures: dict[str, Figures] = {}
    started = time.perf_counter()
    for number, wanted in enumerate(probes):
        left = ""
        if number:
            spent = time.perf_counter() - started
            left = f", about {spent / number * (len(probes) - number) / 60:.0f} min left"
        note(f"probing     [{progress_bar(number, len(probes))}] {number} of {len(probes)}{left}")
        answer = probe_figures(wanted, cache, note)
        if isinstance(answer, str):
            note(f"            not probed: {answer}")
        else:
            figures[wanted.text()] = answer
    if probes:
        took = time.perf_counter() - started
        note(f"probing     [{progress_bar(1, 1)}] {len(figures)} of {len(probes)} in {took:.0f} s")
    return figures


def progress_bar(done: int, total: int) -> str:
    """Return a bar of `_BAR` characters."""
    filled = _BAR * done // total
    return "#" * filled + "." * (_BAR - filled)


def _probed(row: Row, probing: Probing | None, figures: Mapping[str, Figures]) -> Row:
    """Return a row with its probe, if there are figures of that."""
    if probing is None or probing.probe.text() not in figures:
        return row
    of_units = figures[probing.probe.text()]
    return replace(row, probed=Probed(probing.memory(of_units), probing.seconds(of_units)))

"""Compile the units of a probe in a process of its own, and cache their time and memory on disk.

A file of the cache is named after everything that determines its figures: the configuration of the
probe, with shapes, sharding and chip; the units; the code of maxpipe; the versions of JAX, jaxlib
and libtpu; and the environment variables that they read. Files of other versions are never read,
and may be removed at any time. If a user's own variants are imported nothing is cached, since no
name reflects their code.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

from maxpipe.compile.compile_process import report_of, written
from maxpipe.compile.units import TooLarge
from maxpipe.config.imports import ENTRY_POINTS, import_words
from maxpipe.config.terminal import Note
from maxpipe.devices.agreement import source_digest
from maxpipe.plan.search.probes import Probe, UnitFigures
from maxpipe.plan.search.written import versions

Figures: TypeAlias = Mapping[str, UnitFigures]
Answer: TypeAlias = Figures | TooLarge | str  # of a compiler; a str says why there is none

_VARIABLES = ("JAX_", "XLA_", "LIBTPU_", "TPU_LIBRARY_PATH")  # prefixes of names


def probe_figures(
    probe: Probe, cache: Path | None, note: Note, imports: Sequence[str] = ()
) -> Answer:
    """Return the figures of a probe's units by name, the unit that does not fit, or a reason.

    Args:
      probe: what to compile.
      cache: directory of the cache; None to keep nothing.
      note: function that prints a line now and then.
      imports: modules with the user's own variants.
    """
    if stored := stored_figures(probe, cache):
        return stored
    words = ["--units", ",".join(probe.units), *import_words(imports)]
    with written(probe.text()) as file:
        report = report_of([file, *words], note)
    if isinstance(report, str):
        return report
    figures = _answer(report)
    if cache is not None and isinstance(figures, Mapping):
        content = {name: unit._asdict() for name, unit in figures.items()}
        _write(cache / f"{fingerprint(probe)}.json", content)
    return figures


def figures_directory(cache_dir: Path | None, imports: Sequence[str]) -> Path | None:
    """Return the directory of figures in the compilation cache; None if they are not kept."""
    has_own_variants = bool(imports or metadata.entry_points(group=ENTRY_POINTS))
    return None if cache_dir is None or has_own_variants else cache_dir / "probes"


def unwritable(cache: Path) -> str:
    """Make a directory if needed, and return why it cannot be written to; "" if it can."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def stored_figures(probe: Probe, cache: Path | None) -> Figures | None:
    """Return the figures of a probe from the cache; None if it has none."""
    if cache is None:
        return None
    try:
        text = (cache / f"{fingerprint(probe)}.json").read_text(encoding="utf-8")
        stored = {
            name: UnitFigures(*(_figure(unit[field]) for field in UnitFigures._fields))
            for name, unit in json.loads(text).items()
        }
    except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError):
        return None  # missing or damaged: it is compiled anew
    return stored if set(stored) == set(probe.units) else None


def fingerprint(probe: Probe) -> str:
    """Return a digest of everything that determines the figures of a probe."""
    variables = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_VARIABLES))
    made_with = [versions(), metadata.version("jaxlib"), source_digest()]
    parts = [probe.text(), *probe.units, *made_with, *variables]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _figure(value: object) -> float:
    """Return a number read from the cache.

    Raises:
      ValueError: it is not a finite number of at least 0.
    """
    number = float(str(value))
    if not math.isfinite(number) or number < 0:
        raise ValueError(value)
    return number


def _answer(report: Mapping[str, object]) -> Answer:
    if isinstance(too_large := report["too_large"], Mapping):
        return TooLarge(**too_large)
    units = report["units"]
    assert isinstance(units, list)
    if unknown := [reason for unit in units for reason in unit["unknown"]]:
        return unknown[0]
    return {u["name"]: UnitFigures(u["seconds"], float(u["working_bytes"])) for u in units}


def _write(file: Path, content: object) -> None:
    """Write a file of the cache if possible; without it the next plan only takes longer."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=file.parent) as scratch:
            whole = Path(scratch, file.name)
            whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            whole.replace(file)

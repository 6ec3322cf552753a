"""Compile the units of a probe in a process of its own, and keep what they take and need on disk.

A file of the cache is named after all that its figures follow from: the configuration of the probe,
which has shapes, sharding and chip; the units; the versions of maxpipe, JAX and libtpu; and the
flags of the compiler. Files of another version are never read, and may be removed at any time.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from maxpipe.compiling.compile_process import Note, run_compile
from maxpipe.planning.search.probes import Probe, UnitFigures
from maxpipe.planning.search.written import versions

Figures = Mapping[str, UnitFigures]

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_OPTIMIZATION_LEVEL")


def probe_figures(probe: Probe, cache: Path | None, note: Note) -> Figures | str:
    """Return the figures of a probe's units by name, or why there are none.

    Args:
      probe: what to compile.
      cache: directory; None to keep nothing.
      note: prints a line every now and then.
    """
    file = None if cache is None else cache / f"{fingerprint(probe)}.json"
    if stored := stored_figures(probe, cache):
        return stored
    report = run_compile(probe.text(), ["--units", ",".join(probe.units)], note)
    if isinstance(report, str):
        return report
    figures = _figures(report)
    if isinstance(figures, str):
        return figures
    if file is not None:
        _write(file, {name: unit._asdict() for name, unit in figures.items()})
    return figures


def stored_figures(probe: Probe, cache: Path | None) -> Figures | None:
    """Return the figures of a probe from the cache; None if it has none."""
    if cache is None:
        return None
    try:
        text = (cache / f"{fingerprint(probe)}.json").read_text(encoding="utf-8")
        stored = {name: UnitFigures(**unit) for name, unit in json.loads(text).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None  # not there, or not whole: it is compiled anew
    return stored if set(stored) == set(probe.units) else None


def fingerprint(probe: Probe) -> str:
    """Return a digest of all that the figures of a probe follow from."""
    flags = [f"{name}={os.environ.get(name, '')}" for name in _FLAGS]
    parts = [probe.text(), *probe.units, versions(), *flags]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _figures(report: Mapping[str, object]) -> Figures | str:
    units = report["units"]
    assert isinstance(units, list)
    if unknown := [reason for unit in units for reason in unit["unknown"]]:
        return unknown[0]
    return {u["name"]: UnitFigures(u["seconds"], float(u["working_bytes"])) for u in units}


def _write(file: Path, content: object) -> None:
    """Write a file of the cache; without it the next plan only takes longer."""
    whole = file.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        whole.replace(file)

"""Decide which candidates are legal, before a configuration is built.

The configuration's own rules decide whether a mesh, or an engine with its options, is legal, once
each. What depends on several numbers at once is decided here, for arrays of candidates.

Letters: S stages, V repeats, M microbatches.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import Problem
from maxpipe.config.options import update
from maxpipe.config.rules.engines import ENGINE_RULES
from maxpipe.config.rules.model import MODEL_RULES
from maxpipe.config.rules.rule import apply_rules
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO
from maxpipe.model.kernels.choose import kernel_problems
from maxpipe.plan.search.machine import platform_of
from maxpipe.plan.search.space import ENGINE, GATHERS, POLICY, SCHEDULE, Grid

_AXIS_SIZE = re.compile(r"(mesh\.\w+\.\w+)=(?:[2-9]|\d{2,})")


class Layout(NamedTuple):
    """How layers lie on stages x repeats."""

    chunk: int  # layers of the largest chunk; 0 if there are too few layers
    outside: int = 0
    is_uneven: bool = False  # whether chunks differ, so that `layers_per_stage=auto` decides

    def updates(self, layers: int) -> dict[str, object]:
        return {
            "pipeline.num_layers_per_stage": -1,
            "pipeline.layers_per_stage": AUTO if self.is_uneven else [],
            "pipeline.parallel_layers": layers - self.outside if self.outside else -1,
        }


def layout_of(engine: str, layers: int, stages: int, repeats: int) -> Layout:
    """Return how an engine holds layers that may not divide over the chunks."""
    facts = ENGINES[engine]
    if not facts.has_stages:
        return Layout(layers)
    chunk, outside = divmod(layers, stages * repeats)
    if not chunk or not outside:
        return Layout(chunk)
    if facts.auto_stages:
        return Layout(chunk + 1, is_uneven=True)
    return Layout(chunk, outside) if facts.takes("pipeline.parallel_layers") else Layout(0)


class Legality:
    """The rules, applied to parts of candidates."""

    def __init__(self, config: Config):
        self.config = config
        self._options: dict[tuple[str, ...], str] = {}

    def of_mesh(self, grid: Grid) -> str:
        """Return why the model cannot be split over a mesh; empty if it can."""
        config = update(self.config, grid.updates())
        kernels = kernel_problems(config, platform_of(config))
        return _brief([*apply_rules(MODEL_RULES, config, ())[1], *kernels])

    def of_options(self, engine: str, schedule: str, policy: str, gather: str) -> str:
        """Return why an engine does not take options; empty if it does."""
        values = (engine, schedule, policy, gather)
        if values not in self._options:
            changes = dict(zip((ENGINE, SCHEDULE, POLICY, GATHERS), values, strict=True))
            problems = apply_rules(ENGINE_RULES, update(self.config, changes), ())[1]
            self._options[values] = _brief(problems)
        return self._options[values]


def _brief(problems: Sequence[Problem]) -> str:
    """Return the first clause of the first problem, the same for all sizes of a mesh axis."""
    if not problems:
        return ""
    clause = problems[0].message.partition(";")[0].partition(": ")[0]
    clause = _AXIS_SIZE.sub(r"\1 above 1", clause)
    return f"{problems[0].key}: {clause}"

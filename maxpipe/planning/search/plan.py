"""Search, check the best by the configuration's own rules, and say why the others lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from maxpipe.config.errors import ConfigError
from maxpipe.config.load import resolve
from maxpipe.config.sections import Config
from maxpipe.devices.chips import GIB
from maxpipe.planning.gather_mode import with_gather_mode
from maxpipe.planning.search.block import block_of_configuration
from maxpipe.planning.search.candidate import Candidate, candidate_of
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.legality import Legality
from maxpipe.planning.search.request import Request, placed
from maxpipe.planning.search.rows import Row, fits, loss_of, with_reasons
from maxpipe.planning.search.search import Outcome, price, search

CHECKED = 100  # of the best, by the configuration's own rules
SHOWN = 10
OWN = "your configuration"


@dataclass(frozen=True)
class Plan:
    """The result.

    Attributes:
      request: what was asked for.
      facts: of the model.
      outcome: of the search.
      rows: the best of each mesh and schedule, the chosen one first; empty if nothing fits.
      misfits: faster ones that do not fit.
      own: the user's own configuration, or why it cannot be priced.
      remedies: what would fit if nothing does.
      uncompiled: rows that were left after others were compiled.
    """

    request: Request
    facts: Facts
    outcome: Outcome
    rows: Sequence[Row] = ()
    misfits: Sequence[Row] = ()
    own: Row | str = ""
    remedies: Sequence[str] = field(default=())
    uncompiled: int = 0

    @property
    def winner(self) -> Row | None:
        """Return the chosen one; None if nothing fits."""
        return self.rows[0] if self.rows else None

    def mfu(self, row: Row) -> float:
        """Return the model FLOPs utilisation of a row."""
        machine, config = self.request.machine, self.request.config
        tokens = row.candidate.batch * config.data.sequence_length
        flops = tokens * self.facts.model_flops_per_token
        return flops / (machine.devices * machine.peak * row.seconds)


def make_plan(request: Request, facts: Facts, *, compare: bool = False) -> Plan:
    """Search, and check the best.

    Args:
      request: what is asked for.
      facts: of the model.
      compare: whether the user's own configuration is priced, too.
    """
    outcome = search(request.space(), request.machine, facts, [*request.batches], request.limit)
    checked = check(request, outcome.fitting[:CHECKED], outcome)
    rows = with_reasons(_distinct(checked), request)
    fastest = rows[0].per_sequence if rows else 0.0
    faster = [c for c in outcome.misfits if rows and float(c.seconds.step) / c.batch < fastest]
    misfits = [
        replace(row, reason=f"{row.memory / GIB:.0f} GiB by the closed form: too much")
        for row in _distinct(check(request, faster[:SHOWN], outcome))
    ]
    own = own_row(request) if compare else ""
    if isinstance(own, Row) and rows:
        reason = loss_of(own, rows[0]) if fits(own, request) else "does not fit by closed forms"
        own = replace(own, reason=reason)
    return Plan(request, facts, outcome, rows, misfits[:2], own)


def check(request: Request, candidates: Sequence[Candidate], outcome: Outcome) -> list[Row]:
    """Return the candidates that pass the configuration's own checks."""
    rows = []
    for candidate in candidates:
        config = candidate.config(request.config)
        try:
            resolve(config, request.machine.devices, request.machine.slices)
        except ConfigError as error:
            problem = error.problems[0]
            outcome.fallen[f"{problem.key}: {problem.message}"] += 1
        else:
            rows.append(Row(candidate, config))
    return rows


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Return the best of each mesh and schedule."""
    best: dict[tuple[object, ...], Row] = {}
    for row in rows:
        candidate = row.candidate
        best.setdefault((candidate.grid, candidate.engine, candidate.schedule), row)
    return [*best.values()]


def own_row(request: Request) -> Row | str:
    """Return the user's own configuration on the plan's devices; or why it cannot be priced."""
    machine = request.machine
    try:
        config = resolve(placed(request.written, machine), machine.devices, machine.slices)
    except ConfigError as error:
        return f"{OWN}: {error.problems[0]}"
    candidate = priced_configuration(config, request)
    return candidate if isinstance(candidate, str) else Row(candidate, config, name=OWN)


def priced_configuration(config: Config, request: Request) -> Candidate | str:
    """Return a resolved configuration as a candidate; or why it cannot be priced."""
    block = block_of_configuration(with_gather_mode(config, request.machine.tpu))
    if block is None:
        return f"{OWN}: a schedule from a file has no closed form"
    outcome, facts = Outcome(), Facts(config)
    legality = Legality(config, request.machine.hosts)
    priced = price(block, legality, facts, request.machine, outcome.fallen)
    if priced is None:
        return f"{OWN}: {next(iter(outcome.fallen), 'cannot be priced')}"
    return candidate_of(priced.block, 0, priced.memory, priced.seconds, facts)

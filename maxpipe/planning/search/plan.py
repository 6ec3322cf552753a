"""Plan: search, check the best by the configuration's own rules, and say why the others lost."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from maxpipe.config.errors import ConfigError
from maxpipe.config.load import resolve
from maxpipe.config.sections import Config
from maxpipe.devices.chips import GIB
from maxpipe.planning.search.block import block_of_configuration
from maxpipe.planning.search.candidate import Candidate, candidate_of
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.legality import Legality
from maxpipe.planning.search.request import Request
from maxpipe.planning.search.search import Found, price, search

CHECKED = 100  # of the best, by the configuration's own rules
SHOWN = 10
OWN = "your configuration"


class Proof(NamedTuple):
    """What the compiler says of a candidate.

    Attributes:
      memory: bytes of a device; None if it gave up without a figure.
      seconds: predicted step of the compiled program; None if unknown.
      fits: whether it fits the device.
      failure: why there is no result; "" if there is one.
      compiled_in: seconds of compiling.
    """

    memory: float | None
    seconds: float | None
    fits: bool
    failure: str
    compiled_in: float


@dataclass(frozen=True)
class Row:
    """A candidate in the table.

    Attributes:
      candidate: with its closed forms.
      config: of the candidate, checked.
      reason: why it is not chosen; "" for the winner.
      name: "your configuration", or "".
      proof: from the compiler; None if it was not compiled.
    """

    candidate: Candidate
    config: Config
    reason: str = ""
    name: str = ""
    proof: Proof | None = None

    @property
    def seconds(self) -> float:
        """Return the predicted step, the compiler's if there is one."""
        proved = self.proof.seconds if self.proof else None
        return float(self.candidate.seconds.step) if proved is None else proved

    @property
    def memory(self) -> float:
        """Return the bytes of a device, the compiler's if it said them."""
        proved = self.proof.memory if self.proof else None
        return self.candidate.memory if proved is None else proved

    @property
    def per_sequence(self) -> float:
        """Return the seconds of one sequence, which rows are ranked by."""
        return self.seconds / self.candidate.batch


@dataclass(frozen=True)
class Plan:
    """The result.

    Attributes:
      request: what was asked for.
      facts: of the model.
      found: the search.
      rows: the best of each mesh and schedule, the chosen one first; empty if nothing fits.
      misfits: faster ones that do not fit.
      own: the user's own configuration, or why it cannot be priced.
    """

    request: Request
    facts: Facts
    found: Found
    rows: Sequence[Row] = ()
    misfits: Sequence[Row] = ()
    own: Row | str = ""
    remedies: Sequence[str] = field(default=())

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
    found = search(request.space(), request.machine, facts, [*request.batches], request.limit)
    checked = check(request, found.fitting[:CHECKED], found)
    rows = with_reasons(_distinct(checked), request)
    fastest = rows[0].per_sequence if rows else 0.0
    faster = [c for c in found.misfits if rows and float(c.seconds.step) / c.batch < fastest]
    misfits = [
        replace(row, reason=f"{row.memory / GIB:.0f} GiB by the closed form: too much")
        for row in _distinct(check(request, faster[:SHOWN], found))
    ]
    return Plan(request, facts, found, rows, misfits[:2], own_row(request) if compare else "")


def check(request: Request, candidates: Sequence[Candidate], found: Found) -> list[Row]:
    """Return the candidates that pass the configuration's own checks."""
    rows = []
    for candidate in candidates:
        config = candidate.config(request.config)
        try:
            resolve(config, request.machine.devices, request.machine.slices)
        except ConfigError as error:
            problem = error.problems[0]
            found.fallen[f"{problem.key}: {problem.message}"] += 1
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


def with_reasons(rows: Sequence[Row], request: Request) -> list[Row]:
    """Rank rows, and say of each what it loses to the first; those that do not fit come last."""
    ranked = sorted(rows, key=lambda row: (not _fits(row, request), row.per_sequence))
    if not ranked:
        return []
    best = ranked[0]
    return [replace(best, reason=""), *(replace(r, reason=_lost(r, best)) for r in ranked[1:])]


def _fits(row: Row, request: Request) -> bool:
    if row.proof is not None:
        return row.proof.fits
    return request.limit is None or row.candidate.memory <= request.limit


def _lost(row: Row, best: Row) -> str:
    """Return in words what a row loses to the best."""
    if row.proof is not None and row.proof.failure:
        return row.proof.failure
    if row.proof is not None and not row.proof.fits:
        return "does not fit, says the compiler"
    slower = row.per_sequence / best.per_sequence - 1
    per_sequence = [
        [float(part) / r.candidate.batch for part in r.candidate.seconds] for r in (row, best)
    ]
    losses = [a - b for a, b in zip(*per_sequence, strict=True)]
    part = ("computation", "communication", "bubble")[losses.index(max(losses))]
    return f"{slower:+.1%}: {part}" if slower >= 5e-4 else "as fast"


def own_row(request: Request) -> Row | str:
    """Return the user's own configuration as a row; or why it cannot be priced."""
    machine = request.machine
    try:
        config = resolve(request.written, machine.devices, machine.slices)
    except ConfigError as error:
        return f"{OWN}: {error.problems[0]}"
    candidate = priced_configuration(config, request)
    return candidate if isinstance(candidate, str) else Row(candidate, config, name=OWN)


def priced_configuration(config: Config, request: Request) -> Candidate | str:
    """Return a resolved configuration as a candidate; or why it cannot be priced."""
    block = block_of_configuration(config)
    if block is None:
        return f"{OWN}: a schedule from a file has no closed form"
    found, facts = Found(), Facts(config)
    legality = Legality(config, request.machine.hosts)
    priced = price(block, legality, facts, request.machine, found.fallen)
    if priced is None:
        return f"{OWN}: {next(iter(found.fallen), 'cannot be priced')}"
    return candidate_of(priced.block, 0, priced.memory, priced.seconds, facts)

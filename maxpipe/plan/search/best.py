"""Search, check the best by the configuration's own rules, and say why the others lost."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import resolve
from maxpipe.config.options import get
from maxpipe.config.sections import Config
from maxpipe.config.slices import num_chips
from maxpipe.config.terminal import Note
from maxpipe.devices.chips import GIB
from maxpipe.plan.choices import with_gather_mode
from maxpipe.plan.search.block import block_of_configuration, has_closed_form
from maxpipe.plan.search.candidate import Candidate, Row, fits, loss_of, with_reasons
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.pricing import Outcome, price, search
from maxpipe.plan.search.request import Request, placed
from maxpipe.plan.search.space import DERIVED, unpriced

ROWS = 100
CHECKS = 2000  # by the configuration's own rules; each takes about a millisecond
MISFITS = 2
WORTH = 0.01  # a smaller share of a step is no reason to look for more memory
SHOWN = 10
BILLION = 1e9
OWN = "your configuration"


class SliceCost(NamedTuple):
    """What training costs on a number of slices, by closed forms."""

    topology: str
    slices: int
    chips: int
    batch: int
    seconds: float  # of a step
    chip_seconds: float  # for a billion tokens


class Remedies(NamedTuple):
    """What would fit where nothing does, and kinds of remedies that fail or were not all tried."""

    lines: Sequence[str] = ()
    vain: Sequence[str] = ()
    unfinished: Sequence[str] = ()


_UNSEARCHED = Remedies()


@dataclass(frozen=True)
class Plan:
    """The result of planning."""

    request: Request
    facts: Facts
    outcome: Outcome
    # The best of each mesh, schedule and scan_layers, the chosen one first; empty if nothing fits.
    rows: Sequence[Row] = ()
    # Faster rows that need the least memory of those that do not fit, and compiled ones.
    misfits: Sequence[Row] = ()
    own: Row | str = ""  # the user's own configuration, or why it cannot be priced
    remedies: Remedies = _UNSEARCHED
    uncompiled: int = 0  # rows that were left when others had been compiled
    slices: Sequence[SliceCost] = ()  # with --smallest, where something fits, the smallest first

    @property
    def winner(self) -> Row | None:
        return self.rows[0] if self.rows else None

    @property
    def shown(self) -> list[Row]:
        """Return the rows of a table: the best, and the winner's twin in scan_layers if any."""
        shown, others = [*self.rows[:SHOWN]], self.rows[SHOWN:]
        return shown + [row for row in others if row.candidate.is_twin(shown[0].candidate)]

    def cost(self) -> SliceCost:
        assert self.winner is not None
        machine, config = self.request.machine, self.request.config
        batch, seconds = self.winner.candidate.batch, self.winner.seconds
        chips, tokens = machine.num_chips, batch * config.data.sequence_length
        cost = BILLION * seconds * chips / tokens
        return SliceCost(machine.topology, machine.slices, chips, batch, seconds, cost)

    def mfu(self, row: Row) -> float:
        machine, config = self.request.machine, self.request.config
        tokens = row.candidate.batch * config.data.sequence_length
        flops = tokens * self.facts.model_flops_per_token
        return flops / (machine.devices * machine.peak * row.seconds)


def make_plan(request: Request, facts: Facts, *, compare: bool = False) -> Plan:
    """Search, and check the best; price the user's own configuration, too, if `compare`.

    Raises:
      ConfigError: there are candidates that fit, but none passes the configuration's own checks.
    """
    outcome = search(request.space(), request.machine, facts, request.batches, request.limit)
    checked, problems = _checked(request, outcome.fitting, ROWS)
    if problems and not checked:
        (problem, _), *_ = problems.most_common(1)
        message = f"{problem.message}; so none of the {problems.total()} fastest that fit is legal"
        raise ConfigError(Problem(problem.key, message))
    outcome.fallen.update(f"{problem.key}: {problem.message}" for problem in problems.elements())
    rows = with_reasons(checked, request)
    own = own_row(request) if compare else ""
    if isinstance(own, Row):
        if not fits(own, request):
            own = replace(own, reason="does not fit by closed forms")
        elif rows:
            own = replace(own, reason=loss_of(own, rows[0]))
    misfits = _misfits(request, outcome, rows[0]) if rows else []
    return Plan(request, facts, outcome, rows, misfits, own)


def _misfits(request: Request, outcome: Outcome, best: Row) -> list[Row]:
    """Return rows that would be faster than the best but do not fit, those with least memory."""
    limit = request.limit
    if limit is None:
        return []
    faster = [c for c in outcome.misfits if c.per_sequence < (1 - WORTH) * best.per_sequence]
    rows, _ = _checked(request, sorted(faster, key=lambda c: c.memory), MISFITS)
    return with_misfit_reasons(rows, best, request)


def with_misfit_reasons(misfits: Sequence[Row], best: Row, request: Request) -> list[Row]:
    """Return rows that do not fit, with what each would gain over the best and what it lacks."""
    if (limit := request.limit) is None:
        return [*misfits]
    above = f"GiB above the usable {limit / GIB:.3g}"
    return [
        replace(row, reason=f"{loss_of(row, best)}, {(row.memory - limit) / GIB:.3g} {above}")
        for row in misfits
    ]


def _checked(
    request: Request, candidates: Sequence[Candidate], most: int
) -> tuple[list[Row], Counter[Problem]]:
    """Return the first of each sort that passes the configuration's checks; others' problems."""
    rows: dict[tuple[object, ...], Row] = {}
    problems: Counter[Problem] = Counter()
    for candidate in candidates:
        if len(rows) == most or len(rows) + problems.total() == CHECKS:
            break
        if candidate.sort not in rows:
            config = candidate.config(request.config)
            if problem := problem_of(config, request):
                problems[problem] += 1
            else:
                rows[candidate.sort] = Row(candidate, config)
    return [*rows.values()], problems


def problem_of(config: Config, request: Request) -> Problem | None:
    try:
        resolve(config, request.machine.devices, request.machine.slices)
    except ConfigError as error:
        return error.problems[0]
    return None


def own_row(request: Request) -> Row | str:
    machine = request.machine
    try:
        config = resolve(placed(request.written, machine), machine.devices, machine.slices)
    except ConfigError as error:
        return f"{OWN}: {error.problems[0]}"
    candidate = priced_configuration(config, request)
    return candidate if isinstance(candidate, str) else Row(candidate, config, name=OWN)


def priced_configuration(config: Config, request: Request) -> Candidate | str:
    """Return a resolved configuration as a candidate; or why it cannot be priced."""
    if not has_closed_form(config):
        return f"{OWN}: a schedule from a file has no closed form"
    block = block_of_configuration(with_gather_mode(config, request.machine.tpu))
    fallen, facts, legality = Outcome().fallen, Facts(config), Legality(config)
    if reason := unpriced(block.engine, request.machine.hosts) or legality.of_mesh(block.grid):
        return f"{OWN}: {reason}"
    priced = price(block, legality, facts, request.machine, fallen)
    if priced is None:
        return f"{OWN}: {', '.join(fallen)}"
    (candidate,) = priced.candidates([0], facts)
    return replace(candidate, layout={key: get(config, key) for key in DERIVED})


LARGER = 4  # slices above the smallest that are priced
TRIED_SLICES = 8


def smallest_plans(request: Request, facts: Facts, note: Note) -> list[Plan]:
    """Return plans of the smallest slice that trains the model, and of some above it.

    Where nothing fits on any slice, the only plan is that of the largest.

    Raises:
      ConfigError: what fits does not pass the configuration's own checks, on any slice.
    """
    plans: list[Plan] = []
    for topology in doubling([t for t in request.smallest if holds_state(request.on(t), facts)]):
        note(f"trying      {topology}")
        with contextlib.suppress(ConfigError):
            plans.append(make_plan(request.on(topology), facts))
        plans = [plan for plan in plans if plan.winner is not None]
        if len(plans) > LARGER:
            break
    return plans or [make_plan(request.on(request.smallest[-1]), facts)]


def holds_state(request: Request, facts: Facts) -> bool:
    """Return whether all memory is enough for parameters, optimizer state and gradients alone."""
    limit = request.limit
    return limit is None or limit * request.machine.devices >= facts.least_state_bytes()


def doubling(topologies: Sequence[str]) -> Iterator[str]:
    """Yield the first few of ever larger slices, then those with twice the chips of the last."""
    last = 0
    for number, topology in enumerate(topologies):
        chips = num_chips(topology)
        if number < TRIED_SLICES or chips >= 2 * last:
            last = chips
            yield topology

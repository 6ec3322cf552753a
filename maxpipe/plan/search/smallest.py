"""Find the smallest slice of a kind that trains a model."""

from collections.abc import Iterator, Sequence

from maxpipe.config.errors import ConfigError
from maxpipe.config.slices import num_chips
from maxpipe.config.terminal import Note
from maxpipe.plan.search.best import Plan, make_plan
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.request import Request

LARGER = 4  # slices above the smallest that are priced
TRIED_SLICES = 8


def smallest_plans(request: Request, facts: Facts, note: Note) -> list[Plan]:
    """Return plans of the smallest slice that trains the model, and of some above it.

    Where nothing fits on any slice, the only plan is that of the largest.

    Args:
      request: the request, with the slices to try.

    Raises:
      ConfigError: what fits does not pass the configuration's own checks, on any slice.
    """
    plans: list[Plan] = []
    problem: ConfigError | None = None
    for topology in _promising_slices(request, facts):
        note(f"trying      {topology}")
        try:
            plan = make_plan(request.on(topology), facts)
        except ConfigError as error:
            problem = error
            continue
        if plan.winner is not None:
            plans.append(plan)
        if len(plans) > LARGER:
            break
    if plans:
        return plans
    if problem is not None:
        raise problem
    return [make_plan(request.on(request.smallest[-1]), facts)]


def _promising_slices(request: Request, facts: Facts) -> Iterator[str]:
    """Yield the slices whose memory is large enough for the state alone."""
    return doubling([t for t in request.smallest if holds_state(request.on(t), facts)])


def holds_state(request: Request, facts: Facts) -> bool:
    """Return whether all memory is enough for parameters, optimizer state and gradients alone."""
    limit = request.limit
    return limit is None or limit * request.machine.devices >= facts.least_state_bytes()


def doubling(topologies: Sequence[str]) -> Iterator[str]:
    """Yield the first few slices, then those with at least twice the chips of the one before.

    Args:
      topologies: slices of one kind, the smallest first.
    """
    last = 0
    for number, topology in enumerate(topologies):
        chips = num_chips(topology)
        if number < TRIED_SLICES or chips >= 2 * last:
            last = chips
            yield topology

"""Find what would help when nothing fits, and what slices of a kind cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.slices import num_chips, slices_of
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.machine import CPU, MOST_GPUS
from maxpipe.planning.search.plan import Plan, make_plan
from maxpipe.planning.search.request import Request
from maxpipe.planning.search.search import search

LARGER = 4  # slices above the smallest that are priced
TRIED_SLICES = 8
BILLION = 1e9
POLICY = "pipeline.remat_policy"


@dataclass(frozen=True)
class SliceCost:
    """What training costs on one slice.

    Attributes:
      plan: its plan.
      chips: of the slice.
      chip_seconds: to train on a billion tokens.
    """

    plan: Plan
    chips: int
    chip_seconds: float


def remedies(request: Request, facts: Facts) -> list[str]:
    """Return what would fit where nothing does, each found by a search of its own."""
    lines = []
    # A smaller batch leaves parameters, optimizer state and gradients as large as they are.
    for batch in _smaller_batches(request.batches[0]) if _holds_state(request, facts) else ():
        if _fits(request.with_batches([batch]), facts):
            tokens = batch * request.config.data.sequence_length
            lines.append(f"fewer tokens: data.global_batch_size={batch}, {tokens} tokens a step")
            break
    larger = next((t for t in _larger_slices(request) if _fits(request.on(t), facts)), None)
    if larger:
        lines.append(f"more chips: --topology {larger}")
    offloaded = _offloading(request, facts)
    if offloaded:
        lines.append(
            f"offloading: --fix {POLICY}={offloaded}, with the host's memory; how fast that is the "
            "plan does not know"
        )
    return lines


def slice_costs(request: Request, facts: Facts) -> list[SliceCost]:
    """Return the smallest slice that trains the model and some above it; empty if none does."""
    costs: list[SliceCost] = []
    for topology in request.smallest:
        plan = make_plan(request.on(topology), facts)
        if plan.winner is not None:
            chips = plan.request.machine.num_chips
            tokens = plan.winner.candidate.batch * request.config.data.sequence_length
            per_token = plan.winner.seconds * chips / tokens
            costs.append(SliceCost(plan, chips, per_token * BILLION))
        if len(costs) > LARGER:
            break
    return costs


def promising_slices(request: Request, facts: Facts) -> Request:
    """Return the request without slices whose memory is too small for the state alone."""
    promising = [t for t in request.smallest if _holds_state(request.on(t), facts)]
    return replace(request, smallest=tuple(_doubling(promising)))


def _holds_state(request: Request, facts: Facts) -> bool:
    """Return whether all memory is enough for parameters, optimizer state and gradients alone."""
    limit = request.limit
    return limit is None or limit * request.machine.devices >= facts.least_state_bytes()


def _doubling(topologies: Sequence[str]) -> Iterator[str]:
    """Yield slices that at least double, after the first few."""
    last = 0
    for number, topology in enumerate(topologies):
        chips = num_chips(topology)
        if number < TRIED_SLICES or chips >= 2 * last:
            last = chips
            yield topology


def _smaller_batches(batch: int) -> Iterator[int]:
    while batch > 1:
        batch //= 2
        yield batch


def _larger_slices(request: Request) -> Iterator[str]:
    """Yield the next slices of the same kind, or more simulated devices or GPUs."""
    machine = request.machine
    kind, _, _ = machine.topology.partition(":")
    if machine.chip.torus is not None:
        chips = num_chips(machine.topology)
        larger = [t for t in slices_of(kind) if num_chips(t) > chips]
        yield from [*_doubling(larger)][:TRIED_SLICES]
    elif kind != CPU:
        count = 2 * machine.devices
        while count <= MOST_GPUS:
            yield f"{kind}:{count}"
            count *= 2


def _offloading(request: Request, facts: Facts) -> str:
    """Return a policy that offloads with which something fits; "" if there is none."""
    if POLICY in request.choices:
        return ""
    for name in (name for name, policy in REMAT_POLICIES.items() if policy.host):
        if _fits(replace(request, choices={**request.choices, POLICY: [name]}), facts):
            return name
    return ""


def _fits(request: Request, facts: Facts) -> bool:
    outcome = search(request.space(), request.machine, facts, [*request.batches], request.limit)
    return bool(outcome.fitting)

"""Find what would help when nothing fits: fewer tokens, more chips, offloading, less margin."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.slices import num_chips, slices_of
from maxpipe.config.terminal import Note
from maxpipe.plan.search.best import Plan, Remedies, doubling, holds_state, problem_of
from maxpipe.plan.search.candidate import Row
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.flags import MARGIN, largest_margin
from maxpipe.plan.search.machine import CPU, MOST_GPUS
from maxpipe.plan.search.pricing import Outcome, fitting_of, priced_blocks
from maxpipe.plan.search.request import TOPOLOGY, Request

POLICY = "pipeline.remat_policy"
MOST_DOUBLINGS = 3  # of the number of slices, once there is no larger slice


class Attempt(NamedTuple):
    """A request that may fit.

    Attributes:
      request: the request to search.
      words: command-line words that ask for it.
      remark: a remark that follows the words; or "".
    """

    request: Request
    words: str
    remark: str = ""


def attempts_of(request: Request, flag: str = "") -> dict[str, list[Attempt]]:
    """Return kinds of remedies with what to try of each, the least change first.

    Smaller batches are each half the one before. Nothing is offloaded where the user chose
    policies.

    Args:
      request: the request for which nothing fits.
      flag: a flag for all of them, after a space; or "".
    """
    smaller, length = [], request.config.data.sequence_length
    batch = min(request.batches)
    while batch > 1:
        batch //= 2
        remark = f", {batch * length} tokens a step, in place of the batch that is given"
        words = f"data.global_batch_size={batch}{flag}"
        smaller.append(Attempt(replace(request, batches=(batch,)), words, remark))
    remark = ", with the host's memory; how fast that is the plan does not know"
    offloading = [
        Attempt(
            replace(request, choices={**request.choices, POLICY: [name]}),
            f"--fix {POLICY}={name}{flag}",
            remark,
        )
        for name, policy in REMAT_POLICIES.items()
        if policy.host and POLICY not in request.choices
    ]
    more = [Attempt(on, f"{words}{flag}") for words, on in more_chips(request)]
    kinds = {"fewer tokens": smaller, "more chips": more, "offloading": offloading}
    return {kind: attempts for kind, attempts in kinds.items() if attempts}


def more_chips(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield the request on more chips of the same kind, each with the words that ask for it.

    These are larger slices, and then several of the largest; or more GPUs. Simulated devices have
    no memory of their own, so there are none.
    """
    machine = request.machine
    kind, _, _ = machine.topology.partition(":")
    if machine.chip.torus is not None:
        chips = num_chips(machine.topology)
        usual = [t for t in slices_of(kind) if num_chips(t) > chips]
        # The largest as well, where it is less than twice the one before.
        larger = [*dict.fromkeys([*doubling(usual), *usual[-1:]])]
        for topology in larger:
            yield f"{TOPOLOGY} {topology}", request.on(topology)
        largest = larger[-1] if larger else machine.topology
        for doublings in range(1, MOST_DOUBLINGS + 1):
            slices = machine.slices * 2**doublings
            words = f"{TOPOLOGY} {largest} compile.num_slices={slices}"
            yield words, request.on(largest, slices)
    elif kind != CPU:
        count = 2 * machine.devices
        while count <= MOST_GPUS:
            yield f"{TOPOLOGY} {kind}:{count}", request.on(f"{kind}:{count}")
            count *= 2


SECONDS = 20.0  # of all searches for remedies together
_MARGIN_STEP = 5  # per cent


def remedies(plan: Plan, facts: Facts, note: Note) -> Remedies:
    """Return what would fit where nothing does, each found by a search of its own.

    Each kind of remedy has an equal share of the time that those before it leave. Where closed
    forms accept what the compiler refuses, the searches use a margin with which they refuse it,
    too.
    """
    request, flag = plan.request, ""
    kinds: dict[str, list[Attempt]] = {}
    if any(map(_is_refused, plan.misfits)):
        margin = refusing_margin(plan)
        if margin is None:
            return Remedies()
        request, flag = replace(request, margin=margin), f" {MARGIN} {margin:.0%}"
        kinds["others that need less"] = [Attempt(request, flag.strip())]
    kinds |= attempts_of(request, flag)
    lines, vain, unfinished = _smaller_margin(plan), [], []
    end = time.perf_counter() + SECONDS
    for number, (kind, attempts) in enumerate(kinds.items()):
        # Without more chips, parameters, optimizer state and gradients stay as large as they are.
        useful = [attempt for attempt in attempts if holds_state(attempt.request, facts)]
        seconds = max(end - time.perf_counter(), 0.0) / (len(kinds) - number)
        last, is_over = _first_that_fits(useful, facts, note, seconds)
        if last is None:
            vain.append(kind)
        elif is_over:
            unfinished.append(f"{kind} from {last.words} on")
        else:
            lines.append(f"{kind}: {last.words}{last.remark}")
    return Remedies(lines, vain, unfinished)


def _first_that_fits(
    attempts: Sequence[Attempt], facts: Facts, note: Note, seconds: float
) -> tuple[Attempt | None, bool]:
    """Return the first attempt with something that fits; or where time ran out, with True."""
    deadline = time.perf_counter() + seconds
    for attempt in attempts:
        request = attempt.request
        note(f"trying      {attempt.words}")
        for priced in priced_blocks(
            request.space(), request.machine, facts, request.batches, Outcome()
        ):
            candidates = priced.candidates(fitting_of(priced, request.limit), facts)
            if any(problem_of(c.config(request.config), request) is None for c in candidates):
                return attempt, False
            if time.perf_counter() > deadline:
                note(f"            left off after {seconds:.0f} s")
                return attempt, True
    return None, False


def _smaller_margin(plan: Plan) -> list[str]:
    """Return a line with the margin at which the smallest candidate fits, if there is one."""
    request, least = plan.request, plan.outcome.least
    capacity, limit = request.machine.capacity, request.limit
    if least is None or capacity is None or limit is None:
        return []
    if not limit < least.memory <= capacity or problem_of(least.config(request.config), request):
        return []
    percent = largest_margin(least.memory, capacity)
    proof = ", and --compile 1 proves it" if request.machine.is_compilable else ""
    return [f"less memory left free: {MARGIN} {percent}%; closed forms are coarse{proof}"]


def refusing_margin(plan: Plan) -> float | None:
    """Return the margin with which closed forms refuse what was compiled; or None.

    It is None if that takes all of the memory, or if the memory is unknown.
    """
    capacity = plan.request.machine.capacity
    memories = [row.candidate.memory for row in plan.misfits if _is_refused(row)]
    if capacity is None or not memories:
        return None
    percent = _MARGIN_STEP * (largest_margin(min(memories), capacity) // _MARGIN_STEP + 1)
    return percent / 100 if percent < 100 else None


def _is_refused(row: Row) -> bool:
    """Return whether the compiler has said that a row does not fit."""
    return row.proof is not None and not row.proof.failure

"""Find what would help when nothing fits: fewer tokens, more chips, offloading, less margin."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.slices import num_chips, slices_of
from maxpipe.config.terminal import Note
from maxpipe.plan.search.best import Plan, Remedies, doubling, holds_state, problem_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import CPU, MOST_GPUS
from maxpipe.plan.search.pricing import Outcome, fitting_of, priced_blocks
from maxpipe.plan.search.request import TOKENS, TOPOLOGY, Request
from maxpipe.plan.search.space import POLICY

MOST_DOUBLINGS = 3  # of the number of slices, once there is no larger slice
SECONDS = 20.0  # of all searches for remedies together
Attempt: TypeAlias = tuple[str, Request]  # words of a command line, and what they ask for


def attempts_of(request: Request) -> dict[str, list[Attempt]]:
    """Return kinds of remedies with what to try of each, the least change first."""
    batch, length = min(request.batches), request.config.data.sequence_length
    halves = [batch // 2**n for n in range(1, batch.bit_length())]
    policies = [name for name, policy in REMAT_POLICIES.items() if policy.host]
    if POLICY in request.choices:
        policies = []
    kinds = {
        "fewer tokens": [
            (f"{TOKENS} {half * length}", replace(request, batches=(half,))) for half in halves
        ],
        "more chips": [*more_chips(request)],
        "offloading": [
            (
                f"--fix {POLICY}={name}",
                replace(request, choices={**request.choices, POLICY: [name]}),
            )
            for name in policies
        ],
    }
    return {kind: attempts for kind, attempts in kinds.items() if attempts}


def more_chips(request: Request) -> Iterator[Attempt]:
    """Yield the request on larger slices, then on several of the largest; or on more GPUs."""
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


def remedies(plan: Plan, facts: Facts, note: Note) -> Remedies:
    """Return what would fit where nothing does, each found by a search of its own.

    Where closed forms accept what the compiler refuses, the searches use a margin with which they
    refuse it, too.
    """
    request, lines, flag = plan.request, [*_smaller_margin(plan)], ""
    kinds: dict[str, list[Attempt]] = {}
    if refused := [r.candidate.memory for r in plan.misfits if r.proof and not r.proof.failure]:
        percent = _free_percent(request, min(refused)) + 1
        if percent >= 100:
            return Remedies()
        request, flag = replace(request, margin=percent / 100), f" --memory-margin {percent}%"
        kinds["others that need less"] = [("", request)]
    kinds |= attempts_of(request)
    vain, unfinished = [], []
    for kind, attempts in kinds.items():
        # Without more chips, parameters, optimizer state and gradients stay as large as they are.
        useful = [
            (f"{words}{flag}".strip(), on) for words, on in attempts if holds_state(on, facts)
        ]
        words, is_over = _first_that_fits(useful, facts, note, SECONDS / len(kinds))
        if not words:
            vain.append(kind)
        elif is_over:
            unfinished.append(f"{kind} from {words} on")
        else:
            lines.append(f"{kind}: {words}")
    return Remedies(lines, vain, unfinished)


def _first_that_fits(
    attempts: Iterable[Attempt], facts: Facts, note: Note, seconds: float
) -> tuple[str, bool]:
    """Return the words with which something fits; or with which time ran out, and True; or ""."""
    deadline = time.perf_counter() + seconds
    for words, request in attempts:
        note(f"trying      {words}")
        for priced in priced_blocks(
            request.space(), request.machine, facts, request.batches, Outcome()
        ):
            candidates = priced.candidates(fitting_of(priced, request.limit), facts)
            if any(problem_of(c.config(request.config), request) is None for c in candidates):
                return words, False
            if time.perf_counter() > deadline:
                return words, True
    return "", False


def _free_percent(request: Request, memory: float) -> int:
    """Return the largest margin, in percent of a device's memory, with which `memory` fits."""
    return math.floor(100 * (1 - memory / (request.machine.capacity or math.inf)))


def _smaller_margin(plan: Plan) -> Iterator[str]:
    request, least = plan.request, plan.outcome.least
    if least is None or problem_of(least.config(request.config), request):
        return
    percent = _free_percent(request, least.memory)
    if 0 <= percent < 100 * request.margin:
        yield f"less memory left free: --memory-margin {percent}%; closed forms are coarse"

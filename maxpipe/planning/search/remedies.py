"""Find what would help when nothing fits."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.plan import Plan, problem_of
from maxpipe.planning.search.request import Request
from maxpipe.planning.search.rows import Row
from maxpipe.planning.search.search import fitting_of_blocks
from maxpipe.planning.search.smallest import Note, holds_state, larger_slices

SECONDS = 20.0  # of all searches for remedies
POLICY = "pipeline.remat_policy"
MARGIN = "--memory-margin"
_MARGIN_STEP = 5  # per cent


def remedies(plan: Plan, facts: Facts, note: Note) -> list[str]:
    """Return what would fit where nothing does, each found by a search of its own.

    Where closed forms let pass what the compiler refuses, they are searched with a margin by which
    they refuse it, too.

    Args:
      plan: in which nothing fits.
      facts: of the model.
      note: prints a line.
    """
    request, flag, lines = plan.request, "", []
    trial = _Trial(facts, note, time.perf_counter() + SECONDS)
    if any(map(_is_refused, plan.misfits)):
        margin = refusing_margin(plan)
        if margin is None:
            return []
        request, flag = replace(request, margin=margin), f" {MARGIN} {margin:.0%}"
        if trial.fits(request, flag.strip()):
            lines.append(f"others that need less:{flag}")
    # A smaller batch leaves parameters, optimizer state and gradients as large as they are.
    for batch in _smaller_batches(min(request.batches)) if holds_state(request, facts) else ():
        key = f"data.global_batch_size={batch}{flag}"
        if trial.fits(request.with_batches([batch]), key):
            tokens = batch * request.config.data.sequence_length
            instead = "in place of the batch that is given"
            lines.append(f"fewer tokens: {key}, {tokens} tokens a step, {instead}")
            break
    for topology in larger_slices(request):
        larger = request.on(topology)
        if holds_state(larger, facts) and trial.fits(larger, f"--topology {topology}{flag}"):
            lines.append(f"more chips: --topology {topology}{flag}")
            break
    for policy in _offloading_policies(request) if holds_state(request, facts) else ():
        fixed = f"--fix {POLICY}={policy}{flag}"
        offloads = replace(request, choices={**request.choices, POLICY: [policy]})
        if trial.fits(offloads, fixed):
            with_host = "with the host's memory; how fast that is the plan does not know"
            lines.append(f"offloading: {fixed}, {with_host}")
            break
    return lines


@dataclass
class _Trial:
    """Searches for anything that fits, until a time is over.

    Attributes:
      facts: of the model.
      note: prints a line.
      deadline: by `time.perf_counter`.
    """

    facts: Facts
    note: Note
    deadline: float

    def fits(self, request: Request, words: str) -> bool:
        """Return whether something fits that passes the configuration's checks.

        Args:
          request: what is searched.
          words: that ask for it.
        """
        if time.perf_counter() > self.deadline:
            return False
        self.note(f"trying      {words}")
        batches = [*request.batches]
        for candidates in fitting_of_blocks(
            request.space(), request.machine, self.facts, batches, request.limit
        ):
            if any(problem_of(c.config(request.config), request) is None for c in candidates):
                return True
            if time.perf_counter() > self.deadline:
                self.note(f"            left off after {SECONDS:.0f} s")
                return False
        return False


def refusing_margin(plan: Plan) -> float | None:
    """Return the margin with which closed forms refuse what was compiled or probed; or None.

    None stands for all of the memory, and for a memory that is unknown.
    """
    capacity = plan.request.machine.capacity
    memories = [row.candidate.memory for row in plan.misfits if _is_refused(row)]
    if capacity is None or not memories:
        return None
    percent = _MARGIN_STEP * (math.floor(100 * (1 - min(memories) / capacity) / _MARGIN_STEP) + 1)
    return percent / 100 if percent < 100 else None


def _is_refused(row: Row) -> bool:
    """Return whether the compiler has said that a row, or a unit of it, does not fit."""
    return row.probed is not None or (row.proof is not None and not row.proof.failure)


def _smaller_batches(batch: int) -> Iterator[int]:
    while batch > 1:
        batch //= 2
        yield batch


def _offloading_policies(request: Request) -> list[str]:
    """Return the policies that offload; none where the user chose policies."""
    if POLICY in request.choices:
        return []
    return [name for name, policy in REMAT_POLICIES.items() if policy.host]

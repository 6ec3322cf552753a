"""Count how often a schedule's table takes the conditionals of the scheduled engine's program.

Embedding, head and embedding gradient have a conditional each in the body of a phase's loop, taken
in the ticks that have such work. A phase of the program is a run of ticks, see `plan`.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.compiling.prediction.origins import Origin
from maxpipe.pipeline.engines.scheduled.plan import LockstepPlan


class Phase(NamedTuple):
    """One loop over ticks.

    Attributes:
      kinds: slots that every tick computes, idle or not, such as "FB".
      ticks: number of ticks.
      embeddings, heads, embedding_gradients: ticks that have such work.
    """

    kinds: str
    ticks: int
    embeddings: int
    heads: int
    embedding_gradients: int

    def times_taken(self, origin: Origin) -> int | None:
        """Return in how many ticks a conditional does its work; None if it is none of these."""
        if origin.scope == "head":
            return self.heads
        if origin.scope == "embedding":
            return self.embedding_gradients if origin.is_backward else self.embeddings
        return None


def phases_of(plan: LockstepPlan) -> list[Phase]:
    """Return the phases of a plan, in order."""
    phases = []
    for start, stop in plan.phases:
        phase = plan.ticks(start, stop)
        active = {
            "F": phase.F.active,
            "I" if plan.splits_backward else "B": phase.B.active,
            "W": phase.W.active,
        }
        counts = [
            int((np.asarray(microbatch) >= 0).sum())
            for microbatch in (phase.ends.embed, phase.ends.head, phase.ends.embed_backward)
        ]
        kinds = "".join(kind for kind, slots in active.items() if np.asarray(slots).any())
        phases.append(Phase(kinds, stop - start, *counts))
    return phases


def times_taken(phases: list[Phase], origin: Origin, reached: float) -> float:
    """Return how often a step takes a conditional that it reaches so often; else each time."""
    number = origin.phase
    if number is None or number >= len(phases):
        return reached
    taken = phases[number].times_taken(origin)
    return reached if taken is None else min(reached, taken)

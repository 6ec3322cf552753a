"""Count how often a step takes the conditionals of its program.

On the scheduled engine the embedding, the head and the embedding gradient have a conditional each
in the body of a phase's loop, taken in the ticks with such work. A phase of the program is a run of
ticks, see `plan`. Where some layers see all tokens and others a window, attention is a conditional.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.compile.prediction.origins import Origin
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.model.layer_facts import is_local
from maxpipe.pipeline.engines.scheduled.tick_plan import LockstepPlan
from maxpipe.pipeline.layout import build_layout

ATTENTION = "attention"


class Phase(NamedTuple):
    """One loop over ticks: the slots that every tick computes, idle or not, such as "FB".

    `embeddings`, `heads` and `embedding_gradients` are numbers of ticks that have such work.
    """

    kinds: str
    ticks: int
    embeddings: int
    heads: int
    embedding_gradients: int


def phases_of(plan: LockstepPlan) -> list[Phase]:
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


def global_share(config: Config) -> float:
    """Return the share of a stage's layers that see all tokens; others wait for the largest."""
    layout = build_layout(config)
    layers = _sees_all(config.model)[layout.layer_index[: layout.num_repeats]]  # [V, S, L]
    return float(layers.mean(axis=2).max(axis=1).mean())


def chunk_share(model: ModelConfig, layers: np.ndarray) -> float:
    """Return the share of a chunk's layers that see all tokens; `layers` [L] are in model order."""
    return float(_sees_all(model)[layers].mean())


def _sees_all(model: ModelConfig) -> np.ndarray:
    """Return whether each layer in chunks sees all tokens, and False for padding: bool [N + 1]."""
    kinds = model.layer_kinds[model.first_dense_layers :]
    return np.array([*(not is_local(kind) for kind in kinds), False])


def times_taken(
    phases: list[Phase], attends_to_all: float, origin: Origin, reached: float
) -> float:
    """Return how often a step does the work of a conditional, by default each time.

    Args:
      phases: phases of the scheduled engine; empty on others.
      attends_to_all: share of layers that see all tokens, see `global_share` and `chunk_share`.
    """
    if origin.scope == ATTENTION:
        return attends_to_all * reached
    number = origin.phase
    if number is None or number >= len(phases):
        return reached
    phase = phases[number]
    if origin.scope == "head":
        return min(reached, phase.heads)
    if origin.scope == "embedding":
        taken = phase.embedding_gradients if origin.is_backward else phase.embeddings
        return min(reached, taken)
    return reached

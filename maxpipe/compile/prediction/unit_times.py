"""Derive the times of single units from a walked step, as the simulator takes them.

On the scheduled engine the embedding, the head and the embedding gradient have a conditional each
in the body of a phase's loop, taken in the ticks with such work. A phase of the program is a run of
ticks. Where some layers see all tokens and others a window, attention is a conditional, and
so is the choice of rows for experts that devices share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maxpipe.compile.prediction.origins import ALL_ROWS, Origin
from maxpipe.compile.prediction.walk import Loop, Timeline
from maxpipe.config.sections import Config, ModelConfig
from maxpipe.model.layer_facts import is_local
from maxpipe.pipeline.engines.scheduled.tick_plan import LockstepPlan
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.table import Table
from maxpipe.plan.simulate import Costs

ATTENTION = "attention"
_WITHIN_CHUNKS = (ATTENTION, ALL_ROWS)  # scopes of conditionals in layers


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
    if origin.scope == ALL_ROWS:
        return 0  # a device is taken to get no more than a usual share
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


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds of one unit: one chunk of layers and one microbatch; None for what does not run.

    `head` is one microbatch's loss and gradient if one stage computed them alone; `repeats` is the
    number of chunks of a stage.
    """

    forward: float
    backward: float | None
    input_gradient: float | None
    weight_gradient: float | None
    head: float
    repeats: int

    def words(self) -> str:
        """Return the times as `maxpipe.schedule` takes them: of a stage with all its chunks."""
        stage = {
            name: self.repeats * seconds
            for name in ("forward", "backward", "input_gradient", "weight_gradient")
            if (seconds := getattr(self, name)) is not None
        }
        return " ".join(
            f"{name}={value:.4g}" for name, value in (stage | {"head": self.head}).items()
        )

    def costs(self) -> Costs:
        return Costs(
            forward=self.forward,
            backward=self.backward or 0.0,
            input_gradient=self.input_gradient or 0.0,
            weight_gradient=self.weight_gradient or 0.0,
            head=self.head,
        )


def unit_seconds(timeline: Timeline, table: Table, phases: Sequence[Phase]) -> UnitSeconds | None:
    """Return the times of units on the scheduled or the circular engine.

    A tick of the scheduled engine takes the sum of its slots. The ticks of its phases, without
    the conditionals of embedding and head, tell the slots apart. None if phases or loops do not.
    """
    seconds: dict[str, float] = {}
    for spent in timeline.spent:
        if spent.place.conditional.removesuffix(" gradient") in ("", *_WITHIN_CHUNKS):
            seconds[spent.place.phase] = seconds.get(spent.place.phase, 0.0) + spent.total
    if phases:
        times = _slot_seconds(phases, [seconds.get(f"phase_{n}", 0.0) for n in range(len(phases))])
    else:
        times = _iteration_seconds(timeline.loops)
    if times is None:
        return None
    return UnitSeconds(
        times["F"],
        times.get("B"),
        times.get("I"),
        times.get("W"),
        head=table.num_stages * _head_seconds(timeline, table, phases),
        repeats=table.num_chunks // table.num_stages,
    )


def _head_seconds(timeline: Timeline, table: Table, phases: Sequence[Phase]) -> float:
    """Return the seconds of a stage's share of one microbatch's head, which all stages share.

    The scheduled engine has a conditional for it; the circular one runs it after the pipeline.
    """
    if phases:
        heads = [c.seconds for c in timeline.conditionals if c.scope == "head" and c.taken]
        return max(heads, default=0.0)
    step = sum(spent.total for spent in timeline.spent if spent.origin.scope == "head")
    return step / table.num_microbatches


def _iteration_seconds(loops: Sequence[Loop]) -> dict[str, float] | None:
    """Return the times of one iteration of the longest loop in each direction."""
    times = {}
    for kind, direction in (("F", "forward"), ("B", "backward")):
        candidates = [loop for loop in loops if loop.phase.startswith(direction)]
        if not candidates:
            return None
        times[kind] = max(candidates, key=lambda loop: loop.iterations * loop.seconds).seconds
    return times


def _slot_seconds(phases: Sequence[Phase], seconds: Sequence[float]) -> dict[str, float] | None:
    """Solve for the times of slots by kind; phases with more ticks count more.

    None if the phases do not tell the kinds apart: also where a phase with more slots than
    another takes less, so that the time of one would be negative.
    """
    kinds = sorted({kind for phase in phases for kind in phase.kinds})
    ticks = np.array([phase.ticks for phase in phases], float)
    has = np.array([[kind in phase.kinds for kind in kinds] for phase in phases], float)
    weights = np.sqrt(ticks)
    solved, _, rank, _ = np.linalg.lstsq(weights[:, None] * has, np.array(seconds) / weights)
    if rank < len(kinds) or (solved < 0).any():
        return None
    return {kind: float(time) for kind, time in zip(kinds, solved, strict=True)}

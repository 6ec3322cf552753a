"""Where layers live: [num_layers, ...] on disk, [repeats, stages, layers_per_stage, ...] in a pipeline.

Letters: N layers in model order, V repeats, S stages, L layers per chunk (the largest, if chunks
are uneven), E rows of layers that run outside the pipeline: they live behind the others as if there
were more repeats, spread over the stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.rules.stages import num_stages
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import stages_of_chunks


@dataclass(frozen=True)
class StageLayout:
    """Chunks hold consecutive layers; which of them a stage holds says the placement, see `schedules._table`.

    Attributes:
      num_stages, num_repeats: S and V.
      chunk_sizes: layers of each of the V * S chunks in model order.
      num_outside: layers that run outside the pipeline.
      outside_first: they come before the pipeline's layers in model order, not after.
      placement: `loop` or `v`.
    """

    num_stages: int
    num_repeats: int
    chunk_sizes: tuple[int, ...]
    num_outside: int = 0
    outside_first: bool = False
    placement: str = "loop"

    def __post_init__(self) -> None:
        assert len(self.chunk_sizes) == self.num_stages * self.num_repeats, self

    @classmethod
    def even(cls, num_stages: int, num_repeats: int, layers_per_stage: int) -> "StageLayout":
        return cls(num_stages, num_repeats, (layers_per_stage,) * (num_stages * num_repeats))

    @property
    def num_layers(self) -> int:
        return sum(self.chunk_sizes) + self.num_outside

    @property
    def layers_per_stage(self) -> int:
        """L, the leading size of a chunk; smaller chunks are padded with layers that do nothing."""
        return max(self.chunk_sizes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(V + E, S, L), the leading dimensions of a live layer parameter."""
        outside_rows = -(-self.num_outside // (self.num_stages * self.layers_per_stage))
        return self.num_repeats + outside_rows, self.num_stages, self.layers_per_stage

    @property
    def is_even(self) -> bool:
        """Whether no chunk of the pipeline is padded."""
        return len(set(self.chunk_sizes)) == 1

    @property
    def _is_in_model_order(self) -> bool:
        return self.is_even and self.placement == "loop"

    @cached_property
    def outside_index(self) -> np.ndarray:
        """int32: indices in model order of the layers outside the pipeline."""
        first = 0 if self.outside_first else sum(self.chunk_sizes)
        return np.arange(first, first + self.num_outside, dtype=np.int32)

    @cached_property
    def layer_index(self) -> np.ndarray:
        """int32 [V + E, S, L]: index in model order; num_layers for padding."""
        index = np.full(self.shape, self.num_layers, np.int32)
        first = self.num_outside if self.outside_first else 0
        stages = stages_of_chunks(self.num_stages, self.num_repeats, self.placement)
        for chunk, (size, stage) in enumerate(zip(self.chunk_sizes, stages, strict=True)):
            index[chunk // self.num_stages, stage, :size] = np.arange(first, first + size)
            first += size
        index[self.num_repeats :].reshape(-1)[: self.num_outside] = self.outside_index
        return index

    def to_canonical(self, leaf: jax.Array) -> jax.Array:
        """[V + E, S, L, ...] -> [N, ...] in model order; padding is dropped."""
        rest = leaf.shape[3:]
        inside = leaf[: self.num_repeats].reshape(-1, *rest)
        if not self._is_in_model_order:
            order = np.argsort(self.layer_index[: self.num_repeats].reshape(-1), kind="stable")
            inside = inside[order[: sum(self.chunk_sizes)]]
        if not self.num_outside:
            return inside
        outside = leaf[self.num_repeats :].reshape(-1, *rest)[: self.num_outside]
        return jnp.concatenate([outside, inside] if self.outside_first else [inside, outside])

    def from_canonical(self, leaf: jax.Array) -> jax.Array:
        """[N, ...] -> [V + E, S, L, ...]; padding layers are zeros."""
        if self._is_in_model_order and not self.num_outside:
            return leaf.reshape(*self.shape, *leaf.shape[1:])
        padded = jnp.concatenate([leaf, jnp.zeros_like(leaf[:1])])
        return padded[self.layer_index]

    def stage_layers(self, stage: int) -> list[Sequence[int]]:
        """Model-order indices of the layers of each chunk of one stage, for reports."""
        rows = self.layer_index[: self.num_repeats, stage]
        return [[int(i) for i in row if i < self.num_layers] for row in rows]


def build_layout(config: Config) -> StageLayout:
    """Return which layer lives on which stage.

    Args:
      config: resolved, its stages chosen (`planning.auto_stages`).
    """
    assert config.pipeline.layers_per_stage != AUTO, (
        "stages are not chosen; see planning.auto_stages"
    )
    pipeline, stages = config.pipeline, num_stages(config)
    if pipeline.engine == "sequential":
        return StageLayout.even(1, 1, config.model.num_layers)
    even = [pipeline.num_layers_per_stage] * (stages * pipeline.num_repeats)
    return StageLayout(
        stages,
        pipeline.num_repeats,
        tuple(pipeline.layers_per_stage or even),
        num_outside=config.model.num_layers - pipeline.parallel_layers,
        outside_first=pipeline.outside_layers == "before",
        placement=build_table(config).placement if pipeline.engine == "mpmd" else "loop",
    )

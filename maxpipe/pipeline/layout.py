"""Convert layer parameters between disk, [N, ...] in model order, and pipeline, [V + E, S, L, ...].

Layers that run outside the pipeline are stored after the others, in E further rows as if there were
more repeats, so that they are spread over the stages too. Where each stage has its own program,
they are part of the first or the last chunk. Letters: see `maxpipe.pipeline`.

Example: S=2, V=2, L=1 and one layer outside, after the pipeline, so N=5 and E=1:

    layer_index = [[[0], [1]],     repeat 0
                   [[2], [3]],     repeat 1
                   [[4], [5]]]     outside; 5 = N is padding
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.rules.layout import chunk_layers, num_stages
from maxpipe.config.sections import Config
from maxpipe.config.values import AUTO
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import stages_of_chunks

# Logical axes of the leading dimensions [V + E, S, L] of live layer parameters.
LAYER_AXES = ("repeat", "stage", "layers_per_stage")


@dataclass(frozen=True)
class StageLayout:
    """The assignment of layers to stages; chunks hold consecutive layers.

    Attributes:
      num_stages, num_repeats: S and V.
      chunk_sizes: layers of each of the V * S chunks in model order.
      num_outside: number of layers that run outside the pipeline.
      outside_first: whether they come before the pipeline's layers in model order, not after.
      placement: which chunks a stage holds, `loop` or `v`; see `schedules.table`.
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
        """Return N, the number of stacked layers, those with parameters of equal shapes."""
        return sum(self.chunk_sizes) + self.num_outside

    @property
    def layers_per_stage(self) -> int:
        """Return L, the size of the largest chunk; smaller chunks are padded."""
        return max(self.chunk_sizes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (V + E, S, L), the leading dimensions of a live layer parameter."""
        outside_rows = -(-self.num_outside // (self.num_stages * self.layers_per_stage))
        return self.num_repeats + outside_rows, self.num_stages, self.layers_per_stage

    @property
    def is_even(self) -> bool:
        return len(set(self.chunk_sizes)) == 1

    @property
    def _is_in_model_order(self) -> bool:
        return self.is_even and self.placement == "loop"

    @cached_property
    def outside_index(self) -> np.ndarray:
        """Return the model-order indices of the layers outside, int32 [num_outside]."""
        first = 0 if self.outside_first else sum(self.chunk_sizes)
        return np.arange(first, first + self.num_outside, dtype=np.int32)

    @cached_property
    def layer_index(self) -> np.ndarray:
        """Return each layer's index in model order, N for padding; int32 [V + E, S, L]."""
        index = np.full(self.shape, self.num_layers, np.int32)
        first = self.num_outside if self.outside_first else 0
        stages = stages_of_chunks(self.num_stages, self.num_repeats, self.placement)
        for chunk, (size, stage) in enumerate(zip(self.chunk_sizes, stages, strict=True)):
            index[chunk // self.num_stages, stage, :size] = np.arange(first, first + size)
            first += size
        # [E, S, L] -> [E S L], a view: the layers outside fill its first places.
        index[self.num_repeats :].reshape(-1)[: self.num_outside] = self.outside_index
        return index

    def to_canonical(self, leaf: jax.Array) -> jax.Array:
        """Convert [V + E, S, L, ...] to [N, ...] in model order; padding is dropped."""
        # 1. Layers in the pipeline: [V, S, L, ...] -> [V S L, ...]
        trailing = leaf.shape[3:]
        inside = leaf[: self.num_repeats].reshape(-1, *trailing)
        if not self._is_in_model_order:
            # [V, S, L] -> [V S L]. Padding has the largest index, so sorting puts it last.
            order = np.argsort(self.layer_index[: self.num_repeats].reshape(-1), kind="stable")
            inside = inside[order[: sum(self.chunk_sizes)]]
        if not self.num_outside:
            return inside
        # 2. Layers outside: [E, S, L, ...] -> [E S L, ...], where layers come first.
        outside = leaf[self.num_repeats :].reshape(-1, *trailing)[: self.num_outside]
        return jnp.concatenate([outside, inside] if self.outside_first else [inside, outside])

    def from_canonical(self, leaf: jax.Array) -> jax.Array:
        """Convert [N, ...] to [V + E, S, L, ...]; padding layers are zeros."""
        if self._is_in_model_order and not self.num_outside:
            return leaf.reshape(*self.shape, *leaf.shape[1:])  # [N, ...] -> [V, S, L, ...]
        # Padding has index N: a layer of zeros after the others.
        padded = jnp.concatenate([leaf, jnp.zeros_like(leaf[:1])])
        return padded[self.layer_index]

    def stage_layers(self, stage: int) -> list[Sequence[int]]:
        """Return the model-order indices of the layers of each chunk of one stage, for reports."""
        rows = self.layer_index[: self.num_repeats, stage]
        return [[int(i) for i in row if i < self.num_layers] for row in rows]


def layers_in_chunks(config: Config) -> range:
    """Return the model-order indices of the layers that are in chunks, perhaps not all.

    Layers outside the pipeline are among them where a unit runs on one stage: there they are part
    of the first or the last chunk.
    """
    total, inside = config.model.stacked_layers, config.pipeline.parallel_layers
    if not ENGINES[config.pipeline.engine].one_program:
        return range(total)
    first = total - inside if config.pipeline.outside_layers == "before" else 0
    return range(first, first + inside)


def build_layout(config: Config) -> StageLayout:
    """Return which layer lives on which stage, of a resolved configuration."""
    assert config.pipeline.layers_per_stage != AUTO, "stages are not chosen; see plan.auto_stages"
    pipeline, stages = config.pipeline, num_stages(config)
    engine = ENGINES[pipeline.engine]
    if not engine.has_stages:
        return StageLayout.even(1, 1, config.model.stacked_layers)
    sizes = chunk_layers(config)
    return StageLayout(
        stages,
        pipeline.num_repeats,
        tuple(sizes),
        num_outside=config.model.stacked_layers - sum(sizes),
        outside_first=pipeline.outside_layers == "before",
        placement="loop" if engine.one_program else build_table(config).placement,
    )

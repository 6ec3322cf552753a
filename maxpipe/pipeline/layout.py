"""Where layers live: [num_layers, ...] on disk, [repeats, stages, layers_per_stage, ...] in a pipeline.

Letters: N layers in model order, V repeats, S stages, L layers per chunk (the largest, if chunks are uneven).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class StageLayout:
    """Loop placement: chunk v of stage s is global chunk v * S + s, and chunks hold consecutive layers.

    Attributes:
      num_stages, num_repeats: S and V.
      chunk_sizes: layers of each of the V * S chunks in model order.
    """

    num_stages: int
    num_repeats: int
    chunk_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.chunk_sizes) == self.num_stages * self.num_repeats, self

    @classmethod
    def even(cls, num_stages: int, num_repeats: int, layers_per_stage: int) -> "StageLayout":
        return cls(num_stages, num_repeats, (layers_per_stage,) * (num_stages * num_repeats))

    @property
    def num_layers(self) -> int:
        return sum(self.chunk_sizes)

    @property
    def layers_per_stage(self) -> int:
        """L, the leading size of a chunk; smaller chunks are padded with layers that do nothing."""
        return max(self.chunk_sizes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(V, S, L), the leading dimensions of a live layer parameter."""
        return self.num_repeats, self.num_stages, self.layers_per_stage

    @property
    def is_even(self) -> bool:
        return len(set(self.chunk_sizes)) == 1

    @cached_property
    def layer_index(self) -> np.ndarray:
        """int32 [V, S, L]: index in model order; num_layers for padding."""
        index = np.full((len(self.chunk_sizes), self.layers_per_stage), self.num_layers, np.int32)
        first = 0
        for chunk, size in enumerate(self.chunk_sizes):
            index[chunk, :size] = np.arange(first, first + size)
            first += size
        return index.reshape(self.shape)

    @cached_property
    def valid(self) -> np.ndarray:
        """bool [V, S, L]: False for padding layers."""
        return self.layer_index < self.num_layers

    def to_canonical(self, leaf: jax.Array) -> jax.Array:
        """[V, S, L, ...] -> [N, ...] in model order; padding is dropped."""
        flat = leaf.reshape(-1, *leaf.shape[3:])
        if self.is_even:
            return flat
        return flat[np.flatnonzero(self.valid.reshape(-1))]

    def from_canonical(self, leaf: jax.Array) -> jax.Array:
        """[N, ...] -> [V, S, L, ...]; padding layers are zeros."""
        if self.is_even:
            return leaf.reshape(*self.shape, *leaf.shape[1:])
        padded = jnp.concatenate([leaf, jnp.zeros_like(leaf[:1])])
        return padded[self.layer_index]

    def stage_layers(self, stage: int) -> list[Sequence[int]]:
        """Model-order indices of the layers of each chunk of one stage, for reports."""
        rows = self.layer_index[:, stage]
        return [[int(i) for i in row if i < self.num_layers] for row in rows]

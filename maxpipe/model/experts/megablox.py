"""Multiply groups of rows with JAX's TPU kernel (megablox, Gale et al. 2022, arXiv:2211.15841).

Letters: A assignments, P rows, E experts, D and F widths.
"""

import jax

from maxpipe.config.sections import ModelConfig
from maxpipe.model.experts.dispatch import Layout, Places

_LANES = 128
_SUBLANES = 8  # the kernel has been tried only with widths that are multiples of it
# The largest tile. The last one of a width may be partly full: gpt-oss's 2880 columns take three.
_ROWS, _WIDTH = 512, 1024


class Megablox:
    """The kernel; see `maxpipe.model.experts`."""

    @staticmethod
    def unfit(config: ModelConfig) -> str:
        """Return why the kernel cannot serve a model, or an empty string."""
        for key, size in (("embed_dim", config.embed_dim), ("moe.mlp_dim", config.expert_dim)):
            if size % _SUBLANES:
                return f"model.{key}={size} is not a multiple of {_SUBLANES}"
        return ""

    @staticmethod
    def layout(num_assignments: int, num_experts: int, most: int | None = None) -> Layout:
        """Return as many rows as fill whole tiles; groups may begin anywhere."""
        most = num_assignments if most is None else most
        tile = _row_tile(most)
        return Layout(-(-most // tile) * tile, 1, most > num_assignments)

    @staticmethod
    def multiply(rows: jax.Array, weights: jax.Array, places: Places, layout: Layout) -> jax.Array:
        """Return rows [P, D] times the weights [E, D, F] of their experts, [P, F]."""
        # The module registers kernels when it is imported, which only TPUs need.
        from jax.experimental.pallas.ops.tpu.megablox import gmm

        # The kernel skips rows of no group, and leaves them undefined. Zero rows at the end join
        # the last group; if there are many they are skipped, since nothing reads their results.
        padding = 0 if layout.is_sparse else max(0, layout.num_rows - places.rows.size)
        sizes = places.sizes.at[-1].add(padding)
        product: jax.Array = gmm(rows, weights, sizes, rows.dtype, tiling=_tiles)
        return product


def _tiles(num_rows: int, contracted: int, width: int) -> tuple[int, int, int]:
    return _row_tile(num_rows), min(contracted, _WIDTH), min(width, _WIDTH)


def _row_tile(num_rows: int) -> int:
    return _ROWS if num_rows >= 8 * _ROWS else _LANES

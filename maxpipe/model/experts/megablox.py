"""Multiply groups of rows with JAX's TPU kernel (megablox, Gale et al. 2022, arXiv:2211.15841).

Letters: A assignments, P rows, E experts, D and F widths.
"""

from collections.abc import Callable
from functools import cache

import jax

from maxpipe.config.sections import ModelConfig
from maxpipe.devices.chips import ROW_TILE
from maxpipe.model.experts.dispatch import Layout, Places

_LANES = 128
_SUBLANES = 8  # the kernel has been tried only with widths that are multiples of it
# The largest width of a tile. The last one may be partly full: gpt-oss's 2880 columns take three.
_WIDTH = 1024


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
        tile = _row_tile(most, num_assignments // num_experts)
        return Layout(-(-most // tile) * tile, 1, most > num_assignments, tile=tile)

    @staticmethod
    def multiply(rows: jax.Array, weights: jax.Array, places: Places, layout: Layout) -> jax.Array:
        """Return rows [P, D] times the weights [E, D, F] of their experts, [P, F]."""
        # The module registers kernels when it is imported, which only TPUs need.
        from jax.experimental.pallas.ops.tpu.megablox import gmm

        # The kernel skips rows of no group, and leaves them undefined. Zero rows at the end join
        # the last group; if there are many they are skipped, since nothing reads their results.
        padding = 0 if layout.is_sparse else max(0, layout.num_rows - places.rows.size)
        sizes = places.sizes.at[-1].add(padding)
        tiling = _tiling(layout.tile)
        product: jax.Array = gmm(rows, weights, sizes, rows.dtype, tiling=tiling)
        return product


@cache
def _tiling(tile: int) -> Callable[[int, int, int], tuple[int, int, int]]:
    """Return the function from the sizes of a product to those of its tiles."""
    return lambda num_rows, contracted, width: (
        tile,
        min(contracted, _WIDTH),
        min(width, _WIDTH),
    )


def _row_tile(num_rows: int, rows_of_expert: int) -> int:
    """Return the rows of a tile, given those of all experts, and of one on average.

    A tile with rows of two experts is multiplied with the weights of both, so tiles are small next
    to the rows of an expert; the larger they are, the less often weights are read.
    """
    if rows_of_expert >= 4 * ROW_TILE and num_rows >= 8 * ROW_TILE:
        return ROW_TILE
    return ROW_TILE // 2 if num_rows >= 4 * ROW_TILE else _LANES

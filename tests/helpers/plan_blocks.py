"""Blocks of candidates of a small model, as the search for a plan prices them."""

from collections.abc import Mapping, Sequence

import numpy as np

from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.plan.search.block import block_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.sizes import BlockSizes
from maxpipe.plan.search.space import Space

SIZES = {
    "model.num_layers": 8,
    "model.embed_dim": 64,
    "model.num_query_heads": 8,
    "model.mlp_dim": 1024,
    "model.vocab_size": 16,
    "data.sequence_length": 2,
    "data.global_batch_size": 64,
    "eval.every": 0,
    "pipeline.num_repeats": 1,
}


def sizes_of(
    engine: str,
    schedule: str,
    mesh: Mapping[str, int] | None = None,
    fixed: Mapping[str, object] | None = None,
    **choices: Sequence[object],
) -> BlockSizes:
    """Return the sizes of a block on four stages and two groups of devices.

    Args:
      engine, schedule: of all candidates.
      mesh: sizes of axes, where they are others.
      fixed: keys and values of the configuration.
      choices: values of pipeline keys to try.
    """
    config = replace(Config(), **{**SIZES, **(fixed or {})})
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    sizes = {"stage": 4, "data": 2, **(mesh or {})}
    tried: dict[str, Sequence[object]] = {
        f"mesh.ici.{axis}": [size] for axis, size in sizes.items()
    }
    tried |= {"pipeline.num_repeats": [1], "pipeline.num_microbatches": [8, 16]}
    tried |= {f"pipeline.{key}": values for key, values in choices.items()}
    devices = int(np.prod([*sizes.values()]))
    space = Space(config, devices, 1, tried)
    (grid,) = space.grids()
    (scans,) = space.scans(engine)
    block = block_of(space, Legality(config), grid, engine, schedule, 64, scans=scans)
    return BlockSizes(block, Facts(config), None)

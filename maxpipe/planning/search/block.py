"""Price all candidates of one mesh, engine, schedule and batch at once.

Arrays have the dimensions [M, V, policies, gathers, tiles], of size 1 where nothing differs.

Letters: S stages, V repeats, M microbatches, D embed.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.planning.footprint import itemsize, optimizer_bytes
from maxpipe.planning.prefetch import KEY as PREFETCH
from maxpipe.planning.prefetch import LONGEST_RING, MEMORY_SHARE
from maxpipe.planning.search.facts import Facts
from maxpipe.planning.search.legality import Legality
from maxpipe.planning.search.patterns import Pattern, pattern
from maxpipe.planning.search.space import Grid, Space

DIMENSIONS = ("microbatches", "repeats", "policy", "gather", "tiles")


class Block(NamedTuple):
    """Candidates that share a mesh, an engine, a schedule and a batch.

    Attributes:
      grid, engine, schedule, batch: what they share; `batch` is in sequences.
      microbatches, repeats: int [M] and [V], the numbers to try.
      policies, gathers, tiles: the values to try.
      chunk, outside: int [V], layers of a chunk and outside the pipeline.
    """

    grid: Grid
    engine: str
    schedule: str
    batch: int
    microbatches: np.ndarray
    repeats: np.ndarray
    policies: tuple[str, ...]
    gathers: tuple[str, ...]
    tiles: np.ndarray
    chunk: np.ndarray
    outside: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of all dimensions."""
        axes = (self.microbatches, self.repeats, self.policies, self.gathers, self.tiles)
        return tuple(len(axis) for axis in axes)


def block_of(
    space: Space, legality: Legality, grid: Grid, engine: str, schedule: str, batch: int
) -> Block:
    """Return the block of a mesh, an engine, a schedule and a batch."""
    stages = grid.size("stage")
    repeats = np.array(space.repeats(schedule, stages))
    _, chunk, outside = legality.of_layers(engine, schedule, stages, repeats)

    def words(key: str) -> tuple[str, ...]:
        return tuple(map(str, space.values(key, engine)))

    tiles = np.array([int(str(n)) for n in space.values("model.logit_tiles", engine)])
    return Block(
        grid,
        engine,
        schedule,
        batch,
        np.array(space.microbatches(batch, grid)),
        repeats,
        words("pipeline.remat_policy"),
        words("pipeline.fsdp_gather"),
        tiles,
        chunk,
        outside,
    )


def along(values: np.ndarray | list[float], dimension: str) -> np.ndarray:
    """Return values as an array that varies along one dimension of a block."""
    shape = [1] * len(DIMENSIONS)
    shape[DIMENSIONS.index(dimension)] = -1
    return np.asarray(values, float).reshape(shape)


class BlockSizes:
    """Sizes and counts of a block's candidates, as arrays.

    Args:
      block: the candidates.
      facts: of the model.
      capacity: bytes of a device; None if unknown.
    """

    def __init__(self, block: Block, facts: Facts, capacity: float | None):
        config, grid = facts.config, block.grid
        self.block, self.facts, self.config = block, facts, config
        self.capacity = capacity or 0.0
        self.engine = ENGINES[block.engine]
        self.stages = grid.size("stage")
        self.microbatches = along(block.microbatches, "microbatches")
        self.repeats = along(block.repeats, "repeats")
        self.layers = along(np.maximum(block.chunk, 1), "repeats")
        self.outside = along(block.outside, "repeats")
        self.rows = np.maximum(block.batch / (self.microbatches * grid.batch_shards), 1.0)
        self.tokens = self.rows * config.data.sequence_length / grid.size("context")
        self.itemsize = itemsize(config.model.dtype)
        self.parameters = facts.parameters(grid.sizes)
        self.layer = facts.layer(grid.sizes)
        savings = [facts.saving(grid.sizes, block.engine, policy) for policy in block.policies]
        self.residuals = along([s.residuals for s in savings], "policy")
        self.stash = along([s.stash for s in savings], "policy")
        self.handed_over = along([s.handed_over for s in savings], "policy")
        self.held = along([s.held for s in savings], "policy")
        self.recomputed = along([s.recomputed for s in savings], "policy")

    def gathers(self, name: str) -> np.ndarray:
        """Return 1 where weights are gathered so often, else 0."""
        return along([float(gather == name) for gather in self.block.gathers], "gather")

    def gathers_ahead(self) -> np.ndarray:
        """Return 1 where weights are gathered a slot ahead, by the rules of `planning.prefetch`."""
        pipeline, ring = self.config.pipeline, self.block.grid.size("fsdp")
        asked = pipeline.fsdp_prefetch
        if not self.engine.takes(PREFETCH) or ring == 1 or asked == "false":
            return np.zeros((1,) * len(DIMENSIONS))
        chunk = 2 * self.layers * self.parameters.layer_gathered * self.itemsize
        is_small = chunk <= MEMORY_SHARE * self.capacity
        scans = (self.layers > 1) & pipeline.scan_layers_per_stage
        ahead = (is_small & (ring <= LONGEST_RING)) | (asked == "true")
        return (ahead & ~scans) * self.gathers("per_iteration")

    @cached_property
    def patterns(self) -> list[list[Pattern]]:
        """Return the schedule's pattern for each M and V."""
        config, block = self.config, self.block
        return [
            [
                pattern(
                    block.schedule,
                    block.engine,
                    self.stages,
                    int(m),
                    int(v),
                    delay=2 if config.pipeline.delay_activation_forwarding else 1,
                    slack=int(config.pipeline.overlap_slots),
                )
                for v in block.repeats
            ]
            for m in block.microbatches
        ]

    def of_pattern(self, name: str) -> np.ndarray:
        """Return a number of the patterns, [M, V, 1, 1, 1]."""
        values = [[getattr(p, name) for p in row] for row in self.patterns]
        return np.array(values, float)[:, :, None, None, None]

    @property
    def splits_backward(self) -> bool:
        """Return whether weight gradients are units of their own."""
        return self.engine.has_stages and SCHEDULES[self.block.schedule].splits_backward


def state_per_parameter(config: Config) -> float:
    """Return the bytes of a parameter at rest with its optimizer's state."""
    return itemsize(config.model.param_dtype) + optimizer_bytes(config)


def block_of_configuration(config: Config) -> Block | None:
    """Return a resolved configuration as a block of one; None if its schedule is a file."""
    pipeline = config.pipeline
    if ENGINES[pipeline.engine].has_stages and pipeline.schedule not in SCHEDULES:
        return None
    ici, dcn = (
        tuple(getattr(level, axis) for axis in MESH_AXES)
        for level in (config.mesh.ici, config.mesh.dcn)
    )
    has_stages = ENGINES[pipeline.engine].has_stages
    layers = config.model.num_layers
    chunks = config.mesh.size("stage") * pipeline.num_repeats
    inside = pipeline.parallel_layers if has_stages else layers
    return Block(
        Grid(ici, dcn),
        pipeline.engine,
        pipeline.schedule,
        config.data.global_batch_size,
        np.array([pipeline.num_microbatches]),
        np.array([pipeline.num_repeats]),
        (pipeline.remat_policy,),
        (pipeline.fsdp_gather,),
        np.array([config.model.logit_tiles]),
        np.array([-(-inside // chunks) if has_stages else layers]),
        np.array([layers - inside]),
    )

"""Hold the candidates of one mesh, engine, schedule and batch as arrays.

Arrays have the dimensions [M, V, policies, gathers, tiles], of size 1 where nothing differs.

Letters: S stages, V repeats, M microbatches, D embed.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.rules.layout import chunk_layers, num_stages
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.values import AUTO
from maxpipe.plan.prefetch import changes_step
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.space import GATHERS, Grid, Space

DIMENSIONS = ("microbatches", "repeats", "policy", "gather", "tiles")


class Block(NamedTuple):
    """Candidates that share a mesh, an engine, a schedule and a batch.

    Attributes:
      grid, engine, schedule, batch: what they share; `batch` is in sequences.
      scans: whether all layers run in a loop; shared, too.
      microbatches, repeats: int [M] and [V], the numbers to try.
      policies, gathers, tiles: the values to try.
      chunk, outside: int [V], layers of a chunk and outside the pipeline.
    """

    grid: Grid
    engine: str
    schedule: str
    batch: int
    scans: bool
    microbatches: np.ndarray
    repeats: np.ndarray
    policies: tuple[str, ...]
    gathers: tuple[str, ...]
    tiles: np.ndarray
    chunk: np.ndarray
    outside: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        axes = (self.microbatches, self.repeats, self.policies, self.gathers, self.tiles)
        return tuple(len(axis) for axis in axes)


def block_of(
    space: Space,
    legality: Legality,
    grid: Grid,
    engine: str,
    schedule: str,
    batch: int,
    *,
    scans: bool = True,
) -> Block:
    stages = grid.size("stage")
    repeats = np.array(space.repeats(schedule, stages))
    _, chunk, outside = legality.of_layers(engine, schedule, stages, repeats)

    def words(key: str) -> tuple[str, ...]:
        return tuple(map(str, space.values(key, engine)))

    gathers = words(GATHERS)
    casts = space.config.model.narrows_parameters
    if GATHERS not in space.choices and not changes_step(ENGINES[engine], grid.size, casts=casts):
        gathers = tuple(g for g in gathers if g == "per_iteration") or gathers
    tiles = np.array([int(str(n)) for n in space.values("model.logit_tiles", engine)])
    return Block(
        grid=grid,
        engine=engine,
        schedule=schedule,
        batch=batch,
        scans=scans,
        microbatches=np.array(space.microbatches(batch, grid)),
        repeats=repeats,
        policies=words("pipeline.remat_policy"),
        gathers=gathers,
        tiles=tiles,
        chunk=chunk,
        outside=outside,
    )


def along(values: np.ndarray | list[float], dimension: str) -> np.ndarray:
    """Return values as an array that varies along one dimension of a block."""
    shape = [1] * len(DIMENSIONS)
    shape[DIMENSIONS.index(dimension)] = -1
    return np.asarray(values, float).reshape(shape)


def has_closed_form(config: Config) -> bool:
    """Return whether a resolved configuration can be a block: its schedule is not from a file."""
    pipeline = config.pipeline
    return not ENGINES[pipeline.engine].has_stages or pipeline.schedule in SCHEDULES


def block_of_configuration(config: Config) -> Block:
    """Return a resolved configuration for which `has_closed_form` is true as a block of one."""
    pipeline = config.pipeline
    ici, dcn = (
        tuple(getattr(level, axis) for axis in MESH_AXES)
        for level in (config.mesh.ici, config.mesh.dcn)
    )
    chunk, outside = _layers_of(config)
    is_undecided = pipeline.fsdp_gather == "auto"
    return Block(
        grid=Grid(ici, dcn),
        engine=pipeline.engine,
        schedule=pipeline.schedule,
        batch=config.data.global_batch_size,
        scans=pipeline.scan_layers,
        microbatches=np.array([pipeline.num_microbatches]),
        repeats=np.array([pipeline.num_repeats]),
        policies=(pipeline.remat_policy,),
        gathers=("per_iteration" if is_undecided else pipeline.fsdp_gather,),
        tiles=np.array([config.model.logit_tiles]),
        chunk=np.array([chunk]),
        outside=np.array([outside]),
    )


def _layers_of(config: Config) -> tuple[int, int]:
    """Return the layers of the largest chunk (others are padded or wait), and those outside."""
    pipeline, layers = config.pipeline, config.model.stacked_layers
    if not ENGINES[pipeline.engine].has_stages:
        return layers, 0
    if pipeline.layers_per_stage == AUTO:  # not chosen yet: as even as can be
        return -(-layers // (num_stages(config) * pipeline.num_repeats)), 0
    sizes = chunk_layers(config)
    return max(sizes), layers - sum(sizes)

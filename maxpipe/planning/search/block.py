"""Price all candidates of one mesh, engine, schedule and batch at once.

Arrays have the dimensions [M, V, policies, gathers, tiles], of size 1 where nothing differs.

Letters: S stages, V repeats, M microbatches, D embed.
"""

from typing import NamedTuple

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.planning.prefetch import changes_step
from maxpipe.planning.search.legality import Legality
from maxpipe.planning.search.space import GATHERS, Grid, Space

DIMENSIONS = ("microbatches", "repeats", "policy", "gather", "tiles")


class Block(NamedTuple):
    """Candidates that share a mesh, an engine, a schedule and a batch.

    Attributes:
      grid, engine, schedule, batch: what they share; `batch` is in sequences.
      scans: whether all layers are a loop; they share this, too.
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
        """Return the sizes of all dimensions."""
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
    """Return the block of a mesh, an engine, a schedule, a batch and a loop over layers or none."""
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
        grid,
        engine,
        schedule,
        batch,
        scans,
        np.array(space.microbatches(batch, grid)),
        repeats,
        words("pipeline.remat_policy"),
        gathers,
        tiles,
        chunk,
        outside,
    )


def along(values: np.ndarray | list[float], dimension: str) -> np.ndarray:
    """Return values as an array that varies along one dimension of a block."""
    shape = [1] * len(DIMENSIONS)
    shape[DIMENSIONS.index(dimension)] = -1
    return np.asarray(values, float).reshape(shape)


def has_closed_form(config: Config) -> bool:
    """Return whether a resolved configuration can be a block: its schedule is no file."""
    pipeline = config.pipeline
    return not ENGINES[pipeline.engine].has_stages or pipeline.schedule in SCHEDULES


def block_of_configuration(config: Config) -> Block:
    """Return a resolved configuration, one that `has_closed_form`, as a block of one."""
    pipeline = config.pipeline
    has_stages = ENGINES[pipeline.engine].has_stages
    ici, dcn = (
        tuple(getattr(level, axis) for axis in MESH_AXES)
        for level in (config.mesh.ici, config.mesh.dcn)
    )
    layers = config.model.stacked_layers
    chunks = config.mesh.size("stage") * pipeline.num_repeats
    inside = pipeline.parallel_layers if has_stages else layers
    return Block(
        Grid(ici, dcn),
        pipeline.engine,
        pipeline.schedule,
        config.data.global_batch_size,
        pipeline.scan_layers,
        np.array([pipeline.num_microbatches]),
        np.array([pipeline.num_repeats]),
        (pipeline.remat_policy,),
        (pipeline.fsdp_gather,),
        np.array([config.model.logit_tiles]),
        np.array([-(-inside // chunks) if has_stages else layers]),
        np.array([layers - inside]),
    )

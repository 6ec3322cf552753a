"""Hold the candidates of one mesh, engine, schedule and batch, and the sizes that they share.

Letters: N candidates, S stages, V repeats, M microbatches.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.rules.engines import ring_obstacle
from maxpipe.config.rules.layout import chunk_layers, num_stages
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.config.values import AUTO
from maxpipe.devices.chips import Tpu
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import Table
from maxpipe.plan.device_parameters import Parameters, StageParameters
from maxpipe.plan.footprint import PREFETCH, changes_step, itemsize
from maxpipe.plan.layer_costs import Saving
from maxpipe.plan.number import Number
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import layout_of
from maxpipe.plan.search.patterns import Pattern, pattern, pattern_of_table
from maxpipe.plan.search.space import GATHERS, Grid, Space

# Most of a device's memory for gathered keys and values. A ring takes less, but more time.
KEYS_SHARE = 0.05
_COLUMNS = ("microbatches", "repeats", "chunk", "outside", "policy", "gather", "tiles")


@dataclass(frozen=True)
class Block:
    """Candidates that share a mesh, an engine, a schedule and a batch."""

    grid: Grid
    engine: str
    schedule: str
    batch: int  # in sequences
    scans: bool  # whether all layers run in a loop
    policies: tuple[str, ...]  # that are tried
    gathers: tuple[str, ...]
    microbatches: np.ndarray  # int [N], as all that follow
    repeats: np.ndarray
    chunk: np.ndarray  # layers of a chunk, 0 if there are too few
    outside: np.ndarray  # layers outside the pipeline
    policy: np.ndarray  # places in `policies`
    gather: np.ndarray  # places in `gathers`
    tiles: np.ndarray

    def __len__(self) -> int:
        return len(self.tiles)

    def only(self, chosen: np.ndarray) -> "Block":
        return replace(self, **{name: getattr(self, name)[chosen] for name in _COLUMNS})


def block_of(
    space: Space, grid: Grid, engine: str, schedule: str, batch: int, *, scans: bool = True
) -> Block:
    """Return all candidates of a space with this mesh, engine, schedule and batch, legal or not."""
    stages, layers = grid.size("stage"), space.config.model.stacked_layers
    repeats = space.repeats(schedule, stages)
    layouts = [layout_of(engine, layers, stages, number) for number in repeats]
    policies, gathers = (
        tuple(map(str, space.values(key, engine))) for key in ("pipeline.remat_policy", GATHERS)
    )
    casts = space.config.model.narrows_parameters
    if GATHERS not in space.choices and not changes_step(ENGINES[engine], grid.size, casts=casts):
        gathers = tuple(g for g in gathers if g == "per_iteration") or gathers
    columns: tuple[Sequence[int], ...] = (
        space.microbatches(batch, grid),
        range(len(repeats)),
        range(len(policies)),
        range(len(gathers)),
        [int(str(n)) for n in space.values("model.logit_tiles", engine)],
    )
    grids = np.meshgrid(*(np.array(c, int) for c in columns), indexing="ij")
    microbatches, v, policy, gather, tiles = (column.reshape(-1) for column in grids)
    return Block(
        grid=grid,
        engine=engine,
        schedule=schedule,
        batch=batch,
        scans=scans,
        policies=policies,
        gathers=gathers,
        microbatches=microbatches,
        repeats=np.array(repeats, int)[v],
        chunk=np.array([layout.chunk for layout in layouts], int)[v],
        outside=np.array([layout.outside for layout in layouts], int)[v],
        policy=policy,
        gather=gather,
        tiles=tiles,
    )


def has_closed_form(config: Config) -> bool:
    """Return whether a resolved configuration can be a block: its schedule is not from a file."""
    pipeline = config.pipeline
    return not ENGINES[pipeline.engine].has_stages or pipeline.schedule in SCHEDULES


def block_of_configuration(config: Config) -> Block:
    """Return a resolved configuration for which `has_closed_form` is true as a block of one."""
    pipeline, mesh = config.pipeline, config.mesh
    ici, dcn = (tuple(getattr(level, a) for a in MESH_AXES) for level in (mesh.ici, mesh.dcn))
    chunk, outside = _layers_of(config)
    is_undecided = pipeline.fsdp_gather == "auto"
    return Block(
        grid=Grid(ici, dcn),
        engine=pipeline.engine,
        schedule=pipeline.schedule,
        batch=config.data.global_batch_size,
        scans=pipeline.scan_layers,
        policies=(pipeline.remat_policy,),
        gathers=("per_iteration" if is_undecided else pipeline.fsdp_gather,),
        microbatches=np.array([pipeline.num_microbatches]),
        repeats=np.array([pipeline.num_repeats]),
        chunk=np.array([chunk]),
        outside=np.array([outside]),
        policy=np.array([0]),
        gather=np.array([0]),
        tiles=np.array([config.model.logit_tiles]),
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


class BlockSizes:
    """Sizes and counts of a block's candidates: numbers that they share, or float [N].

    `tpu` is None if the device is not a TPU. `table` is the schedule of a block of one, if it is
    from a file.
    """

    def __init__(self, block: Block, facts: Facts, tpu: Tpu | None, table: Table | None = None):
        config, grid = facts.config, block.grid
        self.block, self.facts, self.config = block, facts, config
        self.tpu, self._table = tpu, table
        self.engine = ENGINES[block.engine]
        self.stages = grid.size("stage")
        self.microbatches = block.microbatches.astype(float)
        self.repeats = block.repeats.astype(float)
        self.tiles = block.tiles.astype(float)
        self.layers = np.maximum(block.chunk, 1.0)
        self.outside = block.outside.astype(float)
        self.rows = np.maximum(block.batch / (self.microbatches * grid.batch_shards), 1.0)
        self.tokens = self.rows * config.data.sequence_length / grid.size("context")
        self.itemsize = itemsize(config.model.dtype)
        self.parameters = facts.parameters(grid.sizes)
        self.trained = facts.trained.parameters(grid.sizes)
        self.weights, self.trained_weights = map(self._on_stage, (self.parameters, self.trained))
        self.layer = facts.layer(grid.sizes)
        self.saving = self._saving()
        # Layers that are each compiled by itself are gathered before a loop over microbatches.
        self.gathers_before_loop = self.is_unrolled * (self.microbatches > 1)
        saves_all = np.maximum(self.saving.saves_all, self.gathers_before_loop)
        self.keeps_gathered = self.is_unrolled * saves_all

    def _saving(self) -> Saving:
        block, axes = self.block, self.block.grid.sizes
        of_policies = [
            self.facts.saving(axes, block.engine, policy, scans=block.scans)
            for policy in block.policies
        ]
        names = [field.name for field in fields(Saving)]
        columns = {name: np.array([getattr(s, name) for s in of_policies]) for name in names}
        return Saving(**{name: column[block.policy] for name, column in columns.items()})

    def _on_stage(self, parameters: Parameters) -> StageParameters:
        if not (self.engine.has_stages and self.engine.one_program):
            # Separate programs have chunks of their own sizes.
            return StageParameters(parameters, self.config.model.stacked_layers / self.stages)
        rows = np.ceil(self.outside / (self.stages * self.layers)) * self.layers
        return StageParameters(parameters, self.repeats * self.layers, rows, self.outside)

    def share_of_outside(self) -> Number:
        """Return a device's share of a microbatch's work in layers outside the pipeline.

        One program divides it among the stages; lockstep engines by whole sequences, padded to
        equal numbers.
        """
        if not self.engine.lockstep:
            return 1.0 / self.stages if self.engine.one_program else 1.0
        rows = np.floor(self.rows)
        return np.ceil(rows / self.stages) / rows

    def gathers(self, name: str) -> np.ndarray:
        """Return 1 where weights are gathered as often as `name` says, else 0."""
        return np.array([float(gather == name) for gather in self.block.gathers])[self.block.gather]

    @property
    def gathers_once(self) -> np.ndarray:
        """Return 1 where weights are cast and gathered once a step, else 0."""
        parameters = self.parameters
        whole_ends = parameters.embed_gathered + parameters.head_gathered
        is_any_split = self.is_split or (
            whole_ends > parameters.embed_of_stage + parameters.head_of_stage
        )
        return self.gathers("once") * (is_any_split or self.config.model.narrows_parameters)

    @property
    def is_split(self) -> bool:
        return self.parameters.layer_gathered > self.parameters.layer_at_rest

    def gathers_of_unit(self) -> np.ndarray:
        """Return the number of gathers of a layer per forward, where units gather."""
        return np.where(self.gathers_before_loop, 1.0 / self.microbatches, 1.0)

    def gathers_in_steps(self) -> Number:
        """Return 1 where weights are gathered in steps, by the rules of `plan.choices`."""
        pipeline, ring = self.config.pipeline, self.block.grid.size("fsdp")
        prefetch = pipeline.fsdp_prefetch
        if not self.engine.takes(PREFETCH) or ring == 1 or prefetch == "false":
            return 0.0
        scans = (self.layers > 1) & pipeline.scan_layers_per_stage
        does = prefetch == "true" or (self.tpu is not None and ring <= self.tpu.longest_ring)
        return does * ~scans * self.gathers("per_iteration")

    @property
    def gathered_keys(self) -> Number:
        """Return the bytes of other devices' keys and values, gathered, and of their gradients."""
        others = self.block.grid.size("context") - 1
        return 2 * others * self.tokens * self.itemsize * self.layer.key_values

    @property
    def in_ring(self) -> Number:
        """Return 1 where keys and values go around a ring instead, else 0."""
        strategy, tpu = self.config.sharding.context_strategy, self.tpu
        is_open = strategy == "auto" and self.block.grid.size("context") > 1
        if tpu is None or not is_open or ring_obstacle(self.config, self.block.engine):
            return float(strategy == "ring")
        return np.greater(self.gathered_keys, KEYS_SHARE * tpu.memory)

    @cached_property
    def _patterns(self) -> tuple[list[Pattern], np.ndarray]:
        """Return the different patterns, and int [N], the place of each candidate's."""
        config, block = self.config, self.block
        if self._table is not None:
            return [pattern_of_table(self._table, block.engine)], np.zeros(len(block), int)
        pairs = np.stack([block.microbatches, block.repeats])
        numbers, places = np.unique(pairs, axis=1, return_inverse=True)
        patterns = [
            pattern(
                block.schedule,
                block.engine,
                self.stages,
                int(microbatches),
                int(repeats),
                delay=config.pipeline.forwarding_delay,
                slack=int(config.pipeline.overlap_slots),
            )
            for microbatches, repeats in numbers.T
        ]
        return patterns, places.reshape(-1)

    def of_pattern(self, name: str) -> np.ndarray:
        patterns, places = self._patterns
        return np.array([getattr(p, name) for p in patterns], float)[places]

    def in_flight(self, place: int) -> np.ndarray:
        """Return what `Pattern.in_flight` says of the stages of a place, float [5, 6, N]."""
        patterns, places = self._patterns
        return np.stack([np.asarray(p.in_flight)[:, place] for p in patterns], -1)[..., places]

    @property
    def is_unrolled(self) -> bool:
        """Return whether layers without stages are each compiled by itself."""
        return not self.engine.has_stages and not self.block.scans

    @property
    def is_written_out(self) -> bool:
        """Return whether the engine runs backwards as units, not by differentiating a loop."""
        return self.engine.lockstep or not self.engine.one_program

    @property
    def splits_backward(self) -> bool:
        if self._table is not None:
            return "W" in self._table.kinds
        return self.engine.has_stages and SCHEDULES[self.block.schedule].splits_backward


def sizes_of_configuration(
    config: Config, tpu: Tpu | None, *, on_tpus: bool, table: Table | None = None
) -> BlockSizes:
    """Return the sizes of a resolved configuration, a block of one, with its schedule if at hand.

    `tpu` is None if the device is not a TPU or an unknown one. On TPUs, `auto` stands for their
    kernels; else kernels are as configured.
    """
    if table is None and not has_closed_form(config):
        table = build_table(config)
    facts = Facts(config, "tpu" if on_tpus else "")
    return BlockSizes(block_of_configuration(config), facts, tpu, table)

"""Compute sizes and counts of a block's candidates, as arrays of the block's dimensions.

Letters: S stages, V repeats, M microbatches, D embed.
"""

from functools import cached_property

import numpy as np

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.sections import Config
from maxpipe.devices.chips import Tpu
from maxpipe.pipeline.schedules.load import build_table
from maxpipe.pipeline.schedules.table import Table
from maxpipe.plan.footprint import itemsize
from maxpipe.plan.number import Number
from maxpipe.plan.prefetch import KEY as PREFETCH
from maxpipe.plan.search.block import (
    DIMENSIONS,
    Block,
    along,
    block_of_configuration,
    has_closed_form,
)
from maxpipe.plan.search.facts import Facts, Saving
from maxpipe.plan.search.patterns import InFlight, Pattern, pattern, pattern_of_table
from maxpipe.plan.weights_held import StageLayers


class BlockSizes:
    """Sizes and counts of a block's candidates, as arrays.

    Args:
      block: the candidates.
      tpu: the device's chip; None if it is not a TPU.
      table: the schedule of a block of one, if it is from a file; else None.
    """

    def __init__(self, block: Block, facts: Facts, tpu: Tpu | None, table: Table | None = None):
        config, grid = facts.config, block.grid
        self.block, self.facts, self.config = block, facts, config
        self.tpu, self._table = tpu, table
        self.engine = ENGINES[block.engine]
        self.stages = grid.size("stage")
        self.microbatches = along(block.microbatches, "microbatches")
        self.repeats = along(block.repeats, "repeats")
        self.layers = along(np.maximum(block.chunk, 1), "repeats")
        self.outside = along(block.outside, "repeats")
        self.num_first = config.model.first_dense_layers
        self.rows = np.maximum(block.batch / (self.microbatches * grid.batch_shards), 1.0)
        self.tokens = self.rows * config.data.sequence_length / grid.size("context")
        self.itemsize = itemsize(config.model.dtype)
        self.parameters = facts.parameters(grid.sizes)
        self.weights = self.parameters.parts.on_stage(self._stage_layers())
        self.trained = facts.trained.parameters(grid.sizes)
        self.trained_weights = self.trained.parts.on_stage(self._stage_layers())
        self.layer = facts.layer(grid.sizes)
        savings = [
            facts.saving(grid.sizes, block.engine, policy, scans=block.scans)
            for policy in block.policies
        ]
        self.saving = Saving._make(along([*each], "policy") for each in zip(*savings, strict=True))
        # Layers that are each compiled by itself are gathered before a loop over microbatches.
        self.gathers_before_loop = self.is_unrolled * np.greater(self.microbatches, 1)
        saves_all = np.maximum(self.saving.saves_all, self.gathers_before_loop)
        self.keeps_gathered = self.is_unrolled * saves_all

    def _stage_layers(self) -> StageLayers:
        if not (self.engine.has_stages and self.engine.one_program):
            # Separate programs have chunks of their own sizes.
            return StageLayers(self.config.model.stacked_layers / self.stages, 0.0, 0.0)
        rows = np.ceil(self.outside / (self.stages * self.layers))
        return StageLayers(self.repeats * self.layers, rows * self.layers, self.outside)

    def lockstep_share(self) -> Number:
        """Return the share of a microbatch that a stage has in layers outside the pipeline.

        Stages of a lockstep engine divide its sequences, each of which is on one stage, and pad
        them to equal numbers.
        """
        rows = np.floor(self.rows)
        return np.ceil(rows / self.stages) / rows

    def gathers(self, name: str) -> np.ndarray:
        """Return 1 where weights are gathered as often as `name` says, else 0."""
        return along([float(gather == name) for gather in self.block.gathers], "gather")

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

    def gathers_in_steps(self) -> np.ndarray:
        """Return 1 where weights are gathered in steps, by the rules of `plan.prefetch`."""
        pipeline, ring = self.config.pipeline, self.block.grid.size("fsdp")
        prefetch = pipeline.fsdp_prefetch
        if not self.engine.takes(PREFETCH) or ring == 1 or prefetch == "false":
            return np.zeros((1,) * len(DIMENSIONS))
        scans = (self.layers > 1) & pipeline.scan_layers_per_stage
        does = prefetch == "true" or (self.tpu is not None and ring <= self.tpu.longest_ring)
        return does * ~scans * self.gathers("per_iteration")

    @cached_property
    def patterns(self) -> list[list[Pattern]]:
        config, block = self.config, self.block
        if self._table is not None:
            return [[pattern_of_table(self._table, block.engine)]]
        return [
            [
                pattern(
                    block.schedule,
                    block.engine,
                    self.stages,
                    int(m),
                    int(v),
                    delay=self.config.pipeline.forwarding_delay,
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

    def in_flight(self, place: int) -> InFlight:
        """Return what stages of a place have in flight at fullest moments, [6, M, V, 1, 1, 1]."""
        values = np.array([[p.in_flight for p in row] for row in self.patterns], float)
        of_place = np.moveaxis(values[..., place, :], (0, 1), (-2, -1))
        return InFlight(*of_place[..., None, None, None])

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
        """Return whether weight gradients are units of their own."""
        if self._table is not None:
            return "W" in self._table.kinds
        return self.engine.has_stages and SCHEDULES[self.block.schedule].splits_backward


def sizes_of_configuration(
    config: Config, tpu: Tpu | None, *, on_tpus: bool, table: Table | None = None
) -> BlockSizes:
    """Return the sizes of a resolved configuration, a block of one.

    Args:
      tpu: the device's chip; None if it is not a TPU or an unknown one.
      on_tpus: whether `auto` stands for the kernels of TPUs; else kernels are as configured.
      table: its schedule, if that is at hand.
    """
    if table is None and not has_closed_form(config):
        table = build_table(config)
    facts = Facts(config, "tpu" if on_tpus else "")
    return BlockSizes(block_of_configuration(config), facts, tpu, table)

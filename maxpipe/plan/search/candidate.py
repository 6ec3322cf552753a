"""Hold one candidate: what it changes in the configuration, and what it is predicted to cost."""

from dataclasses import dataclass

import numpy as np

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.plan.search.block import Block
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import layout_of
from maxpipe.plan.search.seconds import Seconds
from maxpipe.plan.search.space import Grid


@dataclass(frozen=True)
class Candidate:
    """One way to train the model.

    Attributes:
      grid, engine, schedule, batch: mesh, engine, schedule, and sequences of a step.
      microbatches, repeats: M and V.
      policy, gather, tiles: values of remat_policy, fsdp_gather and logit_tiles.
      scans: value of scan_layers.
      layout: keys and values that say how layers lie on stages.
      memory: bytes on a device by the closed forms.
      seconds: times of the step by the closed forms.
    """

    grid: Grid
    engine: str
    schedule: str
    batch: int
    microbatches: int
    repeats: int
    policy: str
    gather: str
    tiles: int
    scans: bool
    layout: dict[str, object]
    memory: float
    seconds: Seconds

    @property
    def per_sequence(self) -> float:
        """Return the seconds of one sequence by the closed forms."""
        return float(self.seconds.step) / self.batch

    @property
    def sort(self) -> tuple[Grid, str, str, bool]:
        """Return what tells rows of the table apart: mesh, engine, schedule, and scan_layers."""
        return (self.grid, self.engine, self.schedule, self.scans)

    def is_twin(self, other: "Candidate") -> bool:
        """Return whether its sort differs from another candidate's in scan_layers alone."""
        return self.sort[:-1] == other.sort[:-1] and self.scans != other.scans

    @property
    def order(self) -> tuple[float, int, float]:
        """Return what candidates are ranked by: seconds of a sequence, tiles, then memory."""
        return (round(self.per_sequence, 9), self.tiles, self.memory)

    @property
    def has_stages(self) -> bool:
        """Return whether it is a pipeline."""
        return ENGINES[self.engine].has_stages

    def updates(self) -> dict[str, object]:
        """Return the keys that the plan decides, with their values."""
        return {
            **self.grid.updates(),
            **self.layout,
            "pipeline.engine": self.engine,
            "pipeline.schedule": self.schedule,
            "pipeline.num_microbatches": self.microbatches,
            "pipeline.num_repeats": self.repeats,
            "pipeline.remat_policy": self.policy,
            "pipeline.fsdp_gather": self.gather,
            "pipeline.scan_layers": self.scans,
            "model.logit_tiles": self.tiles,
            "data.global_batch_size": self.batch,
        }

    def config(self, shared: Config) -> Config:
        """Return the configuration of the candidate, not yet resolved."""
        return update(shared, self.updates())

    def mesh_text(self) -> str:
        """Return its mesh: "stage=2 fsdp=4", with "dcn.data=2" across slices."""
        words = [f"{axis}={n}" for axis, n in zip(MESH_AXES, self.grid.ici, strict=True) if n > 1]
        words += [
            f"dcn.{axis}={n}" for axis, n in zip(MESH_AXES, self.grid.dcn, strict=True) if n > 1
        ]
        return " ".join(words) or "one device"

    def schedule_text(self) -> str:
        """Return its schedule, or its engine where there are no stages."""
        if self.has_stages:
            return self.schedule
        return self.engine if self.scans else f"{self.engine}, unrolled"


def candidate_of(
    block: Block, index: int, memory: np.ndarray, seconds: Seconds, facts: Facts
) -> Candidate:
    """Return the candidate at an index of a block's flat arrays."""
    m, v, policy, gather, tiles = np.unravel_index(index, block.shape)
    repeats, layers = int(block.repeats[v]), facts.config.model.stacked_layers
    layout = layout_of(block.engine, layers, block.grid.size("stage"), repeats)
    return Candidate(
        block.grid,
        block.engine,
        block.schedule,
        block.batch,
        int(block.microbatches[m]),
        repeats,
        block.policies[policy],
        block.gathers[gather],
        int(block.tiles[tiles]),
        block.scans,
        layout.updates(layers),
        float(memory[index]),
        Seconds(*(float(np.asarray(part)[index]) for part in seconds)),
    )

"""Say which values of which keys the plan tries: the product that is searched.

Letters: S stages, V repeats, M microbatches.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from maxpipe.config.catalog import ENGINES, REMAT_POLICIES, SCHEDULES
from maxpipe.config.options import OPTIONS, get
from maxpipe.config.rules.engines import refusals_of
from maxpipe.config.rules.layout import SHARD_AXES
from maxpipe.config.rules.rule import divisors
from maxpipe.config.sections import MESH_AXES, Config

Axes: TypeAlias = tuple[int, ...]  # sizes in the order of MESH_AXES

# Splitting the batch, the parameters or the layers is worth the network between slices; XLA reduces
# what the other axes split within every layer.
_ACROSS_SLICES = ("data", "stage", "fsdp")
_BATCH_AXES = {key.rpartition(".")[2] for key in SHARD_AXES}
MESH_KEYS = tuple(f"mesh.{level}.{axis}" for level in ("ici", "dcn") for axis in MESH_AXES)
ENGINE = "pipeline.engine"
POLICY = "pipeline.remat_policy"
SCHEDULE = "pipeline.schedule"
REPEATS = "pipeline.num_repeats"
BATCH = "data.global_batch_size"
GATHERS = "pipeline.fsdp_gather"
SCANS = "pipeline.scan_layers"
MOST_UNROLLED = 64  # layers, since each is compiled by itself
SEARCHED = (
    *MESH_KEYS,
    ENGINE,
    SCHEDULE,
    "pipeline.num_microbatches",
    REPEATS,
    POLICY,
    GATHERS,
    SCANS,
    "model.logit_tiles",
    BATCH,
)
# What follows from the searched keys, and is written with them.
DERIVED = (
    "pipeline.num_layers_per_stage",
    "pipeline.layers_per_stage",
    "pipeline.parallel_layers",
)
# What follows from those, or from the devices that the command line names.
FOLLOWING = (
    *DERIVED,
    "pipeline.outside_layers",
    "compile.save",
    "compile.load",
    "compile.topology",
    "mesh.simulated_devices",
)
# A file's values of these need not be consistent, since candidates have others. Of the searched
# keys, the file's batch, tiles and schedule stay where nothing else is tried.
UNDECIDED = (
    *MESH_KEYS,
    "mesh.simulated_devices",
    ENGINE,
    "pipeline.num_microbatches",
    REPEATS,
    POLICY,
    GATHERS,
    SCANS,
    *DERIVED,
    "pipeline.outside_layers",
    "compile.topology",
    "compile.num_slices",
)


class Grid(NamedTuple):
    ici: Axes
    dcn: Axes

    @property
    def sizes(self) -> Axes:
        return tuple(i * d for i, d in zip(self.ici, self.dcn, strict=True))

    def size(self, axis: str) -> int:
        return self.sizes[MESH_AXES.index(axis)]

    @property
    def batch_shards(self) -> int:
        """Return into how many parts the rows of a batch are split."""
        return math.prod(map(self.size, _BATCH_AXES))

    @property
    def layer_shards(self) -> int:
        """Return the number of devices that share the computation of a layer on the same tokens."""
        return math.prod(map(self.size, {*MESH_AXES} - _BATCH_AXES - {"stage", "context"}))

    def updates(self) -> dict[str, object]:
        return dict(zip(MESH_KEYS, (*self.ici, *self.dcn), strict=True))


def unpriced(engine: str, hosts: int) -> str:
    """Return why an engine's step on so many hosts has no price; empty if it has one."""
    if hosts == 1 or ENGINES[engine].one_program:
        return ""
    return f"{engine} is priced on one host only, without transfers between {hosts} hosts"


@dataclass(frozen=True)
class Space:
    """The values that are tried."""

    config: Config  # what all candidates share
    devices: int  # of JAX, over all slices
    slices: int
    choices: Mapping[str, Sequence[object]]  # values that the user gave; others are enumerated
    is_tpu: bool = False  # loops there copy what they save, so unrolling may pay
    fixed: tuple[str, ...] = ()  # keys of `choices` whose one value every candidate has
    hosts: int = 1  # processes that drive the devices

    def grids(self) -> Iterator[Grid]:
        within = [*self._factorings("ici", self.devices // self.slices)]
        across = [*self._factorings("dcn", self.slices)]
        for dcn, ici in itertools.product(across, within):
            yield Grid(ici, dcn)

    def _factorings(self, level: str, count: int) -> Iterator[Axes]:
        def sizes(axis: str, left: int) -> list[int]:
            chosen = self.choices.get(f"mesh.{level}.{axis}")
            if chosen is not None:
                return [n for n in map(int, map(str, chosen)) if left % n == 0]
            # Every device gets an equal part; the rest would be computed twice.
            model = self.config.model
            parts = {"tensor": model.num_kv_heads, "expert": model.moe.experts or 1}.get(axis, left)
            if level == "dcn" and axis not in _ACROSS_SLICES:
                parts = 1
            return divisors(math.gcd(left, parts))

        def fill(axes: Sequence[str], left: int) -> Iterator[Axes]:
            if not axes:
                if left == 1:
                    yield ()
                return
            for n in sizes(axes[0], left):
                for others in fill(axes[1:], left // n):
                    yield (n, *others)

        yield from fill(MESH_AXES, count)

    def pipelines(self, stages: int) -> list[tuple[str, str]]:
        """Return (engine, schedule) of every way to run so many stages."""
        own = self.config.pipeline.schedule
        if stages == 1:
            pairs = [(name, own) for name, engine in ENGINES.items() if not engine.has_stages]
        else:
            pairs = [(e, name) for name, facts in SCHEDULES.items() for e in facts.engines]
        engines = self.choices.get(ENGINE)
        schedules = self.choices.get(SCHEDULE)
        return [
            (engine, schedule)
            for engine, schedule in pairs
            if not unpriced(engine, self.hosts)
            and (engines is None or engine in engines)
            and (schedules is None or stages == 1 or schedule in schedules)
        ]

    def values(self, key: str, engine: str) -> Sequence[object]:
        """Return the values to try of a key that no other key decides."""
        if not ENGINES[engine].takes(key):
            return [get(self.config, key)]
        if key in self.choices:
            return [*self.choices[key]]
        if key == POLICY:
            # The speed of a host's memory is not known, so that offloading has no price.
            policies = REMAT_POLICIES.items()
            return [name for name, p in policies if not (p.by_tensor or p.host)]
        if key == "model.logit_tiles":
            return sorted({1, 4, 16, self.config.model.logit_tiles})
        if key == GATHERS:
            refused = [mode for r in refusals_of(engine, GATHERS) for mode in r.values]
            return [mode for mode in OPTIONS[key].choices if mode not in ("auto", *refused)]
        return [get(self.config, key)]

    def scans(self, engine: str) -> list[bool]:
        """Return the values of `scan_layers` to try; True alone if the engine does not take it."""
        if not ENGINES[engine].takes(SCANS):
            return [True]
        if SCANS in self.choices:
            return [bool(value) for value in self.choices[SCANS]]
        layers = self.config.model.stacked_layers
        return [True, False] if self.is_tpu and layers <= MOST_UNROLLED else [True]

    def microbatches(self, batch: int, grid: Grid) -> list[int]:
        if chosen := self.choices.get("pipeline.num_microbatches"):
            return [int(str(n)) for n in chosen]
        return divisors(max(1, batch // grid.batch_shards))

    def repeats(self, schedule: str, stages: int) -> list[int]:
        if stages == 1:
            return [1]
        chosen = [int(str(n)) for n in self.choices.get(REPEATS, ())]
        if own := SCHEDULES[schedule].repeats:
            # A --fix that says otherwise is counted as not kept, see `unkept`.
            is_tried = REPEATS in self.fixed or own in (chosen or [own])
            return [own] if is_tried else []
        return chosen or divisors(max(1, self.config.model.stacked_layers // stages))

    def unkept(self, engine: str, schedule: str) -> str:
        """Return which --fix value candidates do not have, and why; empty if they have all."""
        facts = ENGINES[engine]
        for key in self.fixed:
            (value,) = self.choices[key]
            has = value if facts.takes(key) else get(self.config, key)
            if key == REPEATS:
                has = (SCHEDULES[schedule].repeats or value) if facts.has_stages else 1
            if has != value or (key == SCHEDULE and not facts.has_stages):
                return f"--fix {key}: not for {schedule if facts.has_stages else engine}"
        return ""

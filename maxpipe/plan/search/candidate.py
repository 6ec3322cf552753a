"""Hold candidates, and rows of a plan: what compilers say about candidates, and why they lose."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from maxpipe.config.catalog import ENGINES
from maxpipe.config.options import update
from maxpipe.config.sections import MESH_AXES, Config
from maxpipe.plan.number import Seconds
from maxpipe.plan.search.block import Block
from maxpipe.plan.search.legality import layout_of
from maxpipe.plan.search.request import Request
from maxpipe.plan.search.space import Grid

_KEYS = {
    "engine": "pipeline.engine",
    "schedule": "pipeline.schedule",
    "microbatches": "pipeline.num_microbatches",
    "repeats": "pipeline.num_repeats",
    "policy": "pipeline.remat_policy",
    "gather": "pipeline.fsdp_gather",
    "scans": "pipeline.scan_layers",
    "tiles": "model.logit_tiles",
    "batch": "data.global_batch_size",
}


@dataclass(frozen=True)
class Candidate:
    """One way to train the model."""

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
    layout: dict[str, object]  # keys and values that say how layers lie on stages
    memory: float  # bytes on a device by the closed forms
    seconds: Seconds  # by the closed forms

    @property
    def per_sequence(self) -> float:
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
        return ENGINES[self.engine].has_stages

    def updates(self) -> dict[str, object]:
        own = {key: getattr(self, name) for name, key in _KEYS.items()}
        return {**self.grid.updates(), **self.layout, **own}

    def config(self, shared: Config) -> Config:
        return update(shared, self.updates())

    def mesh_text(self) -> str:
        words = [
            f"{level}{axis}={n}"
            for level, sizes in (("", self.grid.ici), ("dcn.", self.grid.dcn))
            for axis, n in zip(MESH_AXES, sizes, strict=True)
            if n > 1
        ]
        return " ".join(words) or "one device"

    def schedule_text(self) -> str:
        """Return its schedule, or its engine where there are no stages."""
        if self.has_stages:
            return self.schedule
        return self.engine if self.scans else f"{self.engine}, unrolled"


def candidate_of(
    block: Block, place: int, layers: int, memory: float, seconds: Seconds
) -> Candidate:
    repeats = int(block.repeats[place])
    layout = layout_of(block.engine, layers, block.grid.size("stage"), repeats)
    return Candidate(
        grid=block.grid,
        engine=block.engine,
        schedule=block.schedule,
        batch=block.batch,
        microbatches=int(block.microbatches[place]),
        repeats=repeats,
        policy=block.policies[block.policy[place]],
        gather=block.gathers[block.gather[place]],
        tiles=int(block.tiles[place]),
        scans=block.scans,
        layout=layout.updates(layers),
        memory=memory,
        seconds=seconds,
    )


class Proof(NamedTuple):
    """What the compiler says about a candidate."""

    memory: float | None  # bytes of a device; None if it gave up without a figure
    seconds: float | None  # predicted step of the compiled program; None if unknown
    fits: bool
    failure: str  # why there is no result; "" if there is one
    compiled_in: float  # seconds
    parts: Seconds | None = None


@dataclass(frozen=True)
class Row:
    """A candidate in the table."""

    candidate: Candidate
    config: Config  # checked
    reason: str = ""  # why it is not chosen
    name: str = ""  # "your configuration", or ""
    proof: Proof | None = None  # None if it was not compiled

    @property
    def parts(self) -> Seconds:
        """Return the parts of the step, the compiler's if there are any; so do the next two."""
        return (self.proof and self.proof.parts) or self.candidate.seconds

    @property
    def seconds(self) -> float:
        proved = self.proof.seconds if self.proof else None
        return float(self.candidate.seconds.step) if proved is None else proved

    @property
    def memory(self) -> float:
        proved = self.proof.memory if self.proof else None
        return self.candidate.memory if proved is None else proved

    @property
    def basis(self) -> str:
        return "compiled" if self.proof and self.proof.seconds is not None else "closed"

    @property
    def per_sequence(self) -> float:
        return self.seconds / self.candidate.batch


def relative_time(row: Row, best: Row) -> float:
    """Return the time of a sequence as a multiple of the best's, both compiled or both closed."""
    if row.basis == best.basis == "compiled":
        return row.per_sequence / best.per_sequence
    return row.candidate.per_sequence / best.candidate.per_sequence


def with_reasons(rows: Sequence[Row], request: Request) -> list[Row]:
    """Rank rows, and say why each loses to the first; those that do not fit come last."""
    ranked = sorted(rows, key=lambda row: (not fits(row, request), row.per_sequence))
    if not ranked:
        return []
    best = ranked[0]
    return [replace(best, reason=""), *(replace(r, reason=loss_of(r, best)) for r in ranked[1:])]


def fits(row: Row, request: Request) -> bool:
    """Return whether a row fits: by the compiler if it was compiled, else by closed forms."""
    if row.proof is not None:
        return row.proof.fits
    return request.limit is None or row.candidate.memory <= request.limit


def loss_of(row: Row, best: Row) -> str:
    if row.proof is not None and not row.proof.fits:
        return row.proof.failure or "does not fit, says the compiler"
    slower = relative_time(row, best) - 1
    per = "" if row.candidate.batch == best.candidate.batch else " per sequence"
    if slower <= -5e-4:
        return f"{-slower:.1%} faster{per}"
    if slower < 5e-4:
        return f"as fast{per}"
    are_compiled = all(r.proof and r.proof.parts for r in (row, best))
    parts, fewer = (
        [float(p) / r.candidate.batch for p in (r.parts if are_compiled else r.candidate.seconds)]
        for r in (row, best)
    )
    losses = [a - b for a, b in zip(parts, fewer, strict=True)]
    part = ("computation", "communication", "bubble")[losses.index(max(losses))]
    return f"{slower:+.1%}{per}: {part}"

"""Hold the rows of a plan: candidates, what the compiler says about them, and why they lose."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from maxpipe.config.sections import Config
from maxpipe.plan.search.candidate import Candidate
from maxpipe.plan.search.request import Request
from maxpipe.plan.search.seconds import Seconds


class Proof(NamedTuple):
    """What the compiler says about a candidate.

    Attributes:
      memory: bytes of a device; None if it gave up without a figure.
      seconds: predicted step of the compiled program; None if unknown.
      fits: whether it fits the device.
      failure: why there is no result; "" if there is one.
      compiled_in: seconds of compiling.
      parts: parts of the predicted step; None if unknown.
    """

    memory: float | None
    seconds: float | None
    fits: bool
    failure: str
    compiled_in: float
    parts: Seconds | None = None


class Probed(NamedTuple):
    """What a probe says of a candidate: its closed forms with the compiler's figures of its units.

    Attributes:
      memory: bytes of a device; those of one unit if this alone does not fit.
      seconds: the step; None if a unit does not fit.
    """

    memory: float
    seconds: Seconds | None


@dataclass(frozen=True)
class Row:
    """A candidate in the table.

    Attributes:
      candidate: the candidate, with its closed forms.
      config: the candidate's configuration, checked.
      reason: why it is not chosen; "" for the winner.
      name: "your configuration", or "".
      proof: the compiler's verdict; None if it was not compiled.
      probed: prediction with the compiler's figures of its units; None if it was not probed.
      unprobed: why it was not probed where others were; else "".
      scale: factor by which its closed form is multiplied where others are probed.
    """

    candidate: Candidate
    config: Config
    reason: str = ""
    name: str = ""
    proof: Proof | None = None
    probed: Probed | None = None
    unprobed: str = ""
    scale: float = 1.0

    @property
    def parts(self) -> Seconds:
        """Return the parts of the step, the compiler's if there are any."""
        if self.proof and self.proof.parts:
            return self.proof.parts
        return self.predicted_parts

    @property
    def predicted_parts(self) -> Seconds:
        """Return the parts of the step before it was compiled."""
        if self.probed and self.probed.seconds:
            return self.probed.seconds
        return Seconds(*(self.scale * part for part in self.candidate.seconds))

    @property
    def seconds(self) -> float:
        """Return the predicted step, the compiler's if there is one."""
        proved = self.proof.seconds if self.proof else None
        return float(self.predicted_parts.step) if proved is None else proved

    @property
    def memory(self) -> float:
        """Return the bytes of a device, the compiler's figure if there is one."""
        proved = self.proof.memory if self.proof else None
        return self.predicted_memory if proved is None else proved

    @property
    def predicted_memory(self) -> float:
        """Return the bytes of a device before it was compiled."""
        return self.probed.memory if self.probed else self.candidate.memory

    @property
    def basis(self) -> str:
        """Return what its seconds rest on."""
        if self.proof and self.proof.seconds is not None:
            return "compiled"
        if self.probed and self.probed.seconds:
            return "probed"
        return "closed" if self.scale == 1 else "scaled"

    @property
    def per_sequence(self) -> float:
        """Return the seconds of one sequence, which rows are ranked by."""
        return self.seconds / self.candidate.batch

    @property
    def predicted_per_sequence(self) -> float:
        """Return the seconds of one sequence before it was compiled."""
        return float(self.predicted_parts.step) / self.candidate.batch


def relative_time(row: Row, best: Row) -> float:
    """Return the time of a sequence as a multiple of the best's, both on one basis.

    The basis is the compiler if it has timed both, else the predictions made without compiling.
    """
    if row.basis == best.basis == "compiled":
        return row.per_sequence / best.per_sequence
    return row.predicted_per_sequence / best.predicted_per_sequence


def with_reasons(rows: Sequence[Row], request: Request) -> list[Row]:
    """Rank rows, and say why each loses to the first; those that do not fit come last."""
    ranked = sorted(rows, key=lambda row: (not fits(row, request), row.per_sequence))
    if not ranked:
        return []
    best = ranked[0]
    return [replace(best, reason=""), *(replace(r, reason=loss_of(r, best)) for r in ranked[1:])]


def fits(row: Row, request: Request) -> bool:
    """Return whether a row fits: by the compiler if it was compiled, else by prediction."""
    if row.proof is not None:
        return row.proof.fits
    return request.limit is None or row.predicted_memory <= request.limit


def loss_of(row: Row, best: Row) -> str:
    """Return in words what a row loses to the best."""
    if row.proof is not None and row.proof.failure:
        return row.proof.failure
    if row.proof is not None and not row.proof.fits:
        return "does not fit, says the compiler"
    slower = relative_time(row, best) - 1
    per = "" if row.candidate.batch == best.candidate.batch else " per sequence"
    are_compiled = all(r.proof and r.proof.parts for r in (row, best))
    per_sequence = [
        [float(p) / r.candidate.batch for p in (r.parts if are_compiled else r.predicted_parts)]
        for r in (row, best)
    ]
    if slower <= -5e-4:
        return f"{-slower:.1%} faster{per}"
    losses = [a - b for a, b in zip(*per_sequence, strict=True)]
    part = ("computation", "communication", "bubble")[losses.index(max(losses))]
    return f"{slower:+.1%}{per}: {part}" if slower >= 5e-4 else f"as fast{per}"

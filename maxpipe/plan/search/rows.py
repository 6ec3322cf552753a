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


@dataclass(frozen=True)
class Row:
    """A candidate in the table.

    Attributes:
      candidate: the candidate, with its closed forms.
      config: the candidate's configuration, checked.
      reason: why it is not chosen; "" for the winner.
      name: "your configuration", or "".
      proof: the compiler's verdict; None if it was not compiled.
    """

    candidate: Candidate
    config: Config
    reason: str = ""
    name: str = ""
    proof: Proof | None = None

    @property
    def parts(self) -> Seconds:
        """Return the parts of the step, the compiler's if there are any."""
        if self.proof and self.proof.parts:
            return self.proof.parts
        return self.candidate.seconds

    @property
    def seconds(self) -> float:
        """Return the predicted step, the compiler's if there is one."""
        proved = self.proof.seconds if self.proof else None
        return float(self.candidate.seconds.step) if proved is None else proved

    @property
    def memory(self) -> float:
        """Return the bytes of a device, the compiler's figure if there is one."""
        proved = self.proof.memory if self.proof else None
        return self.candidate.memory if proved is None else proved

    @property
    def basis(self) -> str:
        """Return what its seconds rest on."""
        return "compiled" if self.proof and self.proof.seconds is not None else "closed"

    @property
    def per_sequence(self) -> float:
        """Return the seconds of one sequence, which rows are ranked by."""
        return self.seconds / self.candidate.batch


def relative_time(row: Row, best: Row) -> float:
    """Return the time of a sequence as a multiple of the best's, both on one basis.

    The basis is the compiler if it has timed both, else the closed forms.
    """
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
    """Return in words what a row loses to the best."""
    if row.proof is not None and row.proof.failure:
        return row.proof.failure
    if row.proof is not None and not row.proof.fits:
        return "does not fit, says the compiler"
    slower = relative_time(row, best) - 1
    per = "" if row.candidate.batch == best.candidate.batch else " per sequence"
    are_compiled = all(r.proof and r.proof.parts for r in (row, best))
    per_sequence = [
        [float(p) / r.candidate.batch for p in (r.parts if are_compiled else r.candidate.seconds)]
        for r in (row, best)
    ]
    if slower <= -5e-4:
        return f"{-slower:.1%} faster{per}"
    losses = [a - b for a, b in zip(*per_sequence, strict=True)]
    part = ("computation", "communication", "bubble")[losses.index(max(losses))]
    return f"{slower:+.1%}{per}: {part}" if slower >= 5e-4 else f"as fast{per}"

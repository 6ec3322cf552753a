"""Hold a TPU compiler's results with several sets of flags, and show them as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maxpipe.compile.prediction.constants import compiler_version
from maxpipe.devices.chips import GIB
from maxpipe.devices.xla_flags import assignment
from maxpipe.plan.search.rows import Proof
from maxpipe.render.columns import columns

VARIABLE = "LIBTPU_INIT_ARGS"
MIN_GAIN = 0.005  # share of a step; predictions that differ by less are the same
_HEADER = ("flags", "step s", "vs first", "GiB", "compiled in")


class Trial(NamedTuple):
    """A set of flags, and the compiler's result with it.

    Attributes:
      name: name of the set, or of several sets together.
      text: value of the environment variable.
      proof: the compiler's figures.
    """

    name: str
    text: str
    proof: Proof

    def is_faster_than(self, other: "Trial") -> bool:
        """Return whether it fits and is faster by `MIN_GAIN`, or fits while the other does not."""
        seconds, before = self.proof.seconds, other.proof.seconds
        if seconds is None or not self.proof.fits:
            return False
        if before is None or not other.proof.fits:
            return True
        return seconds < (1 - MIN_GAIN) * before

    def cells(self, first: float | None) -> list[str]:
        """Return its row of the table, given the seconds of the first row's step."""
        seconds, memory = self.proof.seconds, self.proof.memory
        return [
            self.name,
            f"{seconds:.4g}" if seconds else "-",
            f"{seconds / first:.3f}" if seconds and first else "-",
            f"{memory / GIB:.2f}" if memory else "-",
            f"{self.proof.compiled_in:.0f} s",
        ]

    @property
    def remark(self) -> str:
        """Return why it cannot be chosen; empty if it can."""
        return self.proof.failure or ("" if self.proof.fits else "does not fit")

    def line(self) -> str:
        """Return the line that reports the trial when it is done."""
        _, seconds, _, memory, took = self.cells(None)
        remark = f"; {self.remark}" if self.remark else ""
        return f"            {seconds} s, {memory} GiB, compiled in {took}{remark}"


@dataclass(frozen=True)
class Tuning:
    """The trials, and the best of them.

    Attributes:
      trials: all trials in order, beginning with the environment's own flags.
      best: the best trial.
      is_complete: whether nothing is left to try.
    """

    trials: Sequence[Trial]
    best: Trial
    is_complete: bool = True

    def lines(self) -> list[str]:
        """Return the table, the best set, and its line for a shell."""
        first = self.trials[0].proof.seconds
        rows = [[*trial.cells(first), trial.remark] for trial in self.trials]
        lines = columns([[*_HEADER, ""], *rows], left=(0, len(_HEADER)))
        if not self.best.proof.fits:
            return [
                *lines,
                "best        none fits; without --tune-flags the report says what would",
            ]
        if self.best is self.trials[0]:
            return [*lines, f"best        {self.best.name}: no set is faster by {MIN_GAIN:.1%}"]
        return [*lines, f"best        {self.best.name}:", assignment(VARIABLE, self.best.text)]

    def as_json(self) -> dict[str, object]:
        """Return the best prediction, its flags, and what was tried."""
        return {
            "predicted_step_seconds": self.best.proof.seconds,
            "fits": self.best.proof.fits,
            VARIABLE: self.best.text,
            "best": self.best.name,
            "complete": self.is_complete,
            "libtpu": compiler_version(),
            "tried": [
                {
                    "name": trial.name,
                    VARIABLE: trial.text,
                    "predicted_step_seconds": trial.proof.seconds,
                    "needed_bytes": trial.proof.memory,
                    "fits": trial.proof.fits,
                    "failure": trial.proof.failure,
                    "compile_seconds": trial.proof.compiled_in,
                }
                for trial in self.trials
            ],
        }

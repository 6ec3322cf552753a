"""Try sets of a TPU compiler's flags on a configuration, and choose, for `--tune-flags`.

The compiler reads its flags once per process, so each set is compiled in a process of its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maxpipe.compiling.compile_process import DOES_NOT_FIT, FITS, Note, compile_command
from maxpipe.compiling.prediction.constants import compiler_version, constants_of
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.paths import write_file
from maxpipe.config.slices import canonical_topology
from maxpipe.devices.chips import GIB, chip_of
from maxpipe.devices.xla_flags import FlagSet, Recommended, flags_in, sets_to_try
from maxpipe.planning.search.rows import Proof

VARIABLE = "LIBTPU_INIT_ARGS"
MIN_GAIN = 0.005  # share of a step; predictions that differ by less are the same
_HEADER = ("flags", "step s", "of first", "GiB", "compiled in")


class Trial(NamedTuple):
    """A set of flags, and what the compiler says with it."""

    name: str
    flags: Mapping[str, str]
    proof: Proof

    def is_faster_than(self, other: "Trial") -> bool:
        """Return whether this fits and is faster by more than `MIN_GAIN`, or alone fits."""
        mine, others = self.proof, other.proof
        if mine.seconds is None or not mine.fits:
            return False
        if others.seconds is None or not others.fits:
            return True
        return mine.seconds < (1 - MIN_GAIN) * others.seconds


@dataclass(frozen=True)
class Tuning:
    """What was tried, in order, beginning with the environment's own flags; and the best of it."""

    trials: Sequence[Trial]
    best: Trial

    def lines(self) -> list[str]:
        """Return the table, the best set, and its line for a shell."""
        first = self.trials[0].proof.seconds
        rows = [_HEADER, *(_cells(trial, first) for trial in self.trials)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = []
        for row in rows:
            name, *figures = row[: len(_HEADER)]
            aligned = (text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))
            remark = row[len(_HEADER) :]
            lines.append("  ".join([name.ljust(widths[0]), *aligned, *remark]).rstrip())
        if self.best is self.trials[0]:
            return [*lines, f"best        {self.best.name}: no set is faster by {MIN_GAIN:.1%}"]
        return [*lines, f"best        {self.best.name}:", self.assignment()]

    def assignment(self) -> str:
        """Return the best flags as a line for a shell."""
        return Recommended(VARIABLE, self.best.flags).assignment()

    def as_json(self) -> dict[str, object]:
        """Return the best prediction, its flags, and what was tried."""
        return {
            "predicted_step_seconds": self.best.proof.seconds,
            "fits": self.best.proof.fits,
            VARIABLE: Recommended(VARIABLE, self.best.flags).text(),
            "best": self.best.name,
            "libtpu": compiler_version(),
            "tried": [
                {
                    "name": trial.name,
                    "flags": {**trial.flags},
                    "predicted_step_seconds": trial.proof.seconds,
                    "needed_bytes": trial.proof.memory,
                    "fits": trial.proof.fits,
                    "failure": trial.proof.failure,
                    "compile_seconds": trial.proof.compiled_in,
                }
                for trial in self.trials
            ],
        }


def launch(
    words: Sequence[str],
    topology: str,
    environment: Mapping[str, str],
    json_file: str | None,
    note: Note,
) -> int:
    """Tune the flags of a configuration, and print and write what was tried.

    Args:
      words: the configuration, its overrides and imports, as `maxpipe.compile` takes them.
      topology: a TPU slice.
      environment: variables of this process; flags that it sets stay as they are.
      json_file: to write; None for none.
      note: prints a line.

    Returns:
      The exit code of `maxpipe.compile` with the best flags.

    Raises:
      ConfigError: no times are known for the chip, the configuration cannot be compiled or
        predicted, or the file cannot be written.
    """
    chip = chip_of(canonical_topology(topology))
    if chip is None or constants_of(chip) is None:
        message = f"compares predicted steps, which are not known for {topology}"
        raise ConfigError(Problem("--tune-flags", message))
    tuning = tune(words, sets_to_try(chip.name), flags_in(environment.get(VARIABLE, "")), note)
    note("\n".join(tuning.lines()))
    if json_file:
        write_file("--json", json_file, json.dumps(tuning.as_json(), indent=1) + "\n")
    return FITS if tuning.best.proof.fits else DOES_NOT_FIT


def tune(
    words: Sequence[str], sets: Sequence[FlagSet], own: Mapping[str, str], note: Note
) -> Tuning:
    """Compile with each set of flags, and then with those that gain together, best first.

    Args:
      words: of the command line of `maxpipe.compile`.
      sets: to try. Those that name one of the user's own flags are left out.
      own: the user's flags, which every trial has.
      note: prints a line.

    Raises:
      ConfigError: without further flags nothing is compiled or predicted.
    """

    def trial(name: str, flags: Mapping[str, str]) -> Trial:
        note(f"compiling   with {name}")
        variables = {VARIABLE: Recommended(VARIABLE, flags).text()}
        return Trial(name, flags, compile_command(words, note, variables))

    sets = [choice for choice in sets if not choice.flags.keys() & own.keys()]
    note(f"flags       {len(sets)} sets are tried, each compiled in a process of its own")
    first = trial(f"{VARIABLE} as it is set" if own else "none", own)
    if first.proof.seconds is None:
        reason = first.proof.failure or "there is no predicted step; see the report without it"
        raise ConfigError(Problem("--tune-flags", reason))
    trials = [first, *(trial(choice.name, {**own, **choice.flags}) for choice in sets)]
    gaining = [t for t in trials[1:] if t.is_faster_than(first)]
    gaining.sort(key=lambda t: t.proof.seconds or 0.0)
    best = gaining[0] if gaining else first
    for other in gaining[1:]:
        added = {name: value for name, value in other.flags.items() if name not in own}
        if added.keys() & best.flags.keys():
            continue
        together = trial(f"{best.name} + {other.name}", {**best.flags, **added})
        trials.append(together)
        best = together if together.is_faster_than(best) else best
    return Tuning(trials, best)


def _cells(trial: Trial, first: float | None) -> tuple[str, ...]:
    """Return a row of the table, and after its columns why it is out of the question."""
    seconds, memory = trial.proof.seconds, trial.proof.memory
    share = seconds / first if seconds and first else None
    remark = trial.proof.failure or ("" if trial.proof.fits else "does not fit")
    return (
        trial.name,
        f"{seconds:.4g}" if seconds else "-",
        f"{share:.3f}" if share else "-",
        f"{memory / GIB:.2f}" if memory else "-",
        f"{trial.proof.compiled_in:.0f} s",
        *([remark] if remark else []),
    )

"""Try sets of a TPU compiler's flags on a configuration, and choose, for `--tune-flags`.

The compiler reads its flags once per process, so each set is compiled in a process of its own.
"""

import json
import os
from collections.abc import Callable, Sequence

from maxpipe.compile import DOES_NOT_FIT, FITS
from maxpipe.compile.compile_process import compile_command
from maxpipe.compile.flag_trials import VARIABLE, Trial, Tuning
from maxpipe.compile.output_files import replace_file
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.outputs import is_device
from maxpipe.config.slices import canonical_topology
from maxpipe.config.terminal import Note
from maxpipe.devices.xla_flags import FlagSet, added_to, names_in, own_flags, sets_to_try

Keep = Callable[[Tuning], None]


def launch(words: Sequence[str], topology: str, json_file: str | None, note: Note) -> int:
    """Tune the flags of a configuration, and print and write what was tried.

    Flags in the user's `LIBTPU_INIT_ARGS` stay as they are.

    Args:
      words: the configuration, its overrides and imports, as `maxpipe.compile` takes them.
      topology: a TPU slice on which steps can be predicted.
      json_file: file to rewrite after each set, so that no finished set is lost; None for none.
      note: function that prints a line.

    Returns:
      The exit code of `maxpipe.compile` with the best flags.

    Raises:
      ConfigError: the configuration cannot be compiled or predicted, or the file cannot be written.
    """
    chip = canonical_topology(topology).partition(":")[0]
    own = own_flags(VARIABLE, os.environ)

    def keep(tuning: Tuning) -> None:
        if json_file and (tuning.is_complete or not is_device(json_file)):
            replace_file("--json", json_file, json.dumps(tuning.as_json(), indent=1) + "\n")

    tuning = tune(words, sets_to_try(chip), own, note, keep)
    note("\n".join(tuning.lines()))
    keep(tuning)
    return FITS if tuning.best.proof.fits else DOES_NOT_FIT


def tune(words: Sequence[str], sets: Sequence[FlagSet], own: str, note: Note, keep: Keep) -> Tuning:
    """Compile with each set of flags, then with combinations of those that gain, best first.

    Args:
      words: arguments of `maxpipe.compile`.
      sets: sets of flags to try; flags that the user has set are left out.
      own: the user's flags, which every trial has.
      note: function that prints a line.
      keep: function that receives the trials so far, after each set.

    Raises:
      ConfigError: with the user's flags alone nothing is compiled or predicted.
    """
    trials: list[Trial] = []

    def trial(name: str, text: str) -> Trial:
        note(f"compiling   with {name}")
        trials.append(Trial(name, text, compile_command(words, note, {VARIABLE: text})))
        note(trials[-1].line())
        return trials[-1]

    tried = [choice for choice in sets if added_to(own, choice.flags) != own]
    note(
        f"flags       {1 + len(tried)} compilations, each in a process of its own: without a set "
        f"and with each of {len(tried)} sets; then with those together that gain"
    )
    for choice in sets:
        if kept := choice.flags.keys() & names_in(own):
            note(f"            {choice.name}: {', '.join(sorted(kept))} as {VARIABLE} has it")
    first = trial(f"{VARIABLE} as it is set" if own else "none", own)
    if first.proof.failure:
        raise ConfigError(Problem("--tune-flags", first.proof.failure))
    if first.proof.fits and first.proof.seconds is None:
        message = "there is no predicted step; the report without --tune-flags says why"
        raise ConfigError(Problem("--tune-flags", message))
    keep(Tuning([first], first, is_complete=False))
    if tried:
        note(f"            {remaining(first.proof.compiled_in, len(tried))}")
    best = first
    gaining: list[tuple[FlagSet, Trial]] = []
    for choice in tried:
        single = trial(choice.name, added_to(own, choice.flags))
        if single.is_faster_than(first):
            gaining.append((choice, single))
            gaining.sort(key=lambda pair: pair[1].proof.seconds or 0.0)
            best = gaining[0][1]
        keep(Tuning([*trials], best, is_complete=False))
    for choice, single in gaining[1:]:
        if choice.flags.keys() & (names_in(best.text) - names_in(own)):
            continue
        text = added_to(best.text, choice.flags)
        together = trial(f"{best.name} + {single.name}", text)
        best = together if together.is_faster_than(best) else best
        keep(Tuning([*trials], best, is_complete=False))
    return Tuning(trials, best)


def remaining(seconds: float, count: int) -> str:
    """Return about how long `count` more sets take, if each takes `seconds` like the first."""
    total = count * seconds
    amount = f"{total / 60:.0f} minutes" if total >= 120 else f"{total:.0f} s"
    return f"about {amount} for {count} more, and those together that gain"

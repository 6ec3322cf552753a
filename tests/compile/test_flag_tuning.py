"""Flags of a TPU's compiler are tried in processes of their own, and the best are chosen."""

import math
import shlex

from maxpipe.compile import flag_tuning
from maxpipe.compile.flag_tuning import tune
from maxpipe.devices.chips import GIB
from maxpipe.devices.xla_flags import FlagSet, names_in
from maxpipe.plan.search.rows import Proof

SETS = [
    FlagSet("a", {"a": "1"}),
    FlagSet("b", {"b": "1"}),
    FlagSet("b twice", {"b": "2"}),
    FlagSet("slower", {"slower": "1"}),
    FlagSet("large", {"large": "1"}),
]
FACTORS = {"a": 0.9, "b": 0.8, "slower": 1.2, "large": 0.1}


def test_sets_that_fit_and_gain_are_tried_together_and_the_fastest_is_printed_for_a_shell(
    monkeypatch,
):
    def compile_command(words, note, environment):
        names = names_in(environment["LIBTPU_INIT_ARGS"]) & FACTORS.keys()
        seconds = 2.0 * math.prod(FACTORS[name] for name in names)
        return Proof(3 * GIB, seconds, "large" not in names, "", 7.0)

    monkeypatch.setattr(flag_tuning, "compile_command", compile_command)
    tuning = tune(["base.yml"], SETS, "", lambda line: None, lambda tuning: None)
    names = [trial.name for trial in tuning.trials]
    assert names == ["none", "a", "b", "b twice", "slower", "large", "b + a"]
    assert tuning.best.text == "--b=1 --a=1"
    *table, best, assignment = tuning.lines()
    assert table[1].split() == ["none", "2", "1.000", "3.00", "7", "s"]
    assert table[-1].split() == ["b", "+", "a", "1.44", "0.720", "3.00", "7", "s"]
    assert best.split() == ["best", "b", "+", "a:"]
    assert shlex.split(assignment) == ["LIBTPU_INIT_ARGS=--b=1 --a=1"]

"""Flags of a TPU's compiler are tried in processes of their own, and the best are chosen."""

import shlex

import pytest

from maxpipe.compiling import flag_tuning
from maxpipe.compiling.flag_trials import Tuning
from maxpipe.compiling.flag_tuning import tune
from maxpipe.devices.chips import GIB
from maxpipe.devices.xla_flags import FlagSet, names_in
from maxpipe.planning.search.rows import Proof

SETS = [
    FlagSet("a", {"a": "1"}),
    FlagSet("b", {"b": "1"}),
    FlagSet("b twice", {"b": "2"}),
    FlagSet("slower", {"slower": "1"}),
]
FACTORS = {"a": 0.9, "b": 0.8, "slower": 1.2, "own": 0.5, "tiny": 0.996}


@pytest.fixture
def compiler(monkeypatch):
    """Answer by the flags; return their texts, and answers for some of them."""
    seen: list[str] = []
    answers: dict[str, Proof] = {}

    def compile_command(words, note, environment):
        seen.append(environment["LIBTPU_INIT_ARGS"])
        names = sorted(names_in(seen[-1]) & FACTORS.keys())
        seconds = 2.0
        for name in names:
            seconds *= FACTORS[name]
        known = [answers[name] for name in [*names, ""] if name in answers]
        return known[0] if known else Proof(3 * GIB, seconds, True, "", 7.0)

    monkeypatch.setattr(flag_tuning, "compile_command", compile_command)
    return seen, answers


def silent(line: str) -> None:
    pass


def forget(tuning: Tuning) -> None:
    pass


def test_sets_that_gain_are_tried_together_and_the_fastest_is_printed_for_a_shell(compiler):
    said: list[str] = []
    tuning = tune(["base.yml"], SETS, "", said.append, forget)
    assert [trial.name for trial in tuning.trials] == [
        "none", "a", "b", "b twice", "slower", "b + a",
    ]  # fmt: skip
    assert tuning.best.text == "--b=1 --a=1"
    assert "            1.44 s, 3.00 GiB, compiled in 7 s" in said
    *table, best, assignment = tuning.lines()
    assert table[1].split() == ["none", "2", "1.000", "3.00", "7", "s"]
    assert table[-1].split() == ["b", "+", "a", "1.44", "0.720", "3.00", "7", "s"]
    assert best.split() == ["best", "b", "+", "a:"]
    assert shlex.split(assignment) == ["LIBTPU_INIT_ARGS=--b=1 --a=1"]


def test_no_set_is_chosen_that_gains_next_to_nothing_or_does_not_fit_or_fails(compiler):
    _, answers = compiler
    answers["a"] = Proof(90 * GIB, 0.1, False, "", 7.0)
    answers["b"] = Proof(None, None, False, "not compiled: unknown flag", 1.0)
    sets = [*SETS, FlagSet("tiny", {"tiny": "1"})]
    tuning = tune([], sets, "", silent, forget)
    assert len(tuning.trials) == 1 + len(sets)
    assert tuning.best.name == "none"
    lines = tuning.lines()
    assert lines[-1] == "best        none: no set is faster by 0.5%"
    assert lines[2].endswith("does not fit")
    assert lines[3].endswith("not compiled: unknown flag")

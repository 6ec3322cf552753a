"""Flags of a TPU's compiler are tried in processes of their own, and the best are chosen."""

import json
import shlex

import pytest

from maxpipe.compiling import flag_trials, flag_tuning
from maxpipe.compiling.flag_trials import Tuning
from maxpipe.compiling.flag_tuning import launch, remaining, tune
from maxpipe.config import ConfigError
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
TOO_LARGE = Proof(40 * GIB, None, False, "", 1.0)  # the compiler gives up


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


@pytest.mark.parametrize("own", ["--own=x --b=9", "--own --nob", "--own 1 --b 9"])
def test_the_users_own_flags_are_in_every_trial_as_they_are_written(compiler, own):
    seen, _ = compiler
    said: list[str] = []
    both = FlagSet("both", {"b": "1", "tiny": "1"})
    tuning = tune([], [*SETS, both], own, said.append, forget)
    assert all(text.startswith(own) for text in seen)
    assert [trial.name for trial in tuning.trials] == [
        "LIBTPU_INIT_ARGS as it is set", "a", "slower", "both",
    ]  # fmt: skip
    assert tuning.best.text == f"{own} --a=1"
    assert seen[-1] == f"{own} --tiny=1"
    assert "            both: b as LIBTPU_INIT_ARGS has it" in said


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


def test_a_set_is_chosen_that_is_the_only_one_that_fits(compiler):
    _, answers = compiler
    answers |= {"": TOO_LARGE, "slower": Proof(GIB, 3.0, True, "", 1.0)}
    tuning = tune([], SETS, "", silent, forget)
    assert tuning.best.name == "slower"
    assert tuning.lines()[1].split() == ["none", "-", "-", "40.00", "1", "s", "does", "not", "fit"]


def test_where_nothing_fits_no_flags_are_printed_and_the_exit_code_says_so(compiler, monkeypatch):
    _, answers = compiler
    answers[""] = TOO_LARGE
    monkeypatch.setattr(flag_tuning, "sets_to_try", lambda chip: SETS)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    lines: list[str] = []
    assert launch([], "v5p-8", None, lines.append) == 3
    assert lines[-1].splitlines()[-1].startswith("best        none fits")


@pytest.mark.parametrize(
    ("proof", "message"),
    [
        (Proof(None, None, False, "not compiled: config error: x", 1.0), "config error: x"),
        (Proof(GIB, None, True, "", 1.0), "there is no predicted step"),
    ],
)
def test_a_configuration_that_cannot_be_predicted_ends_with_the_reason(compiler, proof, message):
    _, answers = compiler
    answers[""] = proof
    with pytest.raises(ConfigError, match=message):
        tune([], SETS, "", silent, forget)


def test_what_was_tried_is_written_as_json(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(flag_tuning, "sets_to_try", lambda chip: SETS)
    monkeypatch.setattr(flag_trials, "compiler_version", lambda: "1.2")
    file, lines = tmp_path / "tuned.json", []
    of_jax = " --xla_tpu_use_enhanced_launch_barrier=true"
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--own=1{of_jax}")
    assert launch(["base.yml"], "v5p-8", str(file), lines.append) == 0
    written = json.loads(file.read_text())
    assert written["predicted_step_seconds"] == pytest.approx(0.72)
    assert written["LIBTPU_INIT_ARGS"] == "--own=1 --b=1 --a=1"
    assert (written["libtpu"], written["complete"]) == ("1.2", True)
    assert [row["name"] for row in written["tried"]][-1] == "b + a"
    assert written["tried"][1]["LIBTPU_INIT_ARGS"] == "--own=1 --a=1"


def test_a_stop_loses_no_set_that_is_done(compiler, monkeypatch, tmp_path):
    def compile_or_stop(words, note, environment):
        if "slower" in environment["LIBTPU_INIT_ARGS"]:
            raise KeyboardInterrupt
        return compile_command(words, note, environment)

    compile_command = flag_tuning.compile_command
    monkeypatch.setattr(flag_tuning, "compile_command", compile_or_stop)
    monkeypatch.setattr(flag_tuning, "sets_to_try", lambda chip: SETS)
    monkeypatch.setattr(flag_trials, "compiler_version", lambda: "1.2")
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    file = tmp_path / "tuned.json"
    with pytest.raises(KeyboardInterrupt):
        launch(["base.yml"], "v5p-8", str(file), silent)
    written = json.loads(file.read_text())
    assert [row["name"] for row in written["tried"]] == ["none", "a", "b", "b twice"]
    assert (written["complete"], written["best"]) == (False, "b")
    assert list(tmp_path.iterdir()) == [file]


def test_the_number_of_sets_is_said_first_and_what_is_left_after_one_of_them(compiler):
    said: list[str] = []
    tune([], SETS, "", said.append, forget)
    assert said[0].startswith("flags       5 compilations, each in a process of its own")
    assert said[1:4] == [
        "compiling   with none",
        "            2 s, 3.00 GiB, compiled in 7 s",
        "            about 28 s for 4 more, and those together that gain",
    ]
    assert remaining(200.0, 3).startswith("about 10 minutes for 3 more")

"""Flags of a TPU's compiler are tried in processes of their own, and the best are chosen."""

import json
import shlex

import pytest

from maxpipe.compiling import flag_tuning
from maxpipe.compiling.flag_tuning import launch, tune
from maxpipe.config import ConfigError
from maxpipe.devices.chips import GIB
from maxpipe.devices.xla_flags import FlagSet, flags_in
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
    """Answer by the flags; return what they were, and answers for some of them."""
    seen: list[dict[str, str]] = []
    answers: dict[str, Proof] = {}

    def compile_command(words, note, environment):
        flags = flags_in(environment["LIBTPU_INIT_ARGS"])
        seen.append(flags)
        seconds = 2.0
        for name in flags:
            seconds *= FACTORS[name]
            if name in answers:
                return answers[name]
        return Proof(3 * GIB, seconds, True, "", 7.0)

    monkeypatch.setattr(flag_tuning, "compile_command", compile_command)
    return seen, answers


def silent(line: str) -> None:
    pass


def test_sets_that_gain_are_tried_together_and_the_fastest_is_printed_for_a_shell(compiler):
    tuning = tune(["base.yml"], SETS, {}, silent)
    assert [trial.name for trial in tuning.trials] == [
        "none", "a", "b", "b twice", "slower", "b + a",
    ]  # fmt: skip
    assert tuning.best.flags == {"a": "1", "b": "1"}
    *table, best, assignment = tuning.lines()
    assert table[1].split() == ["none", "2", "1.000", "3.00", "7", "s"]
    assert table[-1].split() == ["b", "+", "a", "1.44", "0.720", "3.00", "7", "s"]
    assert best.split() == ["best", "b", "+", "a:"]
    assert shlex.split(assignment) == ["LIBTPU_INIT_ARGS=--b=1 --a=1"]


def test_the_users_own_flags_are_in_every_trial_and_no_set_changes_them(compiler):
    seen, _ = compiler
    tuning = tune([], SETS, {"own": "x", "b": "9"}, silent)
    assert all(flags.items() >= {"own": "x", "b": "9"}.items() for flags in seen)
    assert [trial.name for trial in tuning.trials] == [
        "LIBTPU_INIT_ARGS as it is set",
        "a",
        "slower",
    ]
    assert tuning.best.flags == {"own": "x", "b": "9", "a": "1"}


def test_no_set_is_chosen_that_gains_next_to_nothing_or_does_not_fit_or_fails(compiler):
    _, answers = compiler
    answers["a"] = Proof(90 * GIB, 0.1, False, "", 7.0)
    answers["b"] = Proof(None, None, False, "not compiled: unknown flag", 1.0)
    sets = [*SETS, FlagSet("tiny", {"tiny": "1"})]
    tuning = tune([], sets, {}, silent)
    assert len(tuning.trials) == 1 + len(sets)
    assert tuning.best.name == "none"
    lines = tuning.lines()
    assert lines[-1] == "best        none: no set is faster by 0.5%"
    assert lines[2].endswith("does not fit")
    assert lines[3].endswith("not compiled: unknown flag")


def test_a_set_is_chosen_that_alone_fits(compiler, monkeypatch):
    def compile_command(words, note, environment):
        fits = "a" in environment["LIBTPU_INIT_ARGS"]
        return Proof(GIB, 3.0 if fits else 2.0, fits, "", 1.0)

    monkeypatch.setattr(flag_tuning, "compile_command", compile_command)
    assert tune([], SETS[:1], {}, silent).best.name == "a"


@pytest.mark.parametrize(
    ("proof", "message"),
    [
        (Proof(None, None, False, "not compiled: config error: x", 1.0), "config error: x"),
        (Proof(GIB, None, True, "", 1.0), "there is no predicted step"),
    ],
)
def test_a_configuration_that_cannot_be_predicted_ends_with_the_reason(
    compiler, monkeypatch, proof, message
):
    monkeypatch.setattr(flag_tuning, "compile_command", lambda *_: proof)
    with pytest.raises(ConfigError, match=message):
        tune([], SETS, {}, silent)


def test_what_was_tried_is_written_as_json(compiler, monkeypatch, tmp_path):
    monkeypatch.setattr(flag_tuning, "sets_to_try", lambda chip: SETS)
    monkeypatch.setattr(flag_tuning, "compiler_version", lambda: "1.2")
    file, lines = tmp_path / "tuned.json", []
    environment = {"LIBTPU_INIT_ARGS": "--own=1"}
    assert launch(["base.yml"], "v5p-8", environment, str(file), lines.append) == 0
    written = json.loads(file.read_text())
    assert written["predicted_step_seconds"] == pytest.approx(0.72)
    assert flags_in(written["LIBTPU_INIT_ARGS"]) == {"own": "1", "a": "1", "b": "1"}
    assert written["libtpu"] == "1.2"
    assert [row["name"] for row in written["tried"]][-1] == "b + a"
    assert written["tried"][1]["flags"] == {"own": "1", "a": "1"}
    assert any("LIBTPU_INIT_ARGS=" in line for line in lines)


def test_chips_without_predictions_are_refused(compiler):
    seen, _ = compiler
    with pytest.raises(ConfigError, match=r"--tune-flags: compares predicted steps"):
        launch([], "tpu7x:2x2x1", {}, None, silent)
    assert not seen

"""Test scripts/benchmark/tune_flags.py with a compiler that answers at once."""

import math

import pytest
from helpers.scripts import load_script

from maxpipe.devices.chips import GIB
from maxpipe.devices.xla_flags import names_in
from maxpipe.plan.search.candidate import Proof

script = load_script("benchmark/tune_flags")
SETS = [script.FlagSet(name, {name: "1"}) for name in ("a", "b", "slower", "large")]
SETS.insert(2, script.FlagSet("b twice", {"b": "2"}))
FACTORS = {"a": 0.9, "b": 0.8, "slower": 1.2, "large": 0.1}


def test_sets_that_fit_and_gain_are_combined_and_the_fastest_is_printed_for_a_shell(
    monkeypatch, capsys
):
    def compile_command(words, note, environment):
        names = names_in(environment["LIBTPU_INIT_ARGS"]) & FACTORS.keys()
        seconds = 2.0 * math.prod(FACTORS[name] for name in names)
        return Proof(3 * GIB, seconds, "large" not in names, "", 7.0)

    monkeypatch.setattr(script, "compile_command", compile_command)
    monkeypatch.setattr(script, "sets_to_try", lambda chip: SETS)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert script.main(["base", "compile.topology=v5p:2x2x1"]) == 0
    *rows, _, best, line = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0][2:] for row in rows[2:]] == [
        "none", "a", "b", "b twice", "slower", "large", "b + a",
    ]  # fmt: skip
    assert rows[-1] == "| b + a | 1.44 | 0.720 | 3.00 | 7 s |"
    assert (best, line) == ("best: b + a", 'LIBTPU_INIT_ARGS="--b=1 --a=1"')

    with pytest.raises(SystemExit, match="2"):
        script.main(["base"])
    assert "config error: compile.topology: name TPUs" in capsys.readouterr().err

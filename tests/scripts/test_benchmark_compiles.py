"""Test the benchmarks that compile, with compilers that answer from tables."""

import math

import pytest
from helpers.hand_timed import BASIS, CONSTANTS
from helpers.scripts import SCRIPTS, load_script

from maxpipe.compile.prediction.operations import Part
from maxpipe.compile.prediction.prediction import Prediction, Speed
from maxpipe.config import load, resolve
from maxpipe.devices.chips import GIB
from maxpipe.devices.xla_flags import names_in
from maxpipe.plan.search.candidate import Proof

predict = load_script("benchmark/predict")
tables = load_script("benchmark/tables")
tune_flags = load_script("benchmark/tune_flags")
PARTS = dict.fromkeys(Part, 0.125) | {Part.MATRIX_PRODUCTS: 0.5}
PREDICTED = Prediction(1.0, BASIS, PARTS, bubble=0.1, speed=Speed(1.0, 0.4)).as_json()
REPORT = {
    "predicted_step_seconds": 1.0,
    "predicted": PREDICTED,
    "fits": True,
    "memory": {"temp_bytes": 3 * 2**20},
    "num_slices": 1,
}
NO_STEP = {"predicted_step_seconds": None}
TOO_LARGE = {"needed_bytes": 20 * 2**30, "capacity_bytes": 16e9}
ANSWERS = {
    "first": {},
    "faster": {"predicted_step_seconds": 0.75},
    "unknown": NO_STEP | {"predicted": PREDICTED | {"unknown": ["kernels: own"]}},
    "large": NO_STEP | {"predicted": None, "fits": False, "memory": TOO_LARGE},
    "cpu": NO_STEP | {"predicted": None, "fits": None},
}


def test_predict_prints_a_row_for_each_configuration_and_says_what_failed(monkeypatch, capsys):
    def compiled(python, name):
        return (REPORT | ANSWERS[name], "") if name in ANSWERS else (None, "broken")

    monkeypatch.setattr(predict, "compiled", compiled)
    assert predict.main(["bad", *ANSWERS]) == 1
    printed, error = (text.splitlines() for text in capsys.readouterr())
    head, _, first, second, _, basis = printed
    assert head.startswith("| configuration | step s | matrix products |")
    cells = "0.5 | 0.125 | 0.125 | 0.125 | 0.125 | 0.1 | 40.0 | 3 | yes | 1.000 |"
    assert first == f"| first | 1 | {cells}"
    assert second.startswith("| faster | 0.75 | ")
    assert second.endswith("| 0.750 |")
    assert basis == f"predicted by libtpu 0.0: v5p at {CONSTANTS.text(crosses_slices=False)}"
    assert error == [
        "no prediction: bad: broken",
        "no prediction: unknown: kernels: own",
        "no prediction: large: does not fit: 20.0 of 14.9 GiB",
        "no prediction: cpu: needs a TPU's topology, such as compile.topology=v5p:2x2x2",
    ]


def test_tune_flags_combines_sets_that_fit_and_gain_and_prints_the_fastest_for_a_shell(
    monkeypatch, capsys
):
    sets = [tune_flags.FlagSet(name, {name: "1"}) for name in ("a", "b", "slower", "large")]
    sets.insert(2, tune_flags.FlagSet("b twice", {"b": "2"}))
    factors = {"a": 0.9, "b": 0.8, "slower": 1.2, "large": 0.1}

    def compile_command(words, note, environment):
        names = names_in(environment["LIBTPU_INIT_ARGS"]) & factors.keys()
        seconds = 2.0 * math.prod(factors[name] for name in names)
        return Proof(3 * GIB, seconds, "large" not in names, "", 7.0)

    monkeypatch.setattr(tune_flags, "compile_command", compile_command)
    monkeypatch.setattr(tune_flags, "sets_to_try", lambda chip: sets)
    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    assert tune_flags.main(["base", "compile.topology=v5p:2x2x1"]) == 0
    *rows, _, best, line = capsys.readouterr().out.splitlines()
    names = ["none", "a", "b", "b twice", "slower", "large", "b + a"]
    assert [row.split(" | ")[0][2:] for row in rows[2:]] == names
    assert rows[-1] == "| b + a | 1.44 | 0.720 | 3.00 | 7 s |"
    assert (best, line) == ("best: b + a", 'LIBTPU_INIT_ARGS="--b=1 --a=1"')
    with pytest.raises(SystemExit, match="2"):
        tune_flags.main(["base"])
    assert "config error: compile.topology: name TPUs" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted({*tables.TABLES} - {"whole_mixtures"}))  # presets
def test_configurations_of_a_table_are_legal_on_the_chips_of_their_slice(name):
    for words in tables.TABLES[name]:
        config, *overrides = words.split()
        loaded = load(str(SCRIPTS.parent / config), overrides)
        shape = loaded.config.compile.topology.partition(":")[2]
        resolve(loaded, math.prod(map(int, shape.split("x"))))

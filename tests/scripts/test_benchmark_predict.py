"""Test scripts/benchmark/predict.py with a compiler that answers from a table."""

from dataclasses import replace

import pytest
from helpers.hand_timed import BASIS, CONSTANTS
from helpers.scripts import load_script

from maxpipe.compile.prediction.operations import Part
from maxpipe.compile.prediction.prediction import Prediction, Speed

script = load_script("benchmark/predict")
PREDICTED = Prediction(
    1.0,
    BASIS._replace(constants=replace(CONSTANTS, dcn_bandwidth=6.25e9)),
    dict.fromkeys(Part, 0.125) | {Part.MATRIX_PRODUCTS: 0.5},
    bubble=0.1,
    speed=Speed(1.0, 0.4),
).as_json()
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
    "faster": {"predicted_step_seconds": 0.75},
    "unknown": NO_STEP | {"predicted": PREDICTED | {"unknown": ["kernels: own"]}},
    "large": NO_STEP | {"predicted": None, "fits": False, "memory": TOO_LARGE},
    "cpu": NO_STEP | {"predicted": None, "fits": None},
    "mpmd": {"predicted": PREDICTED | {"bubble_in_parts": False, "leaves_out": ["optimizer"]}},
    "slices": {"num_slices": 2},
}


@pytest.fixture
def predict(monkeypatch, capsys):
    """Return a function of words that returns exit code, standard output and error."""

    def compiled(python, name):
        return (None, "broken") if name == "bad" else (REPORT | ANSWERS.get(name, {}), "")

    monkeypatch.setattr(script, "compiled", compiled)

    def _predict(*words):
        code = script.main(words)
        return code, *(text.splitlines() for text in capsys.readouterr())

    return _predict


def test_predict_prints_a_row_for_each_configuration_and_says_what_failed(predict):
    code, printed, error = predict("first", "faster", "bad", "unknown", "large", "cpu")
    assert code == 1
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

"""Test scripts/benchmark/predict.py with a compiler that answers from a file."""

import sys

import pytest
from helpers.hand_timed import BASIS
from helpers.scripts import SCRIPTS, load_script

from maxpipe.compile.prediction.operations import Part
from maxpipe.compile.prediction.prediction import Prediction, Speed

script = load_script("benchmark/predict")
PREDICTED = {
    "libtpu": "0.0.46",
    "constants": {
        "chip": "v5p",
        "clock": 1.75e9,
        "peak_flops": 459e12,
        "attention_efficiency": 0.5,
        "hbm_bandwidth": 2.765e12,
        "link_bandwidth": 9e10,
        "dcn_bandwidth": 6.25e9,
    },
    "parts": {
        "matrix products": 0.5,
        "attention kernels": 0.25,
        "loop fusions": 0.125,
        "copies": 0.0,
        "collectives": 0.125,
    },
    "bubble": 0.1,
    "bubble_in_parts": True,
    "leaves_out": [],
    "mfu": 0.4,
    "unknown": [],
}
FAKE = """#!{python}
import json, sys
words = sys.argv[3:]
if words[0] == "bad.yml":
    sys.exit("config error: bad.yml")
if words[0] == "large.yml":
    json.dump({{"predicted_step_seconds": None, "predicted": None, "fits": False,
      "memory": {{"needed_bytes": 20 * 2**30, "capacity_bytes": 16e9}}}},
      open(words[words.index("--json") + 1], "w"))
    sys.exit(3)
report = {{"predicted_step_seconds": 1.0 if words[1] == "a=1" else 0.75, "fits": True,
  "predicted": {predicted!r}, "memory": {{"temp_bytes": 3 * 2**20}}, "num_slices": 1}}
if words[1] == "slices":
    report["num_slices"] = 2
if words[1] == "mpmd":
    report["predicted"] |= {{"bubble_in_parts": False, "leaves_out": ["optimizer"]}}
if words[1] == "cpu":
    report |= {{"predicted_step_seconds": None, "predicted": None, "fits": None}}
if words[1] == "a=3":
    report["predicted_step_seconds"] = None
    report["predicted"]["unknown"] = ["kernels whose work is unknown: own"]
json.dump(report, open(words[words.index("--json") + 1], "w"))
"""


@pytest.fixture
def predict(capsys):
    """Return a function of words that returns exit code, standard output and error."""

    def _predict(*words):
        try:
            code = script.main(list(map(str, words)))
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return _predict


def test_predict_prints_a_row_for_each_configuration_and_says_what_failed(
    predict, tmp_path, monkeypatch
):
    fake = tmp_path / "python"  # answers from a file
    fake.write_text(FAKE.format(python=sys.executable, predicted=PREDICTED))
    fake.chmod(0o755)
    words = ["x.yml a=1", "x.yml 'a=2' b=1", "bad.yml", "x.yml a=3", "large.yml", "x.yml 'a=2"]
    code, printed, error = predict(*words, "x.yml cpu", "--python", fake)
    assert code == 1
    head, _, first, second, _, basis = printed.splitlines()
    assert head.startswith("| configuration | step s | matrix products |")
    assert (
        first == "| x.yml a=1 | 1 | 0.5 | 0.25 | 0.125 | 0 | 0.125 | 0.1 | 40.0 | 3 | yes | 1.000 |"
    )
    assert second.startswith("| x.yml 'a=2' b=1 | 0.75 | ")
    assert second.endswith("| 0.750 |")
    assert basis == (
        "predicted by libtpu 0.0.46: v5p at 1.75 GHz, attention at 50 % of peak, links 90 GB/s, "
        "HBM 2765 GB/s"
    )
    assert error.splitlines() == [
        "no prediction: bad.yml: config error: bad.yml",
        "no prediction: x.yml a=3: kernels whose work is unknown: own",
        "no prediction: large.yml: does not fit: 20.0 of 14.9 GiB",
        "no prediction: x.yml 'a=2: No closing quotation",
        "no prediction: x.yml cpu: needs a TPU's topology, such as compile.topology=v5p:2x2x2",
    ]
    # Rows that leave out what others hold, and the bandwidth between slices, are named.
    remark = "unlike others, row 2 and row 3: without optimizer, the bubble is besides the parts"
    _, printed, _ = predict("x.yml a=1", "x.yml mpmd", "x.yml mpmd", "--python", fake)
    assert remark in printed.splitlines()
    _, printed, _ = predict("x.yml slices", "--python", fake)
    assert "unlike" not in printed
    assert printed.endswith(", DCN 6.25 GB/s\n")
    # It compiles where the user stands, with this repository.
    fake.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "sys.exit(os.getcwd() + ' ' + os.environ['PYTHONPATH'])\n"
    )
    monkeypatch.chdir(tmp_path)
    where = f"{tmp_path} {SCRIPTS.parent}"
    assert predict("own.yml", "--python", "./python")[2].startswith(
        f"no prediction: own.yml: {where}"
    )
    code, _, error = predict("x.yml", "--python", "/nonexistent")
    assert code == 2
    assert "--python /nonexistent: there is no such program" in error


def test_predicted_json_has_what_the_table_reads():
    prediction = Prediction(1.0, BASIS, dict.fromkeys(Part, 0.2), speed=Speed(1.0, 0.4))
    data = prediction.as_json()
    assert set(PREDICTED) <= set(data)
    assert set(PREDICTED["parts"]) == set(data["parts"])
    assert set(PREDICTED["constants"]) <= set(data["constants"])

"""Test the comparisons with MaxText on processes and compilers that answer from a list."""

import sys
from dataclasses import asdict

import pytest
from helpers.hand_timed import CONSTANTS
from helpers.scripts import load_script

from maxpipe.config import load, resolve

compared = load_script("benchmark/compare_maxtext")
predict = load_script("benchmark/predict_maxtext")


def printing(line, times=3, code=0):
    program = f"import sys\nfor i in range({times}): print({line!r} % i)\nsys.exit({code})"
    return [sys.executable, "-u", "-c", program]


def test_train_measures_steps_by_the_lines_of_each_trainer_and_shows_why_it_failed(capsys):
    for trainer, line in (
        ("maxtext", "I1121 completed step: %d, seconds: 0.1"),
        ("maxpipe", "step %d/3  loss 5.6"),
    ):
        run = compared.train(trainer, printing(line), steps=3)
        assert len(run.cpu) == len(run.wall) == 2
        assert run.first_step > 0
        assert run.peak > 2**20
    for times, code in ((2, 0), (3, 1)):
        with pytest.raises(compared.Failed, match=rf"ended with {code}:\nstep 0/3"):
            compared.train("maxpipe", printing("step %d/3", times, code), steps=3)
    assert compared.main([sys.executable]) == 1  # a Python without MaxText
    assert "'maxtext[tpu]==0.2.5'" in capsys.readouterr().err


def test_tables_divide_maxtext_by_maxpipe():
    maxtext = compared.Run(30.0, [4.0, 6.0, 5.0], [2.0], 300 * 2**20)
    maxpipe = compared.Run(10.0, [4.0], [4.0], 200 * 2**20)
    table = compared.training_table({"fsdp": {"maxtext": [maxtext], "maxpipe": [maxpipe]}})
    row = table.splitlines()[-1]
    assert row == "| fsdp | 30 | 10 | 3.00 | 5 | 4 | 1.25 | 2 | 4 | 0.50 | 300 | 200 | 1.50 |"


def test_words_for_maxpipe_are_a_legal_configuration_of_16_layers():
    for case in predict.CASES.values():
        for words in case.maxpipe.values():
            config = resolve(load("base", [*predict.MAXPIPE_MODEL, *words]), 8)
            assert config.model.num_layers == 16
            assert config.pipeline.num_layers_per_stage * config.pipeline.num_repeats in (2, 4, 16)


def test_case_prints_rows_with_ratios_to_maxtext(monkeypatch, capsys):
    commands = []

    def report(trainer, command, file):
        commands.append((trainer, command))
        seconds = 0.4 if trainer == "maxtext" else 0.3
        seconds -= 0.1 if "remat_policy=minimal" in " ".join(command) else 0.0
        parts = dict.fromkeys(predict.PARTS, 0.1)
        constants = asdict(CONSTANTS)
        predicted = {"parts": parts, "libtpu": "0.0.46", "constants": constants}
        memory = {"temp_bytes": 5 * 2**20}
        return {"predicted_step_seconds": seconds, "predicted": predicted, "memory": memory}

    monkeypatch.setattr(predict, "report", report)
    peer = predict.Peer("python", "base.yml", {})
    assert predict.compare(peer, "fsdp").startswith("libtpu 0.0.46: v5p at 1.00 GHz")
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [" ".join((*row[1:3], *row[-2:])) for row in rows[:4]] == [
        "MaxText 0.4 5 1.000 |",
        "MaxText, minimal, unrolled 0.3 5 0.750 |",
        "sequential 0.3 5 0.750 |",
        "sequential, minimal 0.2 5 0.500 |",
    ]
    assert len(rows) == 7
    (_, theirs), _, (_, ours), *_ = commands
    assert theirs[1:3] == [predict.__file__, "--inside"]
    assert theirs[4:6] == ["maxtext.trainers.pre_train.train_compile", "base.yml"]
    assert "ici_fsdp_parallelism=8" in theirs
    assert ours[:3] == ["python", "-m", "maxpipe.compile"]

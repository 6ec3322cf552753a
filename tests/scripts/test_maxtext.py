"""Test the comparisons with MaxText on processes and compilers that answer from a list."""

import sys

import pytest
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


def test_words_for_maxpipe_are_a_legal_configuration_of_as_many_layers_as_maxtext_is_given():
    for case in predict.CASES.values():
        (theirs, *_) = case.maxtext.values()
        words = dict(word.split("=") for word in (*predict.MAXTEXT_MODEL, *theirs))
        for ours in case.maxpipe.values():
            config = resolve(load("base", [*predict.MAXPIPE_MODEL, *ours]), 8)
            layers = int(words["base_num_decoder_layers"])
            assert config.model.num_layers == layers
            assert config.model.moe.experts == int(words.get("num_experts", 0))
            in_each = config.pipeline.num_layers_per_stage * config.pipeline.num_repeats
            assert in_each * config.mesh.ici.stage == layers

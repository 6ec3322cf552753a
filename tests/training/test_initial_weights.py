"""Runs that start from the weights of another run."""

import numpy as np
import pytest
from helpers.runs import last_words, output_dir, saved, write_config

from maxpipe import train
from maxpipe.config.errors import ConfigError
from maxpipe.config.load import load, resolve
from maxpipe.devices import processes
from maxpipe.training import initial_weights
from maxpipe.training.initial_weights import RunWeights, newest_step


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    words = write_config(tmp_path_factory.mktemp("first"))
    root = output_dir(words) / "tiny"
    words += ["mesh.simulated_devices=0", "mesh.ici.fsdp=4"]
    assert train.main([*words, "steps=2", "optimizer.name=sgd", "checkpoint.every=1"]) == 0
    return words, root


def _parameters(root, step):
    arrays = saved(root, step)
    return {name: array for name, array in arrays.items() if name.startswith("params.")}


def test_run_starts_from_the_newest_weights_on_another_layout(first, capsys):
    words, root = first
    more = ["run_name=second", "steps=1", "optimizer.learning_rate=0"]
    layout = ["mesh.ici.stage=4", "mesh.ici.fsdp=2", "pipeline.num_repeats=1"]
    more += [f"init_from=run:{root}", "pipeline.schedule=circular", *layout]
    assert train.main(last_words([*words, *more])) == 0
    assert f"{root}/checkpoints/2" in capsys.readouterr().out
    before, after = _parameters(root, 2), _parameters(root.parent / "second", 1)
    assert before.keys() == after.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


def test_run_of_another_model_is_refused_with_all_names(first, capsys):
    words, root = first
    with pytest.raises(SystemExit, match="2"):
        train.main([*words, "run_name=third", f"init_from=run:{root}", "model.mlp_dim=128"])
    error = capsys.readouterr().err
    for name in ("gate", "up", "down", "in the checkpoint"):
        assert name in error


def test_init_from_run_takes_a_directory(capsys):
    for place in ("", "s3://bucket/run"):
        with pytest.raises(SystemExit, match="2"):
            train.main(["configs/base.yml", f"init_from=run:{place}", "--print-config"])
        assert "has none of the forms run:DIR" in capsys.readouterr().err


def test_weights_of_a_run_that_processes_read_together_are_compared(first, monkeypatch):
    words, root = first
    config = resolve(load(words[0], [*words[1:], f"init_from=run:{root}"]), 8)
    compared = []
    RunWeights(config)
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(initial_weights, "agree_on", compared.append)
    RunWeights(config)
    monkeypatch.setattr(processes, "of_first_process", lambda step: step - 1)
    assert newest_step(config.init_from).name == "1"
    RunWeights(config)
    newest, older = (texts["init_from"] for texts in compared)
    assert newest != older


def test_newest_step_without_run_names_it(tmp_path):
    with pytest.raises(ConfigError, match=r"^init_from: there is no directory \S+gone"):
        newest_step(f"run:{tmp_path}/gone")
    with pytest.raises(ConfigError, match=r"^init_from: .* holds no checkpoint"):
        newest_step(f"run:{tmp_path}")

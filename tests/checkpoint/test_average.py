"""The mean of the parameters of several steps, for exports and generated text."""

import json
import shutil

import jax
import numpy as np
import pytest
from helpers.training_process import command

import maxpipe
from maxpipe import export, train
from maxpipe.checkpoint.errors import CheckpointMismatch
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.reader import ParameterReader, read_parameters
from maxpipe.config import CheckpointConfig, ConfigError
from maxpipe.generate import __main__ as generate

STEPS = (10, 20, 30)


@pytest.fixture
def directories(directory, samples):
    checkpointer = Checkpointer(directory, CheckpointConfig(keep=3))
    for step in STEPS:
        samples.save(checkpointer, step)
    checkpointer.close()
    return [directory / str(step) for step in STEPS]


def test_one_step_is_read_as_it_was_saved_and_a_mean_is_taken_in_float32(directories, samples):
    params = [samples.state(step)["params"] for step in STEPS]
    target = samples.abstract(params[1])
    read = read_parameters(directories[1:2], target)
    for name, leaf in params[1].items():
        assert samples.bits(read[name]) == samples.bits(leaf)
        leaves = [np.asarray(of_step[name], np.float32) for of_step in params]
        expected = (leaves[0] + leaves[1] + leaves[2]) / np.float32(3)
        found = ParameterReader(directories).read(f"params.{name}")
        assert isinstance(found, np.ndarray)
        assert samples.bits(found) == samples.bits(expected)
    mean = read_parameters(directories, target)
    assert mean["weight"].sharding == target["weight"].sharding
    with pytest.raises(CheckpointMismatch):
        read_parameters(directories[1:2], {"scale": target["scale"]})


def test_steps_of_other_models_have_no_mean(directories, samples, tmp_path):
    state = samples.state(40)
    state["params"]["scale"] = state["params"]["scale"][:3]
    checkpointer = Checkpointer(tmp_path / "other", CheckpointConfig())
    checkpointer.save(40, state, samples.iterator(40), samples.meta(40))
    checkpointer.close()
    with pytest.raises(CheckpointMismatch, match=r"params\.scale: bfloat16\[33\]"):
        ParameterReader([directories[0], tmp_path / "other" / "40"])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    words = "mesh.simulated_devices=0 mesh.ici.stage=2 mesh.ici.fsdp=4 steps=3 checkpoint.every=1"
    assert train.main(command(directory, *words.split())) == 0
    return directory / "base"


def test_export_of_an_average_is_the_mean_of_exports(run_dir, tmp_path, capsys):
    def exported(*words):
        file = tmp_path / "-".join(["file", *words])
        assert export.main([str(run_dir), "--safetensors", str(file), *words]) == 0
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        metadata = json.loads(header.pop("__metadata__")["maxpipe"])
        return {
            name: np.frombuffer(content[start:][slice(*entry["data_offsets"])], np.float32)
            for name, entry in header.items()
        }, metadata

    (first, _), (second, _) = exported("--step=1"), exported("--step=2")
    mean, metadata = exported("--step=2", "--average=2")
    assert metadata["mean_of_steps"] == [1, 2]
    assert "mean of steps 1, 2" in capsys.readouterr().out
    assert mean.keys() == first.keys()
    for name, array in mean.items():
        np.testing.assert_array_equal(array, (first[name] + second[name]) / np.float32(2))
    assert any((first[name] != second[name]).any() for name in mean)
    assert export.main([str(run_dir), "--hf", str(tmp_path / "hf"), "--average=3"]) == 0
    assert "| weights | the mean of steps 1, 2, 3 |" in (tmp_path / "hf" / "README.md").read_text()


def test_average_generates_and_has_logits_of_the_mean(run_dir, capsys):
    whole = maxpipe.load_model(run_dir, average=3)
    each = [maxpipe.load_model(run_dir, step=step) for step in (1, 2, 3)]
    expected = jax.tree.map(lambda *leaves: sum(leaves) / 3, *(model.params for model in each))
    for found, wanted in zip(jax.tree.leaves(whole.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-7)
    assert (whole.logits([[1, 2]]) != each[2].logits([[1, 2]])).any()
    words = ["--prompt=def", "--temperature=0", "--max-tokens=5"]
    capsys.readouterr()
    assert generate.main([str(run_dir), "--average=3", *words]) == 0
    written = whole.generate("def", temperature=0, max_tokens=5)
    assert capsys.readouterr().out == f"def{written}\n"


def test_commands_name_the_damaged_one_of_several_steps(run_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = shutil.copytree(run_dir, tmp_path / "run")
    damaged = run / "checkpoints" / "1"
    shutil.rmtree(damaged / "arrays")
    for main, words in [(generate.main, ["--prompt=a"]), (export.main, ["--safetensors", "file"])]:
        assert main([str(run), *words, "--average=3"]) == 1
        assert f"error: checkpoint {damaged} is damaged: " in capsys.readouterr().err


def test_average_of_more_steps_than_there_are_is_refused(run_dir):
    for number, step, held in [(0, None, 3), (4, None, 3), (3, 2, 2)]:
        match = f"average: expected 1 to {held}, since .* up to {held}; got {number}"
        with pytest.raises(ConfigError, match=match):
            maxpipe.load_model(run_dir, step=step, average=number)

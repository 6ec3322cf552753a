"""All that is wrong with what a run reads and writes is said at once."""

import pytest

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.policies import step_to_resume
from maxpipe.config import Config, ConfigError, Problem, replace
from maxpipe.config.load import derive_known
from maxpipe.training import inputs
from maxpipe.training.inputs import input_problems, naming_all_inputs
from maxpipe.training.run_directory import RunDirectory


@pytest.fixture
def config(tmp_path):
    """A run whose inputs are sound: files of text, bytes as tokens, no initial weights."""
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("some words\n")
    values = {
        "output_dir": str(tmp_path / "runs"),
        "data.source": "text",
        "data.path": f"{tmp_path}/*.txt",
        "data.eval_fraction": 0.5,
        "eval.every": 1,
        "model.vocab_size": 259,
    }
    return derive_known(replace(Config(), **values))


def keys_of(problems):
    return [problem.key for problem in problems]


def test_input_problems_of_a_sound_run_are_none(config):
    assert input_problems(config) == []


@pytest.mark.parametrize(
    ("changed", "keys"),
    [
        ({"data.tokenizer": "none.json"}, {"data.tokenizer"}),
        ({"model.vocab_size": 200, "model.unpadded_vocab_size": 200}, {"model.vocab_size"}),
        ({"data.path": "none"}, {"data.path"}),
        ({"data.eval_path": "none"}, {"data.eval_path"}),
        ({"init_from": "hf:/none"}, {"init_from"}),
        ({"checkpoint.resume": "must"}, {"checkpoint.resume"}),
        (
            {"data.tokenizer": "none.json", "data.path": "none", "init_from": "maxtext:/none"},
            {"data.tokenizer", "data.path", "init_from"},
        ),
    ],
)
def test_input_problems_name_every_input_that_cannot_be_used(config, changed, keys):
    assert {*keys_of(input_problems(replace(config, **changed)))} == keys


def test_input_problems_of_a_run_with_checkpoints_leave_out_weights_that_are_not_read(
    config, tmp_path
):
    config = replace(config, init_from="hf:/none")
    (tmp_path / "runs" / config.run_name / "checkpoints" / "3").mkdir(parents=True)
    assert input_problems(config) == []


def test_naming_all_inputs_adds_each_problem_once_and_keeps_the_first_first(config):
    config = replace(config, **{"data.path": "none", "init_from": "hf:/none"})
    first = Problem("output_dir", "cannot write to it")
    (of_data,) = input_problems(replace(config, init_from=""))[:1]
    with pytest.raises(ConfigError) as caught, naming_all_inputs(config):
        raise ConfigError(first, of_data)
    assert caught.value.problems[:2] == (first, of_data)
    assert keys_of(caught.value.problems) == ["output_dir", "data.path", "init_from"]


def test_naming_all_inputs_opens_none_where_nothing_is_refused(config, monkeypatch):
    monkeypatch.setattr(inputs, "open_tokenizer", lambda config: pytest.fail("was opened"))
    with naming_all_inputs(config):
        pass


def test_nothing_to_resume_in_a_relative_directory_is_one_problem(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = replace(config, **{"output_dir": "runs", "checkpoint.resume": "must"})
    checkpointer = Checkpointer(RunDirectory(config).checkpoints, config.checkpoint)
    with pytest.raises(ConfigError) as caught, naming_all_inputs(config):
        step_to_resume("must", checkpointer.steps(), checkpointer.place)
    checkpointer.close()
    assert len(caught.value.problems) == 1

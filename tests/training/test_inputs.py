"""All that is wrong with what a run reads and writes is said at once."""

import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.runs import last_words, write_config

from maxpipe.config import Config, ConfigError, replace
from maxpipe.config.load import Loaded, derive_known
from maxpipe.config.options import OPTIONS
from maxpipe.training.inputs import check_inputs


@pytest.fixture
def config(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("some words\n")
    data = {"data.source": "text", "data.path": f"{tmp_path}/*.txt", "data.eval_fraction": 0.5}
    keys = {"output_dir": str(tmp_path / "runs"), "eval.every": 1, "model.vocab_size": 259}
    return derive_known(replace(Config(), **data, **keys))


def problems_of(config, **changed):
    try:
        check_inputs(Loaded(replace(config, **changed), dict.fromkeys(OPTIONS, "")))
    except ConfigError as error:
        return [problem.key for problem in error.problems]
    return []


def test_check_inputs_names_every_input_that_cannot_be_used(config, tmp_path):
    assert problems_of(config) == []
    unread = {"init_from": "hf:/none"}
    lacking = {"data.tokenizer": "none.json", "data.path": "none", **unread}
    assert {*problems_of(config, **lacking)} == {*lacking}
    assert problems_of(config, **{"data.eval_path": "none"}) == ["data.eval_path"]
    mesh = {"data.path": "none", "mesh.simulated_devices": 8, "mesh.ici.fsdp": 3}
    assert {*problems_of(config, **mesh)} == {"data.path", "mesh.ici"}
    steps = tmp_path / "runs" / config.run_name / "checkpoints"
    (steps / "3").mkdir(parents=True)
    assert problems_of(config, **unread) == []  # the run continues from its checkpoint
    assert problems_of(config, **{"data.path": "none"}) == ["data.path"]
    (steps / str(config.steps)).mkdir()
    assert problems_of(config, **{"data.path": "none"}) == []  # the run is finished


def test_check_inputs_of_one_of_several_processes_opens_none(config, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    assert problems_of(config, **{"data.path": "none"}) == []


# Runs commands, from JSON on the command line, where neither JAX nor extras can be imported.
WITHOUT_JAX = """
import contextlib, importlib.util, io, json, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "grain", "lm_eval", "wandb", "datasets"):
            raise ModuleNotFoundError(f"{name} is hidden", name=name)

sys.meta_path.insert(0, Hidden())
said = []
for command, *words in json.loads(sys.argv[1]):
    is_package = importlib.util.find_spec(f"maxpipe.{command}").submodule_search_locations
    module = f"maxpipe.{command}" + ".__main__" * bool(is_package)
    with contextlib.redirect_stderr(io.StringIO()) as error, contextlib.suppress(SystemExit):
        importlib.import_module(module).main(words)
    said.append(error.getvalue())
print(json.dumps(said))
"""


def test_commands_name_what_is_missing_without_jax(tmp_path):
    words = write_config(tmp_path, steps=4)
    (tmp_path / "runs" / "empty").mkdir(parents=True)
    empty = str(tmp_path / "runs" / "empty")
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"other": ["text"]}), table)
    words.append(f"data.cache_dir={tmp_path / 'cache'}")
    expected = {
        ("train", "data.source=text", "data.path=/none/*.txt"): "data.path: no file at",
        ("train", "data.source=parquet", f"data.path={table}"): "has the columns",
        ("train", "data.mixture=[{source: text, path: /none, weight: 1}]"): "entry 1: data.path",
        ("train", "data.source=datasets", "data.path=hf:a/b"): "needs datasets",
        ("train", "data.tokenizer=/none/tokenizer.json"): "data.tokenizer: ",
        ("train", "model.vocab_size=200"): "model.vocab_size: ",
        ("train", "telemetry.wandb=p"): "telemetry.wandb: needs wandb",
        ("train", "init_from=hf:/none"): "init_from: there is no /none/config.json",
        ("train", "checkpoint.resume=must"): "checkpoint.resume: ",
        ("train", f"output_dir={words[0]}"): "output_dir: cannot write to ",
        ("generate", "/none", "--prompt=a"): "RUN_DIR: there is no directory /none",
        ("generate", empty, "--prompt=a"): "holds no checkpoint",
        ("evaluate", "/none", "--tasks=a"): "--tasks: needs lm_eval",
        ("export", "/none", "--hf", "new"): "RUN_DIR: there is no directory /none",
        ("runs", "show", "/none"): "/none",
    }
    lines = []
    for command, *rest in expected:
        given = words if command == "train" else []
        lines.append([command, *last_words([*given, *rest])])
    program = [sys.executable, "-c", WITHOUT_JAX, json.dumps(lines)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line, text, said in zip(lines, expected.values(), json.loads(done.stdout), strict=True):
        assert "config error: " in said, line
        assert text in said
        assert said.endswith("1 problem found\n")

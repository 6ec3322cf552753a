"""Test the claim of a run directory: the same run may continue, another may not."""

import re
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.record import record_file
from maxpipe.config import CheckpointConfig, Config, ConfigError, load, replace, to_yaml
from maxpipe.training.resuming import dated
from maxpipe.training.run_directory import RunDirectory


@pytest.fixture
def config(tmp_path):
    keys = {"output_dir": str(tmp_path), "run_name": "a", "checkpoint.every": 7}
    return replace(Config(), **keys)


def claim(config):
    RunDirectory(config).claim()


def commit(config, step=10):
    path = RunDirectory(config).checkpoints / str(step)
    path.mkdir(parents=True)
    return path


def test_claim_of_a_new_directory_writes_only_a_config_that_loads_back(config):
    run = RunDirectory(config)
    run.check_owner()
    assert not run.root.exists()
    claim(config)
    assert run.root == Path(config.output_dir) / "a"
    assert [path.name for path in run.root.iterdir()] == ["config.yml"]
    assert load(run.config_file).config == config
    (run.checkpoints / "10.orbax-checkpoint-tmp").mkdir(parents=True)
    claim(replace(config, seed=5))  # as long as no step is committed


def test_date_of_a_chat_template_is_that_of_the_first_start(config, tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ strftime_now('%Y') }}")
    keys = {"data.source": "chat", "data.chat_template": str(tmp_path / "mine.jinja")}
    config = replace(config, **keys)
    run = RunDirectory(config)
    notes = []
    today = dated(config, run, notes.append)
    assert notes[0].startswith(f"data.chat_date={today.data.chat_date}: ")
    assert abs(date.fromisoformat(today.data.chat_date) - date.today()) <= timedelta(days=1)
    claim(replace(today, **{"data.chat_date": "2024-07-26"}))
    commit(config)
    claim(config)  # a date that is not given is no change
    run.config_file.write_text(to_yaml(replace(config, **{"data.chat_date": "2024-07-26"})))
    assert dated(config, run, notes.append).data.chat_date == "2024-07-26"
    (tmp_path / "mine.jinja").write_text("no date")
    assert dated(config, run, notes.append) == config


def test_claim_with_checkpoints_accepts_the_same_config_and_records_changes(config):
    claim(config)
    commit(config)
    allowed = {"steps": 999, "optimizer.learning_rate": 1.0, "mesh.ici.stage": 4}
    changed = replace(config, **allowed)
    claim(changed)
    assert load(RunDirectory(config).config_file).config == changed


def test_claim_with_checkpoints_of_another_config_is_refused_and_writes_nothing(config):
    claim(config)
    commit(config)
    before = RunDirectory(config).config_file.read_text()
    for key, value in [("model.num_layers", 99), ("data.source", "text"), ("data.path", "x.txt")]:
        with pytest.raises(ConfigError) as caught:
            claim(replace(config, **{key: value}))
        assert [problem.key for problem in caught.value.problems] == [key, "run_name"]
        assert f"is {value!r}, but the checkpoints in" in str(caught.value)
        assert "checkpoint.resume=never is not enough" in str(caught.value)
        assert RunDirectory(config).config_file.read_text() == before


def test_claim_with_another_dtype_needs_convert_dtype(config):
    claim(config)
    commit(config)
    for key in ("model.dtype", "model.param_dtype"):
        config = replace(config, **{key: "bfloat16"})
        message = rf"{key}: is 'bfloat16'.*; checkpoint\.convert_dtype=true continues"
        with pytest.raises(ConfigError, match=message):
            claim(config)
        claim(replace(config, **{"checkpoint.convert_dtype": True}))
        claim(config)


def test_claim_without_a_config_file_compares_with_the_checkpoints(config):
    claim(config)
    run = RunDirectory(config)
    checkpointer = Checkpointer(run.checkpoints, CheckpointConfig())
    meta = {"config": {"seed": 0, "model": {"num_layers": config.model.num_layers}}}
    rows = np.zeros((1, 3), np.int64)
    for step in (1, 2):
        checkpointer.save(step, {"a": rows}, rows, meta)
    checkpointer.close()
    record_file(run.checkpoints / "2").write_text("torn")
    for torn in (b"seed: [0", b"\xff\x00", None):
        run.config_file.unlink()
        if torn:
            run.config_file.write_bytes(torn)
        claim(config)
    run.config_file.unlink()
    with pytest.raises(ConfigError, match=r"model.num_layers: is 99"):
        claim(replace(config, **{"model.num_layers": 99}))


def test_claim_with_a_key_missing_from_the_config_file_assumes_the_default(config):
    claim(config)
    commit(config)
    run = RunDirectory(config)
    run.config_file.write_text(re.sub(".*z_loss.*\n", "", run.config_file.read_text()))
    run.check_owner()
    with pytest.raises(ConfigError, match=r"model.z_loss: is 0.5, but .* made with 0.0"):
        claim(replace(config, **{"model.z_loss": 0.5}))


def test_keep_config_adds_what_differs_from_the_newest(config):
    run = RunDirectory(config)
    claim(config)
    for step, rate in [(0, 1.0), (10, 1.0), (20, 2.0)]:
        RunDirectory(replace(config, **{"optimizer.learning_rate": rate})).keep_config(step)
    kept = sorted(file.name for file in run.config_history.iterdir())
    assert kept == ["0001-step-0.yml", "0002-step-20.yml"]


WITHOUT = {
    ("maxpipe.training.run_directory", "maxpipe.checkpoint.mirror"): ("jax",),
    ("maxpipe.storage.lease", "maxpipe.supervise.process"): ("jax",),
    ("maxpipe.tokenize",): ("jax",),
    ("maxpipe.data.loader",): ("jax", "grain", "tokenizers"),
    ("maxpipe.checkpoint.manager", "maxpipe.checkpoint.reader"): ("orbax", "tensorstore"),
}


def test_modules_import_none_of_the_heavy_packages_that_they_can_do_without():
    lines = [
        f"import sys, {', '.join(modules)}\nassert not {{*{heavy}}} & sys.modules.keys()\n"
        for modules, heavy in WITHOUT.items()
    ]
    subprocess.run([sys.executable, "-c", "".join(lines)], check=True)

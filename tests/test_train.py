"""Test the train command from end to end, and its answers to bad input."""

import math
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from helpers.runs import checkpoints, losses, output_dir, rows, run, train, write_config

from maxpipe import runs
from maxpipe.generate import __main__ as generate
from maxpipe.train import main

AUTO = "pipeline.schedule=1f1b pipeline.layers_per_stage=auto"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    directory = tmp_path_factory.mktemp("train")
    options = {"steps": 6, "checkpoint": "{every: 2, keep: 10}", "eval": "{every: 3}"}
    return write_config(directory, telemetry="{log_every: 1, profile_steps: [3, 4]}", **options)


@pytest.fixture(scope="module")
def finished(words):
    printed = train(words)
    return output_dir(words) / "tiny", printed


def files(root):
    return {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


class TestFinishedRun:
    def test_metrics_of_a_run_have_a_row_for_each_step_from_1(self, finished):
        root, _ = finished
        assert sorted(losses(root)) == [1, 2, 3, 4, 5, 6]
        first = rows(root)[0]
        expected = "step loss grad_norm learning_rate step_seconds tokens_per_second mfu"
        assert set(expected.split()) <= set(first)
        assert first["loss"] == pytest.approx(5.77, abs=0.1)  # ln 320
        assert losses(root)[6][0] < first["loss"]

    def test_metrics_of_a_run_have_a_row_for_each_evaluation(self, finished):
        first, last = (row for row in rows(finished[0]) if "eval_loss" in row)
        assert (first["step"], last["step"]) == (3, 6)
        assert 0 < last["eval_loss"] < first["eval_loss"]
        assert last["eval_perplexity"] == math.exp(last["eval_loss"])
        # A byte is a token, and only ends of documents are tokens without a byte.
        bits_per_token = last["eval_loss"] / math.log(2)
        assert bits_per_token <= last["eval_bits_per_byte"] < 1.05 * bits_per_token

    def test_run_directory_has_checkpoints_events_profile_and_config(self, finished):
        root, _ = finished
        assert checkpoints(root) == [2, 4, 6]
        assert list((root / "tensorboard").glob("events.out.tfevents.*"))
        assert list((root / "profile").rglob("*.xplane.pb"))
        assert yaml.safe_load((root / "config.yml").read_text())["model"]["head_dim"] == 16

    def test_start_report_has_at_most_25_lines_and_every_decision(self, finished):
        before_steps = finished[1].partition("\nstep 1/6")[0]
        assert len(before_steps.splitlines()) <= 25
        for text in (
            "stage=2 x fsdp=4",
            "layers 0, 2",
            # In forwards of a layer, a stage has 4 of 1 and 4 backwards of 3, and waits for 4; the
            # head, which all stages share, takes 3 * 32 * 320 multiplications of a layer's
            # 4 * 32**2 + 3 * 32 * 64 + 32 * 32 for each token: 4 / (20 + 2.727).
            "2 microbatches, bubble 17.6 %",
            "pipeline.engine=scheduled",
            "61,728",
        ):
            assert text in before_steps
        assert "weights     random, seed 0" in before_steps.splitlines()
        assert before_steps.splitlines()[-1].startswith("compiling   the first step, minutes for")

    def test_console_shows_the_last_step_and_the_end(self, finished):
        assert "step 6/6  loss" in finished[1]
        (seconds,) = re.findall(r"done: 6 steps in .*, (\d+) s for this start", finished[1])
        (account,) = (row for row in rows(finished[0]) if "goodput" in row)
        parts = sum(value for name, value in account.items() if name.startswith("seconds_in_"))
        assert parts == pytest.approx(int(seconds), abs=1)
        (command,) = re.findall("`python -m maxpipe.runs (plot .*)` draws", finished[1])
        html = finished[0].parent / "runs.html"
        assert runs.main([*command.split(), f"--html={html}"]) == 0

    def test_train_when_finished_says_so_and_changes_no_file(self, words, finished):
        root, _ = finished
        before = files(root)
        changed = ["steps=5", "optimizer.learning_rate=1e-4"]
        finished = f"{root} is finished: step 6 is saved, and steps=5; nothing to do\n"
        assert train([*words, *changed]).endswith(finished)
        assert before == files(root)

    def test_train_from_the_written_config_repeats_the_run(self, finished, tmp_path):
        root, _ = finished
        train([str(root / "config.yml"), f"output_dir={tmp_path}"])
        assert losses(tmp_path / "tiny") == losses(root)

    def test_train_with_more_steps_resumes_from_the_last_checkpoint(
        self, words, finished, tmp_path
    ):
        shutil.copytree(finished[0], tmp_path / "tiny")
        root = tmp_path / "tiny"
        changed = ["steps=8", "optimizer.decay_steps=6", "optimizer.learning_rate=1e-4"]
        printed = train([*words, f"output_dir={tmp_path}", *changed])
        assert sorted(losses(root)) == list(range(1, 9))
        assert checkpoints(root) == [2, 4, 6, 8]
        for change in ("steps 6 -> 8", "optimizer.learning_rate 0.003 -> 0.0001"):
            assert f"changed since step 6: {change}\n" in printed
        assert [row for row in rows(root) if "changed" in row] == [
            {"step": 6, "changed": "steps", "before": 6, "now": 8},
            {"step": 6, "changed": "optimizer.learning_rate", "before": 0.003, "now": 0.0001},
        ]
        history = sorted((root / "config_history").iterdir())
        assert [path.name for path in history] == ["0001-step-0.yml", "0002-step-6.yml"]
        assert [yaml.safe_load(path.read_text())["steps"] for path in history] == [6, 8]


def test_train_on_automatic_stages_has_the_losses_of_a_sequential_run(tmp_path):
    """Of eight steps from the same seed and data; with this vocabulary stages are uneven."""
    words = [*write_config(tmp_path, steps=8, checkpoint="{every: 0}"), "model.vocab_size=1024"]
    without_stages = ["pipeline.engine=sequential", "mesh.ici.stage=1", "mesh.ici.fsdp=8"]
    train([*words, "run_name=sequential", *without_stages])
    printed = train([*words, "run_name=stages", *AUTO.split()])
    sequential, stages = (losses(tmp_path / "runs" / n) for n in ("sequential", "stages"))
    assert sorted(stages) == list(range(1, 9))
    for step, (loss, _, rate) in sequential.items():
        assert stages[step][0] == pytest.approx(loss, rel=1e-5), step
        assert stages[step][2] == rate
    assert checkpoints(tmp_path / "runs" / "stages") == []
    slowest = "the slowest stage takes 12.73 forwards of a layer"
    assert f"pipeline.layers_per_stage=[3,1]: {slowest}" in printed
    assert "  stage 0   layers 0-2\n  stage 1   layers 3\n" in printed
    resolved = (tmp_path / "runs" / "stages" / "config.yml").read_text()
    assert "\n  layers_per_stage: [3, 1]  # derived\n" in resolved


def test_compilation_cache_with_simulated_devices_is_reused(tmp_path):
    left_out = ("JAX_ENABLE_COMPILATION_CACHE", "NPROC")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    cache = tmp_path / "cache"
    words = [*write_config(tmp_path, steps=2), f"compile.cache_dir={cache}"]
    programs = []
    for name in ("first", "second"):
        command = [sys.executable, "-m", "maxpipe.train", *words, f"run_name={name}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert "compile.cache_dir=off" not in done.stdout
        programs.append({path.name for path in cache.iterdir()})
    assert any("train_step" in name for name in programs[0])
    assert programs[0] == programs[1]
    assert losses(tmp_path / "runs" / "second") == losses(tmp_path / "runs" / "first")


class TestBadInput:
    def test_train_with_a_bad_value_ends_with_2_and_names_the_key_and_a_remedy(self, tmp_path):
        config = write_config(tmp_path, steps=4)
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / "some.txt").write_text("a document\n" * 50)
        for words, expected in {
            "steps=ten": "steps, ten",
            "data.source=text data.path={}/empty.txt": "data.path",
            # Found at the start, not at the first evaluation.
            "data.source=text data.path={}/some.txt data.eval_fraction=0 eval.every=2": "eval",
            "checkpoint.resume=100": "checkpoint.resume",
            "sharding.logical_axis_rules=[[embed,[fsdp]],[mlp,[fsdp]]]": "logical_axis_rules",
            f"{AUTO} pipeline.memory_limit_gib=1e-5": "fits 1e-05 GiB a device (pipeline.memory_l",
            "compile.load=nowhere.bin": "compile.load: cannot read nowhere.bin",
            "mesh.ici.stage=3 model.num_layers=6 data.global_batch_size=24": "12, 8 devices",
        }.items():
            code, out, error = run([*config, *words.format(tmp_path).split()])
            assert (code, out) == (2, ""), words
            assert [text for text in expected.split(", ") if text not in error] == [], error
            assert "Traceback" not in error
            assert not (tmp_path / "runs").exists()
        assert error.count("mesh.ici.fsdp=") == 3  # meshes that would fit


def test_train_on_random_ids_of_a_small_vocabulary_evaluates_and_goes_on(tmp_path, capsys):
    options = {"steps": 2, "eval": "{every: 2, batches: 1}"}
    words = write_config(tmp_path, telemetry="{log_every: 1}", **options)
    root = output_dir(words) / "tiny"
    words += ["data.source=synthetic", "model.vocab_size=32", "model.num_layers=1"]
    words += ["pipeline.engine=sequential", "mesh.ici.stage=1", "mesh.ici.fsdp=8"]
    for end in (["stop_after=1"], []):
        assert main([*words, *end]) == 0
    assert [step for step, (loss, *_) in losses(root).items() if 3 < loss < 4] == [1, 2]  # ln 32
    (evaluation,) = (row for row in rows(root) if "eval_loss" in row)
    assert 3 < evaluation["eval_loss"] < 4
    assert "eval_bits_per_byte" not in evaluation
    printed = capsys.readouterr().out
    assert "data.tokenizer=ids:32: data.source=synthetic needs no text" in printed
    capsys.readouterr()
    assert generate.main([str(root), "--prompt=3 1 4", "--max-tokens=4"]) == 0
    assert {int(word) for word in capsys.readouterr().out.split()} <= {*range(31)}

"""A `Run` of a program: the command's files, a callback after every step, signals, threads."""

import math
import os
import signal
import threading

import jax
import pytest
from helpers.runs import assert_same_run, last_words, rows, write_config

import maxpipe
from maxpipe import train
from maxpipe.api import run as api_run
from maxpipe.supervise.ending import INTERRUPTED, PREEMPTED
from maxpipe.training.loop import DIVERGED

# The tests' own process has eight devices; without stages, a step is compiled in a second.
IN_PROCESS = ["mesh.simulated_devices=8", "mesh.ici.fsdp=8", "mesh.ici.stage=1"]
IN_PROCESS += ["model.num_layers=2", "pipeline.num_repeats=1"]


def words_of(directory, **options):
    config, *words = write_config(directory, **{"steps": 4, "checkpoint": "{every: 2}"} | options)
    return [config, *words, *IN_PROCESS]


class TestTrainedRun:
    @pytest.fixture(scope="class")
    def calls(self):
        return []

    @pytest.fixture(scope="class")
    def words(self, tmp_path_factory):
        return words_of(tmp_path_factory.mktemp("run"))

    @pytest.fixture(scope="class")
    def trained(self, words, calls):
        run = maxpipe.Run(maxpipe.load_config(*words))
        assert (run.step, run.state) == (0, None)
        run.train(
            lambda step, metrics: calls.append((step, metrics, run.step, int(run.state.step)))
        )
        return run

    def test_run_calls_back_after_every_step_with_its_row_and_state(self, trained, calls):
        steps = [row for row in rows(trained.directory) if "loss" in row]
        assert [step for step, *_ in calls] == [1, 2, 3, 4]
        assert [metrics for _, metrics, *_ in calls] == steps
        # Not one step ahead, as without a callback.
        assert [[*done] for _, _, *done in calls] == [[1, 1], [2, 2], [3, 3], [4, 4]]
        assert steps[0]["loss"] > 5.5  # ln 320 is 5.77

    def test_history_is_the_rows_of_the_file(self, trained):
        assert trained.history == rows(trained.directory)
        assert maxpipe.history(str(trained.directory)) == trained.history
        with pytest.raises(maxpipe.ConfigError, match=r"run_dir: there is no .*metrics\.jsonl"):
            maxpipe.history(trained.directory / "checkpoints")

    def test_run_writes_what_the_command_writes(self, trained, words, tmp_path):
        assert train.main(last_words([*words, f"output_dir={tmp_path}"])) == 0
        assert trained.directory.name == "tiny"
        assert_same_run(trained.directory, tmp_path / "tiny", 4)
        names, others = (
            {path.relative_to(root).as_posix() for path in root.rglob("*.yml")}
            for root in (trained.directory, tmp_path / "tiny")
        )
        assert names == others >= {"config.yml"}

    def test_run_has_its_last_state_and_says_where_it_is(self, trained):
        assert trained.step == int(trained.state.step) == 4
        assert trained.state.params["layers"]
        assert repr(trained) == f"<maxpipe run in {trained.directory}, 4 of 4 steps done>"

    def test_run_that_is_finished_trains_nothing_and_says_so(self, trained, words, capsys):
        again = maxpipe.Run(maxpipe.load_config(*words))
        for run in (trained, again):
            run.train(lambda *_: pytest.fail("called back"))
            printed = capsys.readouterr().out
            assert "step 4 is saved, and steps=4; nothing to do" in printed
            assert "no callback called" in printed
        assert (again.step, again.state, repr(again)) == (4, None, repr(trained))


def test_run_that_its_callback_ends_goes_on_in_a_thread(tmp_path, capfd):
    config = maxpipe.load_config(*words_of(tmp_path, checkpoint="{every: 1}"))
    run = maxpipe.Run(config)

    def end_at_2(step, metrics):
        assert math.isfinite(metrics["loss"])
        assert step < 2, "enough"

    with pytest.raises(AssertionError, match="enough"):
        run.train(end_at_2)
    assert run.step == 2
    steps = []
    thread = threading.Thread(target=run.train, args=(lambda step, _: steps.append(step),))
    thread.start()
    thread.join()
    # Its save of step 1 was finished, and step 2 was not saved yet.
    assert steps == [2, 3, 4]
    assert run.step == 4
    assert "signals are left alone" in capfd.readouterr().err


def test_run_with_other_devices_than_jax_has_started_names_a_remedy(tmp_path):
    assert jax.device_count() == 8
    config = maxpipe.load_config(*words_of(tmp_path), "mesh.simulated_devices=4", "mesh.ici.fsdp=2")
    with pytest.raises(ValueError, match=r"mesh.simulated_devices: JAX has started.*restart"):
        maxpipe.Run(config)
    assert not (tmp_path / "runs").exists()


def test_run_that_does_not_fit_the_devices_is_a_value_error(tmp_path):
    words = words_of(tmp_path)[:-1]
    with pytest.raises(ValueError, match=r"mesh.ici"):
        maxpipe.Run(maxpipe.load_config(*words, "mesh.ici.fsdp=3"))


def test_run_that_ends_early_raises(tmp_path, monkeypatch):
    run = maxpipe.Run(maxpipe.load_config(*words_of(tmp_path)))
    errors = {DIVERGED: maxpipe.Diverged, INTERRUPTED: KeyboardInterrupt, PREEMPTED: SystemExit}
    for code, error in errors.items():
        monkeypatch.setattr(api_run, "launch", lambda *_, code=code: code)
        with pytest.raises(error):
            run.train()


def test_run_interrupted_in_a_program_saves_and_raises(tmp_path, capfd):
    run = maxpipe.Run(maxpipe.load_config(*words_of(tmp_path, checkpoint="{every: 100}")))

    def interrupt(step, _):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run.train(interrupt)
    assert "step 2 is saved" in capfd.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

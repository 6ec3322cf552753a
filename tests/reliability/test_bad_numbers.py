"""Losses and gradients that are not finite or are spikes, in complete runs."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.runs import assert_same_run, checkpoints, saved
from helpers.training_process import steps_of, train_here

from maxpipe.config import OptimizerConfig
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.update import SpikeFilter


def run(tmp_path, *words):
    return train_here(tmp_path, "checkpoint.every=2", *words)


@pytest.fixture
def poison(monkeypatch):

    def _poison(first, last):
        original, served = BatchPlacer.__call__, []

        def call(self, batch):
            if first <= len(served) <= last:
                batch = {**batch, "weights": np.full_like(batch["weights"], np.nan)}
            served.append(None)
            return original(self, batch)

        monkeypatch.setattr(BatchPlacer, "__call__", call)

    return _poison


def test_train_non_finite_step_is_named_and_the_next_finite_one_is_saved(tmp_path, poison, capsys):
    poison(3, 4)
    assert run(tmp_path, "steps=8", "optimizer.max_consecutive_skips=3") == 0
    output = capsys.readouterr().out
    assert "step 4: not finite, update skipped" in output
    assert "batch 3 counted from 0" in output
    assert steps_of(tmp_path, "skipped") == {1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 0, 7: 0, 8: 0}
    losses = steps_of(tmp_path)
    assert losses[4] is losses[5] is None
    assert checkpoints(tmp_path / "base") == [2, 6, 8]


def test_train_diverged_exits_with_42_and_keeps_last_good_step(tmp_path, poison, capsys):
    poison(3, 1000)
    assert run(tmp_path, "steps=100", "optimizer.max_consecutive_skips=3") == 42
    output = capsys.readouterr().out
    assert (
        "3 steps in a row were not finite (optimizer.max_consecutive_skips); stopped without saving"
        in output
    )
    # Step 7 was dispatched before the loss of step 6 was known.
    assert max(steps_of(tmp_path)) == 6
    assert "stopped after step 6 of 100, step 2 is saved" in output.splitlines()[-1]
    assert checkpoints(tmp_path / "base") == [2]


LATE = ("checkpoint.every=100", "steps=8", "optimizer.max_consecutive_skips=3")


def test_train_non_finite_last_steps_are_saved_as_the_step_before_left_them(tmp_path, poison):
    poison(6, 7)
    assert run(tmp_path, *LATE) == 0
    root = tmp_path / "base"
    assert checkpoints(root) == [8]
    assert saved(root, 8)["skips"] == 2
    assert run(tmp_path / "good", *LATE, "stop_after=6") == 0
    good, bad = saved(tmp_path / "good" / "base", 6), saved(root, 8)
    assert bad.keys() == good.keys()
    differ = {name for name in good if bad[name].tobytes() != good[name].tobytes()}
    assert differ <= {"step", "skips", "iterator"}, "which go on in a bad step"
    # The run is finished: the same command makes no step again.
    before = (root / "metrics.jsonl").read_bytes()
    assert run(tmp_path, *LATE) == 0
    assert (root / "metrics.jsonl").read_bytes() == before


def test_train_stopped_after_a_non_finite_step_goes_on_with_the_same_bits(
    tmp_path, poison, monkeypatch
):
    for name in ("whole", "parts"):
        poison(3, 4)
        assert run(tmp_path / name, *LATE, *(["stop_after=4"] if name == "parts" else [])) == 0
        monkeypatch.undo()
    assert checkpoints(tmp_path / "parts" / "base") == [4]
    poison(0, 0)  # batch 4 counted from 0 is the first of this start
    assert run(tmp_path / "parts", *LATE) == 0
    assert_same_run(tmp_path / "parts" / "base", tmp_path / "whole" / "base", 8)


def test_train_stopped_among_non_finite_steps_counts_them_when_it_goes_on(tmp_path, poison, capsys):
    poison(2, 1000)
    assert run(tmp_path, *LATE, "stop_after=4") == 0
    poison(0, 1000)
    assert run(tmp_path, *LATE) == 42
    assert max(steps_of(tmp_path)) == 5
    output = capsys.readouterr().out
    assert "3 steps in a row were not finite" in output
    assert "They began with what is saved as step 4" in output


def test_train_non_finite_parameters_are_not_saved_and_a_lower_rate_recovers(tmp_path, capsys):
    words = ("checkpoint.every=1", "optimizer.grad_clip_norm=0", "optimizer.warmup_steps=0")
    # The loss of step 1 is that of the initial parameters, and finite.
    assert run(tmp_path, *words, "steps=1", "optimizer.learning_rate=3e38") == 42
    output = capsys.readouterr().out
    assert steps_of(tmp_path)[1] is not None
    assert "the state after step 1 is not finite (params." in output
    assert "stopped without saving. Lower optimizer.learning_rate" in output
    assert "stopped after step 1 of 1, nothing is saved" in output.splitlines()[-1]
    assert checkpoints(tmp_path / "base") == []
    assert run(tmp_path, *words, "steps=2", "optimizer.learning_rate=1e-3") == 0
    assert checkpoints(tmp_path / "base") == [1, 2]


def judge(values):
    spikes = SpikeFilter(OptimizerConfig(spike_window=16, spike_deviations=6.0))
    history, accepted = spikes.init(), []
    for value in values:
        loss = jnp.float32(value)
        accept, history = spikes(history, loss, jnp.float32(1), jnp.isfinite(loss))
        accepted.append(bool(accept))
    return accepted


def noise(count):
    return 3 + 0.1 * np.random.default_rng(0).standard_normal(count)


def test_spike_filter_rejects_what_stands_out_of_a_full_window_and_what_is_not_finite():
    for values, rejected in (
        ([*noise(15), 9.0, *noise(40)], []),
        ([*noise(20), 9.0, *noise(40)], [20]),
        ([*noise(20), np.nan, np.inf, *noise(40)], [20, 21]),  # they do not enter the window
        ([*np.full(20, 3.0), 3.01, *np.full(20, 3.0)], []),  # a ripple on a plateau
    ):
        assert [i for i, accepted in enumerate(judge(values)) if not accepted] == rejected


def test_spike_filter_rejects_spike_of_gradient_norm():
    spikes = SpikeFilter(OptimizerConfig(spike_window=16))
    history = spikes.init()
    for value in noise(20):
        _, history = spikes(history, jnp.float32(3), jnp.float32(value), jnp.bool_(True))
    assert not spikes(history, jnp.float32(3), jnp.float32(9), jnp.bool_(True))[0]


def test_spike_filter_accepts_new_level():
    values = [*noise(20), *(6 + noise(16))]
    accepted = judge(values)
    assert not accepted[20]
    assert all(accepted[28:])


def test_train_resumed_keeps_spike_window(tmp_path):
    words = ("optimizer.spike_window=16", "checkpoint.every=100")
    assert run(tmp_path / "whole", *words, "steps=6") == 0
    assert run(tmp_path / "parts", *words, "steps=6", "stop_after=3") == 0
    assert run(tmp_path / "parts", *words, "steps=6") == 0
    assert_same_run(tmp_path / "whole" / "base", tmp_path / "parts" / "base", 6)
    history = saved(tmp_path / "parts" / "base", 6)
    assert history["history.count"] == 6
    assert np.count_nonzero(history["history.values"]) == 12


def test_train_resumed_may_begin_to_filter_spikes(tmp_path):
    assert run(tmp_path, "steps=6", "stop_after=3") == 0
    assert run(tmp_path, "optimizer.spike_window=16", "steps=6") == 0
    assert sorted(steps_of(tmp_path)) == [1, 2, 3, 4, 5, 6]
    assert saved(tmp_path / "base", 6)["history.count"] == 3

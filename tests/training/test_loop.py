"""Test the order of the loop with fakes that record their calls."""

import math
from contextlib import nullcontext
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import tiny

from maxpipe.checkpoint.errors import CheckpointSaveError, StateNotFinite
from maxpipe.storage.lease import LeaseLost
from maxpipe.supervise.process import Supervision
from maxpipe.training import loop
from maxpipe.training.loop import DIVERGED, DONE, Session, evaluate, run_and_close, train


class Trainer:
    """Fake trainer: its state is the number of steps; the steps in `bad` are not finite."""

    def __init__(self, notes, bad):
        self.notes, self.bad = notes, bad

    def step(self, state, batch):
        assert batch == state, "the state after step N takes batch N"
        finite = state + 1 not in self.bad
        self.notes.append(f"step {state + 1}")
        number = np.float32(state + 1 if finite else np.nan)
        numbers = dict.fromkeys(("loss", "grad_norm", "learning_rate"), number)
        return state + 1, numbers | {"finite": np.bool_(finite), "skipped": np.int32(not finite)}

    def forward(self, state, batch):
        return {"cross_entropy": np.float32(6 * batch), "weight": np.float32(2 * batch)}

    stage_seconds, resume_clocks = list, Mock()

    def to_canonical(self, state):
        return f"state {state}"


class Loader:
    """Fake loader of batches 0, 1, ...; its position is the number of the next batch."""

    def __init__(self, notes, at):
        self.at = at
        self.close = partial(notes.append, "close loader")

    def __next__(self):
        self.at += 1
        return self.at - 1

    @property
    def state(self):
        return np.full((1, 3), self.at)


place = Mock(side_effect=lambda batch: batch, rows=(0,))


class Checkpointer:
    def __init__(self, notes, saved_step, settings, late, not_finite):
        self.notes, self.saved_step = notes, saved_step
        self.late, self.not_finite = late, not_finite
        self.every, self.replica_every = settings.every, settings.replica_every
        self.losses = {}
        self.close = partial(notes.append, "close checkpointer")

    def replica_due(self, step):
        return bool(self.replica_every) and step % self.replica_every == 0

    def replicate(self, step, state, rows, meta):
        self.notes.append(f"replicate {step}: {state}, batch {rows[0, 0]}")

    def due(self, step):
        return step in self.late or (bool(self.every) and step % self.every == 0)

    def check(self, step, state):
        self.notes.append(f"check {step}: {state}")

    def save(self, step, state, rows, meta, on_set_aside):
        if step in self.not_finite:
            raise StateNotFinite(step, ["params.weight"])
        if not self.losses:
            on_set_aside()
        self.notes.append(f"save {step}: {state}, batch {rows[0, 0]}")
        self.losses[step] = meta["eval_loss"]


class Recorder:
    def __init__(self, notes):
        self.notes, self.print_line = notes, notes.append
        self.give_up_later = partial(notes.append, "give up later rows")
        self.close = partial(notes.append, "close recorder")
        self.checkpoint = Mock()
        self.seconds = []

    def step(self, step, loss, grad_norm, learning_rate, step_seconds, **extra):
        self.notes.append(f"log {step}: {loss:g}")
        self.seconds.append(step_seconds)

    def evaluation(self, step, loss, bits_per_byte, losses):
        self.notes.append({"step": step, "loss": loss, **losses})

    def time_account(self, step, seconds, down):
        self.notes.append(f"account of {step}")


class Lease:
    """Fake lease: `check` knows of a loss after some calls, `verify` at once if it is gone."""

    checks_left, is_gone, lost = -1, False, False

    def check(self):
        self.checks_left -= 1
        self._raise_if(self.checks_left == 0 or self.lost)

    def verify(self):
        self._raise_if(self.is_gone or self.lost)

    def _raise_if(self, lost):
        self.lost = lost
        if lost:
            raise LeaseLost("the directory was moved")


@pytest.fixture
def notes(monkeypatch):
    noted = []

    def evaluate(run):
        noted.append(f"evaluate {run.step}")
        run.eval_losses = {run.step: run.step / 10}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    return noted


@pytest.fixture
def run(notes):
    """Return run(start, bad, late, not_finite, skips, **config) -> exit code.

    `run.losses` holds the saved losses. States after the steps in `not_finite` cannot be saved.
    `run.parts` makes what the loop works with.
    """

    def _run(**values):
        parts = make_parts(**values)
        _run.losses = parts.checkpointer.losses
        return train(parts)

    def make_parts(start=0, bad=(), late=(), not_finite=(), skips=0, traced=0, **values):
        config = tiny(**({"steps": 6, "checkpoint.every": 0} | values))
        checkpointer = Checkpointer(notes, start, config.checkpoint, late, not_finite)
        return Session(
            config=config,
            trainer=Trainer(notes, bad),
            state=start,
            step=start,
            skips=skips,
            loader=Loader(notes, start),
            place=place,
            place_eval=place,
            checkpointer=checkpointer,
            recorder=Recorder(notes),
            profiler=Mock(
                **{
                    "close.side_effect": lambda: notes.append("close profiler"),
                    "ends_with.side_effect": lambda step: step == traced,
                }
            ),
            meta={},
            supervision=Supervision(lease=Lease()),
        )

    _run.parts = make_parts
    return _run


def of(notes, *words):
    return [note for note in notes if note.startswith(words)]


@pytest.mark.parametrize(
    ("bad", "late", "values", "steps"),
    [
        ((), (), {"checkpoint.every": 2}, (2, 4, 6)),
        ((), (), {"steps": 5, "checkpoint.every": 2, "eval.every": 3}, (2, 4, 5)),
        ((), (), {"stop_after": 4, "checkpoint.every": 3}, (3, 4)),
        # A step that is not finite is not saved, but the next finite one; the last one is.
        ((2, 3), (), {"checkpoint.every": 2, "steps": 9}, (4, 6, 8, 9)),
        ((4, 5), (), {"checkpoint.every": 4, "steps": 9}, (6, 8, 9)),
        ((2, 6), (), {"checkpoint.every": 2}, (3, 4, 6)),
        ((2,), (2, 5), {"checkpoint.every_minutes": 1}, (3, 5, 6)),  # due by time
        ((5, 6), (), {"checkpoint.every": 9, "optimizer.max_consecutive_skips": 0}, (6,)),
        ((5, 6), (), {"checkpoint.every": 9, "optimizer.max_consecutive_skips": 3}, (6,)),
        ((1, 3, 5), (), {"checkpoint.every": 9, "optimizer.max_consecutive_skips": 2}, (6,)),
        ((1, 2, 3, 4, 5, 6), (), {"optimizer.max_consecutive_skips": 0}, ()),
    ],
)
def test_loop_saves_states_with_the_data_position_after_these_steps(
    run, notes, bad, late, values, steps
):
    assert run(bad=bad, late=late, **values) == DONE
    assert of(notes, "save") == [f"save {step}: state {step}, batch {step}" for step in steps]
    skipped = [note.partition(":")[0] for note in notes if "skipped" in note]
    assert skipped == [f"step {step}" for step in bad]


def test_loop_logs_every_step_once_with_a_delay_of_one_step(run, notes):
    run()
    assert of(notes, "log") == [f"log {i}: {i}" for i in range(1, 7)]
    assert notes[:4] == ["step 1", "step 2", "log 1: 1", "step 3"]


def test_loop_waits_for_the_last_step_of_a_trace_only(run, notes):
    run(traced=3)
    assert notes[2:6] == ["log 1: 1", "step 3", "log 2: 2", "log 3: 3"]
    assert notes[6:9] == ["step 4", "step 5", "log 4: 4"]


def test_loop_logs_a_step_before_its_evaluation_and_save(run, notes):
    run(**{"checkpoint.every": 3, "eval.every": 3})
    last = ["step 6", "log 5: 5", "log 6: 6", "evaluate 6", "save 6: state 6, batch 6"]
    assert notes[-5:] == last
    assert of(notes, "evaluate") == ["evaluate 3", "evaluate 6"]
    notes.clear()
    run(**{"steps": 5, "checkpoint.every": 2, "eval.every": 3})
    assert of(notes, "evaluate") == ["evaluate 3", "evaluate 5"]


def test_loop_gives_later_rows_up_when_its_first_save_sets_steps_aside(run, notes):
    run(**{"checkpoint.every": 2})
    assert of(notes, "save", "give")[:2] == ["give up later rows", "save 2: state 2, batch 2"]
    assert notes.count("give up later rows") == 1
    notes.clear()
    run(not_finite={2}, **{"checkpoint.every": 2})
    assert of(notes, "give") == []


def test_loop_with_replicas_writes_one_where_nothing_is_saved(run, notes):
    run(bad={4}, **{"checkpoint.every": 3, "checkpoint.replica_every": 2, "steps": 8})
    assert of(notes, "save", "replicate") == [
        "replicate 2: state 2, batch 2",
        "save 3: state 3, batch 3",
        "save 6: state 6, batch 6",
        "replicate 8: state 8, batch 8",
        "save 8: state 8, batch 8",
    ]


def test_loop_that_begins_with_a_replica_and_takes_no_step_saves_it(run, notes):
    parts = run.parts(start=4, **{"stop_after": 3, "checkpoint.every": 2})
    parts.checkpointer.saved_step = 2
    assert train(parts) == DONE
    assert of(notes, "save", "step") == ["save 4: state 4, batch 4"]


def test_loop_stores_the_evaluation_loss_of_the_saved_step_only(run):
    run(**{"steps": 7, "checkpoint.every": 2, "eval.every": 3})
    assert run.losses == {2: None, 4: None, 6: 0.6, 7: 0.7}


@pytest.mark.parametrize(
    ("batches", "losses"),
    [((1, 3), {"loss": 3, "easy": 3, "hard": 3}), ((0, 0), {"loss": math.nan, "hard": math.nan})],
)
def test_evaluation_without_a_target_has_no_loss_and_says_so(run, notes, batches, losses):
    parts = run.parts(start=4)
    whole, hard = batches
    parts.held_out = [whole]
    parts.held_out_by_source = {"easy": [1], "hard": [hard]}
    evaluate(parts)
    *lines, row = notes[::-1]
    assert row == pytest.approx({"step": 4, "easy": 3} | losses, nan_ok=True)
    assert parts.eval_losses == ({4: 3} if whole else {})
    names = [] if whole else ["the evaluation: its batches have no token", ""]
    assert len(lines) == len(names)
    for line, name in zip(lines[::-1], names, strict=True):
        assert line.startswith(f"step 4: no loss of {name}")


@pytest.mark.parametrize(
    ("start", "values", "expected"),
    [
        (0, {"checkpoint.every": 0}, ["check 6: 6"]),
        (0, {"stop_after": 4, "eval.every": 3}, ["evaluate 3", "check 4: 4"]),
        (4, {"stop_after": 3, "checkpoint.every": 2}, []),
        (4, {"steps": 5}, ["check 5: 5"]),
    ],
)
def test_loop_takes_the_steps_that_are_left_and_ends_with_a_check(
    run, notes, start, values, expected
):
    assert run(start=start, **values) == DONE
    assert of(notes, "save", "evaluate", "check") == expected
    last = min(values.get("steps", 6), values.get("stop_after", 6))
    steps = [f"step {number}" for number in range(start + 1, last + 1)]
    assert [note for note in of(notes, "step") if ":" not in note] == steps


def test_loop_names_a_step_without_targets(run, notes):
    parts = run.parts(steps=1)
    step = parts.trainer.step
    none = {"loss": np.float32(0), "skipped": np.int32(1)}
    parts.trainer.step = lambda *words: (1, step(*words)[1] | none)
    assert train(parts) == DONE
    assert "step 1: no token to learn, update skipped" in " ".join(map(str, notes))


def test_loop_with_too_many_bad_steps_ends_diverged_without_a_save(run, notes):
    for bad, every, saved, began in [
        *(({2, 3, 4}, 1, [1], "step 1"), ({3, 4, 5}, 1, [1, 2], "step 2")),
        *(({4, 5, 6}, 2, [2], ""), ({4, 5, 6}, 100, [], "")),
    ]:
        notes.clear()
        limits = {"optimizer.max_consecutive_skips": 3, "checkpoint.every": every}
        assert run(bad=bad, **limits) == DIVERGED
        assert [int(note.split(":")[0][5:]) for note in of(notes, "save")] == saved
        assert "optimizer.max_consecutive_skips" in notes[-1]
        assert f"They began with what is saved as {began}" in notes[-1] or not began
        assert ("They began" in notes[-1]) == bool(began)


def test_loop_that_goes_on_counts_the_bad_steps_before_it(run, notes):
    limits = {"optimizer.max_consecutive_skips": 3, "checkpoint.every": 100}
    for skips, bad, code in [
        *((2, {5}, DIVERGED), (1, {5}, DONE), (2, {6}, DONE)),
        *((9, {5}, DIVERGED), (9, set(), DONE)),
    ]:
        notes.clear()
        assert run(start=4, bad=bad, skips=skips, **limits) == code
        if code == DIVERGED:
            assert f"{skips + 1} steps in a row were not finite" in notes[-1]
            assert "They began with what is saved as step 4" in notes[-1]
        assert len(of(notes, "save")) == (code == DONE)


def test_loop_with_a_state_that_is_not_finite_ends_diverged(run, notes):
    for step in (4, 6):
        assert run(not_finite={step}, **{"checkpoint.every": 2}) == DIVERGED
        before = step - 2
        assert of(notes, "save")[-1] == f"save {before}: state {before}, batch {before}"
        assert notes[-1].startswith(f"the state after step {step} is not finite (params.weight)")


@pytest.mark.parametrize("lost", [{"checks_left": 3}, {"is_gone": True}])
def test_loop_whose_lease_is_lost_takes_no_further_step_and_saves_none(run, notes, lost):
    parts = run.parts(**{"checkpoint.every": 2 if "is_gone" in lost else 0})
    vars(parts.supervision.lease).update(lost)
    with pytest.raises(LeaseLost):
        train(parts)
    assert of(notes, "step", "save") == ["step 1", "step 2"]


@pytest.mark.parametrize(
    ("trouble", "error", "saves"),
    [
        ("", None, True),
        ("training fails", ZeroDivisionError, True),
        ("the last save fails", CheckpointSaveError, False),
        ("the directory is gone", LeaseLost, True),
        ("another owner", LeaseLost, False),  # whose checkpoints are left alone
    ],
)
def test_close_of_a_run_closes_everything_in_order(run, notes, monkeypatch, trouble, error, saves):
    parts = run.parts()

    def fail_to_save():
        raise CheckpointSaveError("the disk is full")

    if trouble == "the last save fails":
        monkeypatch.setattr(parts.checkpointer, "close", fail_to_save)
    parts.supervision.lease.is_gone = trouble == "the directory is gone"
    parts.supervision.lease.lost = trouble == "another owner"
    with pytest.raises(error) if error else nullcontext():
        assert run_and_close(parts, lambda: 75 // (trouble != "training fails")) == 75
    saved = ["close checkpointer"] if saves else []
    ends = ["account of 0", "close recorder"]
    assert notes == ["close loader", "close profiler", *saved, *ends]


def test_dispatch_that_takes_the_whole_step_counts_for_its_own_step(run, monkeypatch):
    parts = run.parts(**{"eval.every": 3})
    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    for owner, name, seconds in ((parts.trainer, "step", 2), (loop, "evaluate", 50)):

        def slow(call, seconds, *arguments):
            now[0] += seconds
            return call(*arguments)

        monkeypatch.setattr(owner, name, partial(slow, getattr(owner, name), seconds))
    assert train(parts) == DONE
    assert parts.recorder.seconds == [2] * 6


def test_step_that_ends_while_the_next_one_is_dispatched_slowly_keeps_its_length(run, monkeypatch):
    parts = run.parts()
    now, dispatched = [0.0], [0]  # a step takes 2 s of the devices; the third dispatch 2.1 s
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    step, get = parts.trainer.step, loop.jax.device_get

    def dispatch(*arguments):
        dispatched[0] += 1
        now[0] += 2.1 if dispatched[0] == 3 else 0.1
        state, metrics = step(*arguments)
        with jax.transfer_guard("allow"):
            return state, jax.tree.map(jnp.asarray, metrics)

    def wait(metrics):
        now[0] = max(now[0], 2.0 * (dispatched[0] - 1))
        return get(metrics)

    monkeypatch.setattr(parts.trainer, "step", dispatch)
    monkeypatch.setattr(loop.jax, "device_get", wait)
    array = type(jnp.zeros(()))
    monkeypatch.setattr(array, "is_ready", lambda _: now[0] >= 2 * (dispatched[0] - 1))
    assert train(parts) == DONE
    assert parts.recorder.seconds[:5] == pytest.approx([2] * 5)

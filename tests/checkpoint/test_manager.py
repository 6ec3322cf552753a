import shutil
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointSaveError
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.config import CheckpointConfig


def test_round_trip_is_bitwise_and_keeps_shardings(checkpointer, samples):
    samples.save(checkpointer, 10)
    restored = checkpointer.restore(samples.abstract(samples.state(10)))
    samples.assert_restored(restored, 10)
    for got, wanted in zip(
        jax.tree.leaves(restored.state), jax.tree.leaves(samples.state(10)), strict=True
    ):
        assert isinstance(got, jax.Array) == isinstance(wanted, jax.Array)
        assert not isinstance(wanted, jax.Array) or got.sharding == wanted.sharding


def test_restores_to_host_memory_without_shardings(checkpointer, samples):
    samples.save(checkpointer, 10)
    restored = checkpointer.restore(samples.abstract(samples.state(10), sharded=False))
    samples.assert_restored(restored, 10)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(restored.state))


@pytest.mark.parametrize("shape", [(1, 1), (8, 1), (4, 2)])
def test_restores_onto_another_mesh(checkpointer, samples, shape):
    samples.save(checkpointer, 10)
    target = samples.abstract(samples.state(10, *shape))
    restored = checkpointer.restore(target)
    samples.assert_restored(restored, 10)
    assert restored.state["params"]["weight"].sharding == target["params"]["weight"].sharding


def test_arrays_may_be_donated_and_overwritten_right_after_save(checkpointer, samples):
    state, iterator = samples.state(10), samples.iterator(10)
    checkpointer.save(10, state, iterator, samples.meta(10))
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    on_device = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    jax.block_until_ready(overwrite(on_device))
    iterator[:] = -1
    state["host"][:] = 0
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(10))), 10)


def test_a_save_is_legal_inside_a_transfer_guard(checkpointer, samples):
    state = samples.state(10)
    with jax.transfer_guard("disallow"):
        checkpointer.save(10, state, samples.iterator(10), samples.meta(10))
    checkpointer.wait()
    assert checkpointer.steps() == [10]


def test_containers_do_not_matter_but_names_do(checkpointer, samples):
    class Moments(NamedTuple):
        mean: np.ndarray

    checkpointer.save(10, {"opt": Moments(np.arange(3))}, samples.iterator(1), {})
    restored = checkpointer.restore({"opt": {"mean": jax.ShapeDtypeStruct((3,), np.int64)}})
    assert restored.state["opt"]["mean"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointMismatch, match=r"opt\.average"):
        checkpointer.restore({"opt": {"average": jax.ShapeDtypeStruct((3,), np.int64)}})


def test_64_bit_arrays_on_devices_survive(checkpointer, samples):
    sharding = NamedSharding(samples.mesh(4, 1), PartitionSpec("a"))
    with jax.enable_x64(True):
        rows = jax.device_put(samples.iterator(7), sharding)
    checkpointer.save(10, {"counts": rows}, rows, {})
    target = {"counts": jax.ShapeDtypeStruct(rows.shape, np.int64, sharding=sharding)}
    restored = checkpointer.restore(target)
    assert samples.bits(restored.state["counts"]) == samples.bits(samples.iterator(7))
    assert samples.bits(restored.iterator) == samples.bits(samples.iterator(7))


def test_due_follows_every_and_skips_a_step_just_restored(checkpointer, samples):
    assert [step for step in range(31) if checkpointer.due(step)] == [10, 20, 30]
    samples.save(checkpointer, 20)
    checkpointer.restore(samples.abstract(samples.state(20)))
    assert not checkpointer.due(20)
    assert not checkpointer.save(20, samples.state(20), samples.iterator(20), {})
    assert checkpointer.due(30)


def test_every_0_is_never_due(directory):
    checkpointer = Checkpointer(directory, CheckpointConfig(every=0))
    assert not any(checkpointer.due(step) for step in range(100))


def test_due_when_the_last_save_is_long_ago(directory, samples):
    now = [0.0]
    checkpointer = Checkpointer(
        directory, CheckpointConfig(every=10, every_minutes=2), clock=lambda: now[0]
    )
    now[0] = 119
    assert [step for step in range(1, 12) if checkpointer.due(step)] == [10]
    samples.save(checkpointer, 10)
    now[0] = 238
    assert not checkpointer.due(13)
    now[0] = 239
    assert checkpointer.due(14)
    assert checkpointer.due(15)  # until it has been saved
    samples.save(checkpointer, 15)
    assert not checkpointer.due(16)
    now[0] = 1000
    assert not checkpointer.due(15)
    checkpointer.close()


def test_keeps_the_newest(checkpointer, samples):
    samples.save(checkpointer, 10, 20, 30, 40, 50)
    checkpointer.wait()
    assert checkpointer.steps() == [30, 40, 50]


def test_keeps_the_previous_step_until_the_next_is_committed(directory, samples, monkeypatch):
    checkpointer = Checkpointer(directory, CheckpointConfig(every=1, keep=1))
    samples.save(checkpointer, 1)
    checkpointer.wait()
    release = hold_commits(monkeypatch)
    samples.save(checkpointer, 2)
    assert checkpointer.steps() == [1]
    release.set()
    checkpointer.close()
    assert checkpointer.steps() == [2]


def test_keeps_the_previous_step_when_the_next_cannot_be_committed(directory, samples, monkeypatch):
    checkpointer = Checkpointer(directory, CheckpointConfig(every=1, keep=1))
    samples.save(checkpointer, 1)
    checkpointer.wait()
    break_commits(monkeypatch)
    samples.save(checkpointer, 2)
    with pytest.raises(CheckpointSaveError):
        checkpointer.close()
    assert checkpointer.steps() == [1]


def test_a_step_that_cannot_be_deleted_is_no_failed_save(directory, samples, monkeypatch, said):
    checkpointer = Checkpointer(directory, CheckpointConfig(keep=1), say=said.append)
    samples.save(checkpointer, 1)

    def busy(*_, **__):
        raise OSError("device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    samples.save(checkpointer, 2)
    checkpointer.wait()
    assert said == [
        "checkpoint 2 is saved, but older ones could not be deleted: device or resource busy"
    ]
    monkeypatch.undo()
    samples.save(checkpointer, 3)
    checkpointer.wait()
    assert checkpointer.steps() == [1, 2, 3]  # the next start deletes them
    checkpointer.restore(samples.abstract(samples.state(3)))
    samples.save(checkpointer, 4)
    checkpointer.close()
    assert checkpointer.steps() == [4]


def test_saving_does_not_wait_for_the_disk(checkpointer, samples, monkeypatch):
    release = hold_commits(monkeypatch)
    samples.save(checkpointer, 10)  # returns although nothing can be committed
    assert checkpointer.steps() == []
    release.set()
    checkpointer.wait()
    assert checkpointer.steps() == [10]


@pytest.mark.parametrize("surfaces", ["step", "save", "wait", "close", "restore"])
def test_a_failed_save_surfaces_once_and_the_step_can_be_saved_again(
    checkpointer, samples, monkeypatch, surfaces
):
    samples.save(checkpointer, 10)
    checkpointer.wait()
    break_commits(monkeypatch)
    samples.save(checkpointer, 20)
    action = {
        "step": lambda: [checkpointer.due(step) for step in take_steps()],
        "save": lambda: samples.save(checkpointer, 30),
        "wait": checkpointer.wait,
        "close": checkpointer.close,
        "restore": lambda: checkpointer.restore(samples.abstract(samples.state(10))),
    }[surfaces]
    with pytest.raises(CheckpointSaveError, match=r"checkpoints/20 failed.*no space left"):
        action()
    monkeypatch.undo()
    assert checkpointer.steps() == [10]
    samples.save(checkpointer, 20)
    checkpointer.close()
    assert checkpointer.steps() == [10, 20]


def test_a_directory_that_cannot_be_made_is_an_error_of_the_save(tmp_path, samples):
    (tmp_path / "file").touch()
    checkpointer = Checkpointer(tmp_path / "file" / "checkpoints", CheckpointConfig())
    with pytest.raises(CheckpointSaveError, match="file/checkpoints/1 failed"):
        samples.save(checkpointer, 1)


def test_goes_back_to_a_given_step_and_sets_aside_what_lies_ahead(
    checkpointer, directory, said, samples
):
    samples.save(checkpointer, 10, 20, 30)
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(10)), step=10), 10)
    assert checkpointer.steps() == [10, 20, 30]
    samples.save(checkpointer, 20)
    checkpointer.wait()
    assert checkpointer.steps() == [10, 20]
    entries = StepsDirectory(directory).entries()
    aside = [entry.name for entry in entries if entry.state == "abandoned"]
    assert aside == ["20.abandoned", "30.abandoned"]
    assert len(said) == 2
    assert "30.abandoned" in said[1]


def test_a_step_that_cannot_be_set_aside_is_a_failed_save(
    checkpointer, directory, said, samples, monkeypatch
):
    def refuse(*_):
        raise PermissionError("not yours")

    samples.save(checkpointer, 10, 20)
    checkpointer.restore(samples.abstract(samples.state(10)), step=10)
    monkeypatch.setattr("maxpipe.checkpoint.steps.StepsDirectory.set_aside", refuse)
    with pytest.raises(
        CheckpointSaveError, match="checkpoints/20 failed: PermissionError: not yours"
    ):
        samples.save(checkpointer, 20)
    assert said == []
    monkeypatch.undo()
    samples.save(checkpointer, 20)
    checkpointer.wait()
    names = [entry.name for entry in StepsDirectory(directory).entries()]
    assert names == ["10", "20", "20.abandoned"]


def test_restoring_from_nothing_is_an_error(checkpointer, samples):
    with pytest.raises(FileNotFoundError, match="no committed checkpoint"):
        checkpointer.restore(samples.abstract(samples.state(1)))
    with pytest.raises(CheckpointDamaged, match="checkpoints/5: record cannot be read"):
        checkpointer.restore(samples.abstract(samples.state(1)), step=5)


def test_refuses_leaves_that_are_not_arrays_of_numbers(checkpointer, samples):
    with pytest.raises(TypeError, match=r"opt.count is a int"):
        checkpointer.save(10, {"opt": {"count": 3}}, samples.iterator(1), {})
    with pytest.raises(TypeError, match=r"key is a typed PRNG key; save jax.random.key_data"):
        checkpointer.save(10, {"key": jax.random.key(0)}, samples.iterator(1), {})


def test_a_mismatch_lists_every_difference_and_never_falls_back(checkpointer, said, samples):
    samples.save(checkpointer, 10, 20)
    target = samples.abstract(samples.state(20))
    target["params"]["weight"] = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    target["params"]["scale"] = jax.ShapeDtypeStruct((33,), jnp.float32)
    target["extra"] = target.pop("host")
    with pytest.raises(CheckpointMismatch) as caught:
        checkpointer.restore(target)
    assert caught.value.differences == (
        "extra: uint8[7] in this run, not in the checkpoint",
        "host: uint8[7] in the checkpoint, unknown to this run",
        "params.scale: bfloat16[33] in the checkpoint, float32[33] in this run",
        "params.weight: float32[128,64] in the checkpoint, float32[64,128] in this run",
    )
    assert checkpointer.steps() == [10, 20]
    assert said == []


def test_a_long_mismatch_is_cut_short():
    error = CheckpointMismatch("checkpoints/3", [f"leaf {n}" for n in range(100)])
    assert len(error.differences) == 100
    assert "... and 80 more" in str(error)
    assert len(str(error).splitlines()) == 23


def test_importing_does_not_import_orbax_or_tensorstore():
    modules = "maxpipe.checkpoint.manager, maxpipe.checkpoint.reader"
    code = (
        f"import sys, {modules}; sys.exit('orbax' in sys.modules or 'tensorstore' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def hold_commits(monkeypatch):
    """Lets no save commit before the returned event is set."""
    release = threading.Event()
    intercept_commits(monkeypatch, lambda: release.wait(60))
    return release


def take_steps():
    """Steps for as long as a save may take."""
    for step in range(21, 1000):
        yield step
        time.sleep(0.01)


def break_commits(monkeypatch):
    def fail():
        raise OSError("no space left on device")

    intercept_commits(monkeypatch, fail)


def intercept_commits(monkeypatch, action):
    """Runs `action` in the background of a save, after the arrays are written and before the commit."""
    from orbax.checkpoint import CompositeCheckpointHandler

    finalize = CompositeCheckpointHandler.finalize

    def intercepted(self, directory):
        action()
        return finalize(self, directory)

    monkeypatch.setattr(CompositeCheckpointHandler, "finalize", intercepted)


def test_a_save_does_not_ask_the_preemption_service(checkpointer, samples, monkeypatch):
    asked = []
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda step: bool(asked.append(step))
    )
    samples.save(checkpointer, 10, 20)
    checkpointer.close()
    assert checkpointer.steps() == [10, 20]
    assert asked == []


class TestGrace:
    """A save is timed from its start to its commit."""

    @pytest.fixture
    def told(self, directory, samples):
        """told(grace_seconds) -> what was said over two saves."""

        def _told(grace_seconds):
            said = []
            checkpointer = Checkpointer(
                directory, CheckpointConfig(grace_seconds=grace_seconds), say=said.append
            )
            samples.save(checkpointer, 1, 2)
            checkpointer.close()
            return said

        return _told

    def test_a_slow_save_is_warned_of_once(self, told):
        (warning,) = told(1e-9)
        assert "longer than checkpoint.grace_seconds allows" in warning

    @pytest.mark.parametrize("grace_seconds", [0, 1000])
    def test_a_fast_save_or_no_limit_says_nothing(self, told, grace_seconds):
        assert told(grace_seconds) == []

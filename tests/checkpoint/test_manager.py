import shutil
import threading
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    CheckpointSaveError,
    NoCheckpoint,
)
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.orbax_writer import RecordFile
from maxpipe.checkpoint.steps import StepsDirectory
from maxpipe.config import CheckpointConfig
from maxpipe.storage.object_store import Deadline


def test_restore_on_another_mesh_or_the_host_has_the_layout_asked_for(checkpointer, samples):
    samples.save(checkpointer, 10)
    host = checkpointer.restore(samples.abstract(samples.state(10), sharded=False))
    samples.assert_restored(host, 10)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(host.state))
    for shape in [(2, 4), (1, 1), (8, 1), (4, 2)]:
        target = samples.abstract(samples.state(10, *shape))
        restored = checkpointer.restore(target)
        samples.assert_restored(restored, 10)
        for leaf, like in zip(
            jax.tree.leaves(restored.state), jax.tree.leaves(target), strict=True
        ):
            assert getattr(leaf, "sharding", None) == like.sharding


def test_save_arrays_may_be_donated_and_overwritten_after_return(checkpointer, samples):
    state, iterator = samples.state(10), samples.iterator(10)
    with jax.transfer_guard("disallow"):
        checkpointer.save(10, state, iterator, samples.meta(10))
    overwrite = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
    on_device = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    jax.block_until_ready(overwrite(on_device))
    iterator[:] = -1
    state["host"][:] = 0
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(10))), 10)


def test_restore_compares_names_but_not_containers(checkpointer, samples):
    class Moments(NamedTuple):
        mean: np.ndarray

    checkpointer.save(10, {"opt": Moments(np.arange(3))}, samples.iterator(1), {})
    restored = checkpointer.restore({"opt": {"mean": jax.ShapeDtypeStruct((3,), np.int64)}})
    assert restored.state["opt"]["mean"].tolist() == [0, 1, 2]
    with pytest.raises(CheckpointMismatch, match=r"opt\.average"):
        checkpointer.restore({"opt": {"average": jax.ShapeDtypeStruct((3,), np.int64)}})


def test_checkpointer_64_bit_device_arrays_round_trip(checkpointer, samples):
    sharding = NamedSharding(samples.mesh(4, 1), PartitionSpec("a"))
    with jax.enable_x64(True):
        rows = jax.device_put(samples.iterator(7), sharding)
    checkpointer.save(10, {"counts": rows}, rows, {})
    target = {"counts": jax.ShapeDtypeStruct(rows.shape, np.int64, sharding=sharding)}
    restored = checkpointer.restore(target)
    for found in (restored.state["counts"], restored.iterator):
        assert samples.bits(found) == samples.bits(samples.iterator(7))


def test_due_every_10_skips_step_just_restored(checkpointer, samples):
    assert [step for step in range(31) if checkpointer.due(step)] == [10, 20, 30]
    samples.save(checkpointer, 20)
    checkpointer.restore(samples.abstract(samples.state(20)))
    assert not checkpointer.due(20)
    assert not checkpointer.save(20, samples.state(20), samples.iterator(20), {})
    assert checkpointer.due(30)


def test_due_every_minutes_counts_from_last_save(directory, samples):
    now = [0.0]
    settings = CheckpointConfig(every=10, every_minutes=2)
    checkpointer = Checkpointer(directory, settings, clock=lambda: now[0])
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
    checkpointer.close()


def test_save_failed_deletion_warns_and_succeeds(directory, samples, monkeypatch, messages):
    checkpointer = Checkpointer(directory, CheckpointConfig(keep=1), log=messages.append)
    samples.save(checkpointer, 1)

    def busy(*_, **__):
        raise OSError("device or resource busy")

    with monkeypatch.context() as broken:
        broken.setattr(shutil, "rmtree", busy)
        samples.save(checkpointer, 2)
        checkpointer.wait()
    (message,) = messages
    assert message.endswith("older ones could not be deleted: device or resource busy")
    assert checkpointer.steps() == [2], "step 1 lacks files"
    checkpointer.restore(samples.abstract(samples.state(2)))
    samples.save(checkpointer, 3)
    checkpointer.close()
    assert checkpointer.steps() == [3]


def test_save_does_not_wait_for_the_commit_before_which_the_older_step_is_kept(
    directory, samples, monkeypatch
):
    checkpointer = Checkpointer(directory, CheckpointConfig(every=10, keep=1))
    samples.save(checkpointer, 10)
    checkpointer.wait()
    release = threading.Event()
    intercept_commits(monkeypatch, lambda: release.wait(60))
    samples.save(checkpointer, 20)  # returns although nothing can be committed
    Deadline(20).wait(lambda: [checkpointer.due(step) for step in (20, 21)])
    assert checkpointer.steps() == [10]
    release.set()
    checkpointer.close()
    assert checkpointer.steps() == [20]


@pytest.mark.parametrize("surfaces", ["step", "save", "wait", "close", "restore"])
def test_failed_save_raises_once_and_step_can_be_saved_again(
    checkpointer, samples, monkeypatch, surfaces
):
    samples.save(checkpointer, 10)
    checkpointer.wait()

    def fail():
        raise OSError("no space left on device")

    intercept_commits(monkeypatch, fail)
    samples.save(checkpointer, 20)
    action = {
        "step": lambda: [time.sleep(0.01) or checkpointer.due(step) for step in range(21, 1000)],
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


def test_save_after_going_back_abandons_every_step_after_the_restored_one(
    checkpointer, directory, messages, samples, monkeypatch
):
    def refuse(*_):
        raise PermissionError("not yours")

    samples.save(checkpointer, 10, 15, 20, 30)
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(15)), step=15), 15)
    assert checkpointer.steps() == [15, 20, 30]
    with monkeypatch.context() as broken:
        broken.setattr(StepsDirectory, "set_aside", refuse)
        with pytest.raises(CheckpointSaveError, match="checkpoints/20 failed: Permission"):
            samples.save(checkpointer, 20)
    assert messages == []
    samples.save(checkpointer, 20)  # once more
    checkpointer.wait()
    names = [entry.name for entry in StepsDirectory(directory).entries()]
    assert names == ["15", "20", "20.abandoned", "30.abandoned"]
    assert len(messages) == 2
    assert "30.abandoned" in messages[1]


def test_save_whose_caller_cannot_set_its_own_aside_raises_that_error(checkpointer, samples):
    def refuse():
        raise RuntimeError("metrics.jsonl cannot be written")

    with pytest.raises(RuntimeError, match=r"^metrics"):
        checkpointer.save(5, samples.state(5), samples.iterator(5), samples.meta(5), refuse)


def test_restore_without_steps_raises(checkpointer, samples):
    with pytest.raises(NoCheckpoint, match="there is no checkpoint in"):
        checkpointer.restore(samples.abstract(samples.state(1)))
    with pytest.raises(CheckpointDamaged, match="checkpoints/5 is damaged: No such file"):
        checkpointer.restore(samples.abstract(samples.state(1)), step=5)
    with pytest.raises(TypeError, match=r"opt.count is a int"):
        checkpointer.save(10, {"opt": {"count": 3}}, samples.iterator(1), {})


def test_restore_mismatch_lists_differences_and_does_not_fall_back(checkpointer, messages, samples):
    samples.save(checkpointer, 10, 20)
    target = samples.abstract(samples.state(20))
    target["params"]["scale"] = jax.ShapeDtypeStruct((33,), jnp.float32)
    with pytest.raises(CheckpointMismatch, match=r"checkpoint\.convert_dtype=true converts them"):
        checkpointer.restore(target)
    target["params"]["weight"] = jax.ShapeDtypeStruct((64, 128), jnp.float32)
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
    assert messages == []


def intercept_commits(monkeypatch, action):
    write = RecordFile.write

    async def intercepted(self, directory):
        action()
        await write(self, directory)

    monkeypatch.setattr(RecordFile, "write", intercepted)


def test_save_does_not_call_preemption_service(checkpointer, samples, monkeypatch):
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", pytest.fail)
    samples.save(checkpointer, 10, 20)
    checkpointer.close()
    assert checkpointer.steps() == [10, 20]

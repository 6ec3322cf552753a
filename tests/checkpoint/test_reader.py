"""Restoring with other dtypes than the saved ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxpipe.checkpoint.errors import CheckpointMismatch
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.reader import read_step
from maxpipe.config import CheckpointConfig

CONVERT = CheckpointConfig(convert_dtype=True)


def with_dtypes(target, dtypes):
    params = {
        name: jax.ShapeDtypeStruct(leaf.shape, dtypes.get(name, leaf.dtype), sharding=leaf.sharding)
        for name, leaf in target["params"].items()
    }
    return {**target, "params": params}


@pytest.fixture
def saved(checkpointer, samples):
    samples.save(checkpointer, 10)
    checkpointer.close()
    return samples.abstract(samples.state(10))


def test_restore_path_with_parent_directories_reads_what_was_saved(
    directory, saved, samples, monkeypatch
):
    (directory.parent / "inner").mkdir()
    monkeypatch.chdir(directory.parent / "inner")
    restored = Checkpointer(f"../{directory.name}", CheckpointConfig()).restore(saved)
    samples.assert_restored(restored, 10)


@pytest.mark.parametrize("sharded", [True, False])
def test_read_step_convert_dtype_converts_floating_dtypes(
    saved, directory, messages, samples, sharded
):
    target = with_dtypes(saved, {"weight": jnp.bfloat16, "scale": jnp.float32})
    target = jax.tree.map(
        lambda leaf: leaf if sharded else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), target
    )
    restored = Checkpointer(directory, CONVERT, log=messages.append).restore(target)
    state, expected = restored.state, samples.state(10)
    for name, dtype in (("weight", jnp.bfloat16), ("scale", jnp.float32)):
        got, wanted = state["params"][name], expected["params"][name].astype(dtype)
        assert samples.bits(got) == samples.bits(wanted)
        assert not sharded or got.sharding == target["params"][name].sharding
    assert samples.bits(state["key"]) == samples.bits(expected["key"])
    (message,) = messages
    assert message.startswith("2 arrays of checkpoint 10 were converted to the dtypes of this run")
    again = Checkpointer(directory, CONVERT, log=messages.append).restore(saved)
    samples.assert_restored(again, 10)  # equal dtypes keep their bits, and nothing is said
    assert messages == [message]


def test_read_step_with_flag_refuses_other_differences(saved, directory):
    for other in [
        {"host": jax.ShapeDtypeStruct((7,), np.float32)},  # not from integers
        {"step": jax.ShapeDtypeStruct((), jnp.int16)},
        {"extra": jax.ShapeDtypeStruct((1,), np.float32)},
        {"params": {"weight": jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)}},
    ]:
        with pytest.raises(CheckpointMismatch) as caught:
            Checkpointer(directory, CONVERT).restore({**saved, **other})
        assert "convert_dtype" not in str(caught.value)


HISTORIES = [
    {"host": jax.ShapeDtypeStruct((8,), np.uint8)},  # of another shape
    {"host": jax.ShapeDtypeStruct((7,), np.uint8), "more": jax.ShapeDtypeStruct((2,), np.int8)},
]


def test_read_step_optional_part_that_differs_becomes_zeros_as_a_whole(
    directory, checkpointer, samples
):
    state = samples.state(10)
    part = {"host": state.pop("host")}
    checkpointer.save(10, {**state, "history": part}, samples.iterator(10), samples.meta(10))
    checkpointer.close()
    for history in HISTORIES:
        target = {**samples.abstract(state), "history": history}
        with pytest.raises(CheckpointMismatch):
            read_step(directory / "10", target)
        restored = read_step(directory / "10", target, optional=("history",)).state
        zeros = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in history.items()}
        bits = {name: samples.bits(leaf) for name, leaf in restored["history"].items()}
        assert bits == {name: samples.bits(leaf) for name, leaf in zeros.items()}
    same = {**target, "history": {"host": jax.ShapeDtypeStruct((7,), np.uint8)}}
    kept = read_step(directory / "10", same, optional=("history",)).state
    assert samples.bits(kept["history"]["host"]) == samples.bits(part["host"])

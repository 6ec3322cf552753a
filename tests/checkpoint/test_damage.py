import errno
import random
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from maxpipe.checkpoint import reader
from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointUnreadable
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.record import record_file
from maxpipe.config import CheckpointConfig

SETTINGS = CheckpointConfig(every=10)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, samples):
    directory = tmp_path_factory.mktemp("two_steps") / "checkpoints"
    checkpointer = Checkpointer(directory, SETTINGS)
    samples.save(checkpointer, 10, 20)
    checkpointer.close()
    return directory


@pytest.fixture
def copied(two_steps, directory):
    shutil.copytree(two_steps, directory)
    return directory


def files_of(step_directory):
    return sorted(path for path in step_directory.rglob("*") if path.is_file())


def largest_file(step_directory):
    return max(files_of(step_directory), key=lambda path: path.stat().st_size)


def flip_bit(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def truncate(step_directory):
    path = largest_file(step_directory)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def take_from_the_other_step(step_directory, part):
    shutil.rmtree(step_directory / part)
    shutil.copytree(step_directory.with_name("10") / part, step_directory / part)


DAMAGE = {
    "data file truncated": truncate,
    "data file deleted": lambda step: largest_file(step).unlink(),
    "record deleted": lambda step: shutil.rmtree(step / "meta"),
    "record is garbage": lambda step: record_file(step).write_bytes(b"\x00garbage"),
    "arrays of another step": lambda step: take_from_the_other_step(step, "arrays"),
    "copy of another step": lambda step: take_from_the_other_step(step, ""),
}


def test_restore_damaged_newest_step_falls_back_and_sets_it_aside(
    two_steps, directory, samples, capfd
):
    for name, damage in DAMAGE.items():
        shutil.copytree(two_steps, directory)
        damage(directory / "20")
        messages = []
        checkpointer = Checkpointer(directory, SETTINGS, log=messages.append)
        samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(10))), 10)
        assert checkpointer.steps() == [10], name
        assert (directory / "20.damaged").is_dir(), name
        assert messages[0].startswith(f"checkpoint {directory}/20 is damaged: ")
        assert "continuing from checkpoint 10" in messages[1]
        shutil.rmtree(directory)
    assert "".join(capfd.readouterr()) == "", "no traceback"


def test_save_after_kill_clears_uncommitted_directories(copied, checkpointer, messages, samples):
    names = ("20.orbax-checkpoint-tmp-removed", "30.orbax-checkpoint-tmp")
    leftovers = [shutil.copytree(copied / "20", copied / name) for name in names]
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(20))), 20)
    samples.save(checkpointer, 30)
    checkpointer.wait()
    assert not any(map(Path.exists, leftovers))
    assert messages == []


def test_restore_flipped_bit_is_detected_or_harmless(two_steps, directory, samples):
    """Draw half of the bytes from all bytes, half from a random file, so that small files count."""
    draw = random.Random("sharded and host")
    targets = [samples.abstract(samples.state(20), sharded=sharded) for sharded in (True, False)]
    fallen_back = 0
    for trial in range(120):
        shutil.copytree(two_steps, directory)
        files = [path for path in files_of(directory / "20") if path.stat().st_size]
        sizes = [path.stat().st_size if trial % 2 else 1 for path in files]
        path = draw.choices(files, sizes)[0]
        bit = draw.randrange(8 * path.stat().st_size)
        flip_bit(path, bit)
        messages = []
        checkpointer = Checkpointer(directory, SETTINGS, log=messages.append)
        restored = checkpointer.restore(targets[trial // 2 % 2])
        assert restored.step == (10 if messages else 20), f"bit {bit} of {path}"
        samples.assert_restored(restored, restored.step)
        fallen_back += bool(messages)
        shutil.rmtree(directory)
    assert fallen_back > 36


def test_restore_equal_bits_of_other_dtype_are_damage(checkpointer, directory, samples):
    numbers = np.arange(6, dtype=np.float32)
    checkpointer.save(10, {"a": numbers.view(np.int32)}, samples.iterator(1), {})
    checkpointer.save(20, {"a": numbers}, samples.iterator(1), {})
    checkpointer.wait()
    take_from_the_other_step(directory / "20", "arrays")
    with pytest.raises(CheckpointDamaged, match=r"a is int32\[6\], not float32\[6\]"):
        checkpointer.restore({"a": jax.ShapeDtypeStruct((6,), np.float32)}, step=20)


def test_restore_damaged_steps_that_nothing_replaces_raises_every_time(
    copied, checkpointer, messages, samples
):
    truncate(copied / "20")
    target = samples.abstract(samples.state(10))
    with pytest.raises(CheckpointDamaged, match=r"checkpoints/20 is damaged: ValueError"):
        checkpointer.restore(target, step=20)
    assert messages == []
    record_file(copied / "10").write_text("{}")
    for _ in range(2):
        with pytest.raises(CheckpointDamaged, match="none of its steps can be loaded") as caught:
            checkpointer.restore(target)
        lines = str(caught.value).splitlines()
        assert lines[1].startswith("  step 20: ValueError: ")
        assert lines[2] == "  step 10: checksum of the record does not match"
        assert checkpointer.steps() == [10, 20]


@pytest.mark.parametrize(
    ("trouble", "raised"),
    [
        (PermissionError("not yours"), CheckpointUnreadable),
        (ValueError("RESOURCE_EXHAUSTED: too much"), CheckpointUnreadable),
        (ValueError("UNKNOWN: Error reading [os_error_code='5']"), CheckpointUnreadable),
        (OSError(errno.EIO, "Input/output error"), CheckpointUnreadable),
        (TypeError("bug"), TypeError),
    ],
)
def test_restore_local_error_raises_and_renames_nothing(
    copied, checkpointer, samples, monkeypatch, trouble, raised
):
    def fail(*_):
        raise trouble

    monkeypatch.setattr(reader, "load", fail)
    with pytest.raises(raised):
        checkpointer.restore(samples.abstract(samples.state(20)))
    assert checkpointer.steps() == [10, 20]


def test_read_arrays_larger_than_read_ahead_are_read(copied, checkpointer, samples, monkeypatch):
    monkeypatch.setattr("maxpipe.checkpoint.arrays.BYTES_IN_FLIGHT", 64)
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(20))), 20)
    names = set(reader.verify_step(copied / "20").leaves)
    assert names > {"iterator", "params.weight", "moments.0", "key"}

"""Replicas in a directory that stands for a host's memory."""

import errno
import json

import pytest

from maxpipe.checkpoint import reader, replicas
from maxpipe.checkpoint.errors import NoCheckpoint
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.replicas import Replicas
from maxpipe.config import CheckpointConfig

SETTINGS = CheckpointConfig(every=10, replica_every=5)


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "memory"


@pytest.fixture
def start(directory, memory, messages):

    def _start(run=directory):
        return Checkpointer(
            directory,
            SETTINGS,
            replicas=Replicas(memory, run, SETTINGS.replica_every),
            log=messages.append,
        )

    return _start


@pytest.fixture
def replicate(samples):
    def _replicate(checkpointer, *steps):
        for step in steps:
            parts = samples.state(step), samples.iterator(step), samples.meta(step)
            checkpointer.replicate(step, *parts)
        checkpointer.close()

    return _replicate


def steps_in(memory):
    return sorted(path.name for path in memory.glob("*/*"))


def damage(memory, step):
    files = [path for path in next(memory.glob(f"*/{step}")).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_checkpointer_restores_the_newest_replica_to_the_bit(start, samples, replicate, messages):
    checkpointer = start()
    samples.save(checkpointer, 10)
    replicate(checkpointer, 15, 20)
    again = start()
    assert (again.steps(), again.resumable()) == ([10], [10, 15, 20])
    assert again.record(20).meta == samples.meta(20)
    samples.assert_restored(again.restore(samples.abstract(samples.state(20))), 20)
    (message,) = messages
    assert message.startswith("step 20 is restored from replicas in memory; safe: step 10 in ")
    assert again.saved_step == 0, "a step in memory is still to be saved"
    assert again.save(20, samples.state(20), samples.iterator(20), samples.meta(20))
    again.close()
    assert again.steps() == [10, 20]


def test_checkpointer_reads_the_disk_if_it_is_newer_or_asked_for(start, samples, replicate, memory):
    checkpointer = start()
    replicate(checkpointer, 5)
    samples.save(checkpointer, 10)
    checkpointer.close()
    again = start()
    samples.assert_restored(again.restore(samples.abstract(samples.state(10))), 10)
    assert again.saved_step == 10
    replicate(again, 15)
    again = start()
    samples.assert_restored(again.restore(samples.abstract(samples.state(10)), 10), 10)
    assert "15" not in steps_in(memory), "the run is about to repeat it"


@pytest.mark.parametrize("saved", [10, 15], ids=["older", "as new"])
def test_checkpointer_with_a_damaged_replica_reads_the_disk(
    start, samples, replicate, memory, messages, saved
):
    checkpointer = start()
    samples.save(checkpointer, saved)
    replicate(checkpointer, 15)
    damage(memory, 15)
    again = start()
    samples.assert_restored(again.restore(samples.abstract(samples.state(15))), saved)
    assert messages == [
        "the replica of step 15 in memory is dropped: digest of params.weight does not match"
    ]
    assert steps_in(memory) == []
    assert again.steps() == [saved], "the step on disk was set aside"


def test_checkpointer_with_damaged_replicas_reads_the_one_before_or_says_so(
    start, samples, replicate, memory
):
    replicate(start(), 5, 10)
    damage(memory, 10)
    again = start()
    samples.assert_restored(again.restore(samples.abstract(samples.state(10))), 5)
    assert again.resumable() == [5]
    damage(memory, 5)
    again = start()
    with pytest.raises(NoCheckpoint, match="and no sound replica"):
        again.restore(samples.abstract(samples.state(5)))
    assert again.resumable() == []


def test_replicas_keep_two_and_forget_what_is_unfinished_or_of_another_run(
    start, replicate, memory, tmp_path
):
    replicate(start(), 5, 10, 15)
    assert steps_in(memory) == ["10", "15"]
    (next(memory.glob("*")) / "20.unfinished").mkdir()
    assert start().resumable() == [10, 15]
    assert steps_in(memory) == ["10", "15"]
    assert start(run=tmp_path / "other").resumable() == []
    assert steps_in(memory) == [], "they would count as free, and be in the way"


def test_replicas_wait_for_a_partner_that_has_not_copied_the_newest(
    start, replicate, memory, messages
):
    checkpointer = start()
    replicate(checkpointer, 5, 10)
    (run,) = memory.iterdir()
    copied = memory.parent / "copied"
    older, newer = f"{run.name}/10", f"{run.name}/15"
    for names, step, written in (
        ([], 15, ["10", "15"]),  # a new partner holds up nothing
        ([older], 20, ["10", "15"]),
        ([older], 20, ["10", "15"]),
        ([older, newer], 30, ["15", "30"]),
    ):
        copied.write_text(json.dumps(names))
        replicate(checkpointer, step)
        assert steps_in(memory) == written
    copied.write_text('["1')  # of a partner that is lost while its list is read
    replicate(checkpointer, 35)
    assert steps_in(memory) == ["30", "35"]
    assert messages == [
        "the last replica in memory is still being copied to a partner; none is begun"
    ]


def test_replica_that_cannot_be_written_is_reported_and_the_one_before_stays(
    start, samples, replicate, memory, messages, monkeypatch
):
    checkpointer = start()
    replicate(checkpointer, 5)
    write = replicas.write_shards

    def fail(database, arrays):
        database.mkdir(parents=True)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(replicas, "write_shards", fail)
    replicate(checkpointer, 10)
    assert steps_in(memory) == ["5"]
    monkeypatch.setattr(replicas, "write_shards", write)
    replicate(checkpointer, 15)
    assert messages == [
        "the last replica in memory could not be written: process 0: "
        "OSError: [Errno 28] No space left on device"
    ]
    assert steps_in(memory) == ["15", "5"]


def test_replicas_of_two_histories_are_not_restored(
    start, samples, replicate, memory, messages, monkeypatch
):
    replicate(start(), 5)
    monkeypatch.setattr(reader, "of_first_process", lambda value: value ^ 1)  # another's record
    with pytest.raises(NoCheckpoint, match="and no sound replica"):
        start().restore(samples.abstract(samples.state(5)))
    assert any("the processes have records of different arrays" in text for text in messages)
    assert steps_in(memory) == []

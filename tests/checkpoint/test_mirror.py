"""Checkpoints in an object store: one in memory, whose objects are named as those of S3."""

import json
import shutil
import threading
import time

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointSaveError, CheckpointUnreadable
from maxpipe.checkpoint.mirror import Mirror


def mirror_of(checkpointer):
    return checkpointer._stores[1]


class Memory(MemoryFileSystem):
    """A store in memory whose paths begin as those of S3 do."""

    def find(self, path, **options):
        found = super().find(path, **options)
        if isinstance(found, dict):
            return {name.lstrip("/"): facts for name, facts in found.items()}
        return [name.lstrip("/") for name in found]


@pytest.fixture
def store():
    store = Memory(skip_instance_cache=True)
    yield store
    store.rm("memory://bucket", recursive=True)


@pytest.fixture
def mirror_url(store):
    store.mkdir("memory://bucket")
    return "memory://bucket/runs/base/checkpoints"


def damage_copy(store, url, step, change):
    contents = {path: store.cat_file(path) for path in store.find(f"{url}/{step}")}
    largest = max(contents, key=lambda path: len(contents[path]))
    changed = change(contents[largest])
    if changed is None:
        store.rm_file(largest)
    else:
        store.pipe_file(largest, changed)


@pytest.fixture
def damage(store, mirror_url):
    return lambda step, change: damage_copy(store, mirror_url, step, change)


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_upload_objects_are_named_like_files_and_commit_lists_sizes(
    start, directory, objects, store, mirror_url
):
    start(10)
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert {*objects()} == {*(str(path.relative_to(directory)) for path in files), "10.json"}
    sizes = {str(path.relative_to(directory / "10")): path.stat().st_size for path in files}
    assert json.loads(store.cat_file(f"{mirror_url}/10.json")) == {"files": sizes}


@pytest.mark.parametrize("change", [flip, lambda content: None], ids=["bit flipped", "deleted"])
def test_restore_damaged_copy_falls_back_to_older_step(
    start, directory, messages, samples, objects, damage, change
):
    checkpointer = start(10, 20)
    shutil.rmtree(directory)
    damage(20, change)
    checkpointer = start()
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(10))), 10)
    assert any("20 is damaged" in line for line in messages)
    assert start().steps() == [10]
    assert "20.damaged.json" in objects()
    samples.save(checkpointer, 20)
    checkpointer.close()
    assert "20.damaged.json" not in objects()
    shutil.rmtree(directory)
    samples.assert_restored(start().restore(samples.abstract(samples.state(20))), 20)


def test_restore_damaged_directory_fetches_sound_copy(start, directory, messages, samples):
    start(10, 20)
    shutil.copytree(directory / "20", directory / "20.orbax-checkpoint-tmp-fetched")  # of a kill
    shutil.rmtree(directory / "20" / "arrays")
    samples.assert_restored(start().restore(samples.abstract(samples.state(20))), 20)
    assert names(directory) == ["10", "20", "20.damaged"]
    assert "is damaged" in messages[0]
    assert messages[1].startswith("fetching checkpoint 20")


def test_restore_all_damaged_or_out_of_reach_raises_and_renames_nothing(
    start, directory, samples, damage, objects, store, mirror_url, monkeypatch
):
    start(10)
    shutil.rmtree(directory)
    target = samples.abstract(samples.state(10))
    with monkeypatch.context() as broken:
        broken.setattr(store, "get", fail)
        match = "10 is unreadable here: it cannot be fetched: ConnectionError: the store is gone"
        with pytest.raises(CheckpointUnreadable, match=match):
            start().restore(target)
    damage(10, lambda content: content[:-1])
    match = r"and memory://.* none of its steps can be loaded(.|\n)*is missing or has not"
    with pytest.raises(CheckpointDamaged, match=match):
        start().restore(target)
    for content in [b"[]", b'{"files": {"../../x": 1}}', b'{"files": {"/x": 1}}']:
        store.pipe_file(f"{mirror_url}/10.json", content)
        with pytest.raises(
            CheckpointDamaged, match=r"\n  step 10: .*(cannot be fetched|is missing)"
        ):
            start().restore(target)
    assert "10.json" in objects()


def test_save_after_going_back_abandons_newer_steps_in_mirror(
    start, directory, samples, messages, objects
):
    checkpointer = start(10, 20, 30)
    shutil.rmtree(directory)
    checkpointer = start()
    checkpointer.restore(samples.abstract(samples.state(10)), step=10)
    samples.save(checkpointer, 15)
    checkpointer.close()
    assert start().steps() == [10, 15]
    assert {"20.abandoned.json", "30.abandoned.json"} <= set(objects())
    assert "20.abandoned.json" in messages[1]


def test_mirror_keeps_the_same_steps_as_the_directory_and_knows_their_losses(
    start, directory, samples
):
    def save(losses):
        checkpointer = start(keep=1, keep_best=1)
        if checkpointer.steps():
            checkpointer.restore(samples.abstract(samples.state(30)))
        for step, loss in losses.items():
            meta = {"eval_loss": loss}
            checkpointer.save(step, samples.state(step), samples.iterator(step), meta)
        checkpointer.close()
        return start().steps()

    assert save({10: 1.0, 20: 4.0, 30: 3.0}) == [10, 30]
    shutil.rmtree(directory)
    assert save({40: 2.0}) == [10, 40]


def fail(*_, **__):
    raise ConnectionError("the store is gone")


@pytest.mark.parametrize("surfaces", ["step", "save", "close"])
def test_failed_copy_raises_once(start, samples, monkeypatch, surfaces):
    checkpointer = start()
    monkeypatch.setattr(Mirror, "upload", fail)
    samples.save(checkpointer, 10)
    action = {
        "step": lambda: [time.sleep(0.01) or checkpointer.due(11) for _ in range(1000)],
        "save": lambda: samples.save(checkpointer, 20),
        "close": checkpointer.close,
    }[surfaces]
    match = r"copying checkpoints to memory://.* failed: ConnectionError: the store"
    with pytest.raises(CheckpointSaveError, match=match):
        action()
    checkpointer.close()  # does not try the same again


def test_upload_cut_short_leaves_the_step_before_and_is_cleared(
    start, directory, samples, store, objects, monkeypatch
):
    checkpointer = start(10)
    put = store.put

    def put_half(sources, targets, **options):
        put(sources[:3], targets[:3], **options)
        fail()

    with monkeypatch.context() as broken:
        broken.setattr(store, "put", put_half)
        samples.save(checkpointer, 20)
        with pytest.raises(CheckpointSaveError):
            checkpointer.close()
    assert any(name.startswith("20/") for name in objects())
    assert {"10.json", "20.unfinished.json"} <= set(objects())
    assert "20.json" not in objects()
    shutil.rmtree(directory)
    checkpointer = start()
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(10))), 10)
    samples.save(checkpointer, 30)
    checkpointer.close()
    assert start().steps() == [10, 30]
    assert not any(name.startswith("20") for name in objects())


def test_close_copies_kept_steps_that_earlier_processes_could_not(start, samples, monkeypatch):
    checkpointer = start(10, keep=2)
    with monkeypatch.context() as broken:
        broken.setattr(Mirror, "upload", fail)
        samples.save(checkpointer, 20)
        with pytest.raises(CheckpointSaveError):
            checkpointer.close()
    mirror_of(checkpointer).delete(10)
    start(keep=1).close()
    assert mirror_of(start()).steps() == [20]  # the directory has 10, but it is not kept
    start(keep=2).close()
    assert mirror_of(start()).steps() == [10, 20]


def test_mirror_failed_deletion_warns_and_one_of_another_process_is_ignored(
    start, samples, store, monkeypatch, messages
):
    checkpointer = start(keep=1)
    with monkeypatch.context() as broken:
        broken.setattr(Mirror, "delete", fail)
        samples.save(checkpointer, 10, 20)
        checkpointer.close()
    (warning,) = messages
    assert "older checkpoints in memory://" in warning
    assert "could not be deleted: ConnectionError: the store is gone" in warning
    delete = store.rm_file

    def like_google(path):
        if not store.exists(path):
            raise FileNotFoundError(path)
        delete(path)

    monkeypatch.setattr(store, "rm_file", like_google)
    mirror_of(start()).delete(10)
    samples.save(checkpointer, 30)
    checkpointer.close()
    assert messages == [warning]
    assert mirror_of(start()).steps() == [30]


def test_save_waits_for_previous_copy_but_due_does_not(start, samples, monkeypatch, messages):
    checkpointer = start(keep=1, grace_seconds=1e-9)
    release, upload = threading.Event(), Mirror.upload

    def slow(self, step, directory):
        assert release.wait(60)
        upload(self, step, directory)

    monkeypatch.setattr(Mirror, "upload", slow)
    samples.save(checkpointer, 10)
    while checkpointer._writer.is_pending:
        assert not checkpointer.due(11)
    assert not checkpointer.due(12)
    assert messages == []  # how long a save takes is not known before it is copied
    threading.Timer(0.1, release.set).start()
    samples.save(checkpointer, 20)
    assert release.is_set()
    assert ["longer than checkpoint.grace_seconds allows" in line for line in messages] == [True]
    checkpointer.close()
    assert mirror_of(start()).steps() == [20]


def test_entries_with_unfinished_marks_have_their_other_state_and_are_kept(
    start, directory, samples, store, mirror_url, objects
):
    mirror_of(start(10, 20)).set_aside(10, "damaged")
    shutil.rmtree(directory / "10")
    for step in (10, 20):
        store.pipe_file(f"{mirror_url}/{step}.unfinished.json", b"{}")
    entries = mirror_of(start()).entries()
    assert [(entry.step, entry.state) for entry in entries] == [(10, "damaged"), (20, "committed")]
    start(30)
    assert {name.partition("/")[0] for name in objects() if "/" in name} == {"10", "20", "30"}

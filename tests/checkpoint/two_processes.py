"""One of two processes that save, restore and fall back together; started by a test.

Arguments: address, index, directory, and optionally the URL of a mirror to restore from.
"""

import errno
import itertools
import os
import resource
import shutil
import sys
import time
import traceback
from pathlib import Path

import jax

ADDRESS, INDEX, DIRECTORY = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(ADDRESS, num_processes=2, process_id=INDEX)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

from maxpipe.checkpoint import reader, replicas  # noqa: E402
from maxpipe.checkpoint.errors import CheckpointSaveError  # noqa: E402
from maxpipe.checkpoint.manager import Checkpointer  # noqa: E402
from maxpipe.checkpoint.mirror import open_url  # noqa: E402
from maxpipe.checkpoint.replicas import Replicas  # noqa: E402
from maxpipe.config import CheckpointConfig  # noqa: E402
from maxpipe.devices import processes  # noqa: E402

MESH = Mesh(np.asarray(jax.devices()).reshape(2, 2), ("a", "b"))


def abstract(split, copied):
    shardings = [NamedSharding(MESH, PartitionSpec(*spec)) for spec in (split, copied)]
    return {
        name: jax.ShapeDtypeStruct((8, 6), np.float32, sharding=sharding)
        for name, sharding in zip(("split", "copied", "host"), (*shardings, None), strict=True)
    }


TARGET = abstract(("b", None), (None, "a"))


def place(array, *spec):
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    with jax.enable_x64(True):
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def numbers(step):
    return np.random.default_rng(step).standard_normal((8, 6)).astype(np.float32)


def save(checkpointer, step, start=None):
    state = {
        "split": place(numbers(step), "a", "b"),
        "copied": place(numbers(step)),
        "host": numbers(step),
    }
    rows = np.arange(12, dtype=np.int64).reshape(4, 3) + step * 2**40
    if start is None:
        start, rows = checkpointer.save, place(rows, ("a", "b"))
    start(step, state, rows, {"step": step})


def check(restored, step):
    assert restored.step == step
    assert restored.meta == {"step": step}
    assert np.array_equal(restored.iterator, np.arange(12).reshape(4, 3) + step * 2**40)
    for name, leaf in restored.state.items():
        is_local = not isinstance(leaf, jax.Array)
        whole = leaf if is_local else multihost_utils.process_allgather(leaf, tiled=True)
        assert np.array_equal(whole, numbers(step)), name


def ask_the_clock_of_the_first():
    now, calls = [0.0], itertools.count()
    # The clock of the other process is always ahead.
    settings = CheckpointConfig(every=0, every_minutes=1)
    checkpointer = Checkpointer(
        DIRECTORY, settings, clock=lambda: now[0] if INDEX == 0 else 1e6 * next(calls)
    )
    due = []
    for step in range(1, 6):
        now[0] = 20.0 * step
        due.append(checkpointer.due(step))
    assert due == [False, False, True, True, True], due


def forget_old_posts():
    kept, processes._POSTS_KEPT = processes._POSTS_KEPT, 3
    for i in range(8):
        # The limit is smaller than in a real run, so process 0 must not get ahead of the other.
        multihost_utils.sync_global_devices(f"before {i}")
        assert processes.of_first_process(10 * INDEX + i) == i
    multihost_utils.sync_global_devices("posted")
    posts = processes.coordinator().key_value_dir_get("maxpipe/post")
    # Of 13 posts the first two were out of reach when the limit was set.
    assert len(posts) == 2 + 3, posts
    processes._POSTS_KEPT = kept
    multihost_utils.sync_global_devices("counted")  # process 0 posts again after this


def see_the_same_directory():
    alone = DIRECTORY.parent / str(INDEX)
    for directory in (DIRECTORY, alone):
        directory.mkdir(exist_ok=True)
    assert processes.share(DIRECTORY)
    assert not processes.share(alone)
    assert [*DIRECTORY.iterdir(), *alone.iterdir()] == []


def go_on_from_the_mirror(url):
    def start():
        mirror = open_url(url, "checkpoint.mirror")
        return Checkpointer(DIRECTORY, CheckpointConfig(keep=2), mirror=mirror)

    checkpointer = start()
    for step in (1, 2, 3):
        save(checkpointer, step)
    checkpointer.close()
    multihost_utils.sync_global_devices("saved")
    if INDEX == 0:
        shutil.rmtree(DIRECTORY)
    multihost_utils.sync_global_devices("lost")
    checkpointer = start()
    assert checkpointer.steps() == [2, 3]
    check(checkpointer.restore(TARGET), 3)
    print("done")


def start_with_replicas(directory, memory, messages):
    replicas = Replicas(memory, directory, 5)
    return Checkpointer(directory, CheckpointConfig(), replicas=replicas, log=messages.append)


def forget_what_one_could_not_write(directory):
    """A process that has no room for replicas does not let those of the other one grow."""
    memory, messages = DIRECTORY.parent / f"full-{INDEX}", []
    checkpointer = start_with_replicas(directory, memory, messages)
    write_shards = replicas.write_shards

    def fail(database, arrays):
        raise OSError(errno.ENOSPC, "No space left on device")

    def replicate(*steps):
        for step in steps:
            save(checkpointer, step, checkpointer.replicate)
        checkpointer.close()
        multihost_utils.sync_global_devices("replicated")
        return sorted(path.name for path in memory.glob("*/*"))

    replicate(5)
    replicas.write_shards = fail if INDEX == 1 else write_shards
    here = replicate(10, 15, 20)
    assert here == (["20", "5"] if INDEX == 0 else ["5"]), here
    replicas.write_shards = write_shards
    assert replicate(25) == ["25", "5"]
    failed = "the last replica in memory could not be written: "
    no_room = f"{failed}process 1: OSError: [Errno 28] No space left on device"
    assert messages == ([no_room] * 3 if INDEX == 0 else []), messages


def restore_what_both_have_in_memory(directory):
    """Each process has a memory of its own, and what is damaged in one is so for both."""
    memory, messages = DIRECTORY.parent / f"memory-{INDEX}", []
    target = abstract(("a", "b"), ())

    def start():
        multihost_utils.sync_global_devices("start")
        return start_with_replicas(directory, memory, messages)

    checkpointer = start()
    save(checkpointer, 1, checkpointer.save)
    for step in (5, 10, 15, 20):
        save(checkpointer, step, checkpointer.replicate)
    checkpointer.close()
    (own,) = memory.iterdir()
    assert sorted(path.name for path in own.iterdir()) == ["15", "20"]
    assert start().resumable() == [1, 15, 20]
    check(start().restore(target), 20)
    # As if process 1 had been killed while it was writing step 20.
    if INDEX == 1:
        (own / "20").rename(own / "20.unfinished")
    again = start()
    assert again.resumable() == [1, 15]
    check(again.restore(target), 15)
    assert sorted(path.name for path in own.iterdir()) == ["15"], "20 would be taken for new"
    for step in (20, 25):
        save(again, step, again.replicate)
    again.close()
    if INDEX == 1:
        for step in ("20", "25"):
            (own / step / "arrays" / "manifest.ocdbt").unlink()
    again = start()
    assert again.resumable() == [1, 20, 25]
    check(again.restore(target), 1)
    saved = f"safe: step 1 in {directory}"
    said = [
        f"step 20 is restored from replicas in memory; {saved}",
        f"step 15 is restored from replicas in memory; {saved}",
        "the replica of step 25 in memory is dropped: ",
        "the replica of step 20 in memory is dropped: ",
    ]
    assert len(messages) == (len(said) if INDEX == 0 else 0), messages
    assert all(map(str.startswith, messages, said)), messages
    assert again.resumable() == [1]


def fail_alone(checkpointer):
    """What one process cannot write is an error there at once, although the other one waits."""
    if INDEX == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    save(checkpointer, 4)
    if INDEX == 1:
        with pytest.raises(CheckpointSaveError, match="File too large; safe: step 2 in"):
            checkpointer.wait()
    multihost_utils.sync_global_devices("failed")
    assert checkpointer.steps() == [2]


def main():
    ask_the_clock_of_the_first()
    forget_old_posts()
    see_the_same_directory()
    restore_what_both_have_in_memory(DIRECTORY.parent / "replicated")
    forget_what_one_could_not_write(DIRECTORY.parent / "replicated")
    messages = []
    checkpointer = Checkpointer(DIRECTORY, CheckpointConfig(keep=2), log=messages.append)
    for step in (1, 2, 3):
        save(checkpointer, step)
    check(checkpointer.restore(TARGET), 3)
    assert checkpointer.steps() == [2, 3]
    if INDEX == 1:
        (DIRECTORY / "3" / "arrays" / "manifest.ocdbt").unlink()
    multihost_utils.sync_global_devices("damaged")
    check(checkpointer.restore(TARGET), 2)
    assert len(messages) == (2 if INDEX == 0 else 0), messages
    save(checkpointer, 3)
    checkpointer.close()
    assert checkpointer.steps() == [2, 3]
    check(checkpointer.restore(TARGET, step=3), 3)
    load = reader.load

    def failing(directory, *arguments):
        if INDEX == 1 and directory == DIRECTORY / "3":
            raise ValueError("DATA_LOSS: as if")
        return load(directory, *arguments)

    reader.load = failing
    check(checkpointer.restore(TARGET), 2)
    assert checkpointer.steps() == [2]
    reader.load = load
    fail_alone(checkpointer)
    print("done", flush=True)
    time.sleep(1 - INDEX)  # JAX would end the other process, too
    os._exit(0)  # process 0 would wait for step 4


if __name__ == "__main__":
    try:
        if len(sys.argv) > 4:
            go_on_from_the_mirror(sys.argv[4])
        else:
            main()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # otherwise JAX waits for the other process

"""Checkpoints in an object store, on an S3 server on this machine; more in test_mirror.py."""

import os
import shutil

import pytest
from checkpoint.test_mirror import damage_copy, flip, mirror_of

from maxpipe.checkpoint.__main__ import main


def test_restore_lost_directory_fetches_step_from_mirror(
    start, directory, messages, samples, objects
):
    checkpointer = start(10, 20)
    shutil.rmtree(directory)
    checkpointer = start()
    assert checkpointer.steps() == [10, 20]
    samples.assert_restored(checkpointer.restore(samples.abstract(samples.state(20))), 20)
    assert sorted(os.listdir(directory)) == ["20"]
    assert not checkpointer.due(20)
    samples.save(checkpointer, 30)
    checkpointer.close()
    assert sorted(os.listdir(directory)) == ["20", "30"]
    assert start().steps() == [10, 20, 30]
    assert len(messages) == 1
    assert messages[0].startswith("fetching checkpoint 20 from s3://")


@pytest.fixture
def mirrored(start, directory, samples, mirror_url):
    checkpointer = start(10, 20, 30)
    mirror_of(checkpointer).set_aside(30, "damaged")
    shutil.rmtree(directory)
    return mirror_url.removesuffix("/checkpoints")


def test_commands_of_url_list_verify_and_show_steps(mirrored, store, capsys):
    for inner in ("", "/checkpoints/"):
        assert main(["ls", mirrored + inner]) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [(row[1], row[-1]) for row in rows[1:]] == [
            ("committed", "10.json"),
            ("committed", "20.json"),
            ("damaged", "30.damaged.json"),
        ]
    damage_copy(store, f"{mirrored}/checkpoints", 10, flip)
    assert main(["verify", mirrored]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("10: DAMAGED: ")
    assert second == "20: sound, 7 arrays"
    assert main(["show", mirrored, "--step", "10"]) == 0
    assert capsys.readouterr().out.startswith("step: 10\n")

"""Steps of a run in a directory, and how they are set aside."""

import pytest

from maxpipe.checkpoint.run_argument import open_steps
from maxpipe.checkpoint.steps import (
    ABANDONED,
    DAMAGED,
    StepsDirectory,
    committed_steps,
)

NAMES = {
    "0": (0, "committed"),
    "9": (9, "committed"),
    "10": (10, "committed"),
    "10.damaged": (10, "damaged"),
    "10.damaged-2": (10, "damaged"),
    "20.abandoned": (20, "abandoned"),
    "30.orbax-checkpoint-tmp-1": (30, "unfinished"),
}


@pytest.fixture
def store(tmp_path):
    for name in [*NAMES, "010", "ten", "10.lost"]:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "40").touch()
    return StepsDirectory(tmp_path / "checkpoints")


def test_entries_state_follows_name_and_order_follows_step(store):
    assert [(entry.name, (entry.step, entry.state)) for entry in store.entries()] == [
        *NAMES.items()
    ]
    assert store.steps() == committed_steps(store.path) == [0, 9, 10]


def test_set_aside_takes_first_free_name(store):
    assert store.set_aside(10, DAMAGED) == str(store.path / "10.damaged-3")
    assert store.set_aside(9, ABANDONED) == str(store.path / "9.abandoned")
    assert store.steps() == [0]


def test_local_files_are_files_only(store):
    directory = store.path.parent / "tokenizer"
    (directory / ".ipynb_checkpoints").mkdir(parents=True)
    (directory / "tokenizer.json").touch()
    (directory / "gone.json").symlink_to("nothing")
    with store.local_files("tokenizer") as files:
        assert files == [directory / "tokenizer.json"]
    with store.local_files("origin") as files:
        assert files == []


def test_open_steps_takes_run_or_its_checkpoints(store):
    for inner in ["", "checkpoints"]:
        assert open_steps(str(store.path.parent / inner), "DIR").steps() == [0, 9, 10]

"""Steps of a run in a directory, their records, and how they are set aside."""

import json

import pytest

from maxpipe.checkpoint import record
from maxpipe.checkpoint.errors import CheckpointDamaged
from maxpipe.checkpoint.record import ITERATOR, Leaf, Record, record_file, step_record
from maxpipe.checkpoint.run_argument import open_steps
from maxpipe.checkpoint.steps import ABANDONED, DAMAGED, StepsDirectory, committed_steps

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


def test_entries_state_follows_name_and_set_aside_takes_the_first_free_one(store):
    assert [(entry.name, (entry.step, entry.state)) for entry in store.entries()] == [
        *NAMES.items()
    ]
    for inner in ["", "checkpoints"]:
        assert open_steps(str(store.path.parent / inner), "DIR").steps() == [0, 9, 10]
    assert committed_steps(store.path) == [0, 9, 10]
    assert store.set_aside(10, DAMAGED) == str(store.path / "10.damaged-3")
    for name in ("9.abandoned", "9.abandoned-2"):
        assert store.set_aside(9, ABANDONED) == str(store.path / name)
        store.of(9).mkdir()
    assert store.steps() == [0, 9]


def test_local_files_are_files_only(store):
    directory = store.path.parent / "tokenizer"
    (directory / ".ipynb_checkpoints").mkdir(parents=True)
    (directory / "tokenizer.json").touch()
    with store.local_files("tokenizer") as files:
        assert files == [directory / "tokenizer.json"]
    with store.local_files("origin") as files:
        assert files == []


def test_step_record_is_what_was_written_or_damage(tmp_path):
    leaves = {
        "params.layers.up": Leaf((4, 16, 32), "float32", 7),
        "step": Leaf((), "int32", 2**32 - 1),
        ITERATOR: Leaf((8, 3), "int64", 0),
    }
    written = Record(1, {"config": {"seed": 0}, "eval_loss": 2.5}, leaves)
    file = record_file(tmp_path / "1")
    file.parent.mkdir(parents=True)
    file.write_text(text := json.dumps(written.to_json()))
    assert step_record(tmp_path / "1") == written

    def with_checksum(**changes):
        content = written.to_json() | changes
        del content["checksum"]
        return json.dumps({**content, "checksum": record._checksum(content)})

    for changed, problem in (
        (text.replace('"seed": 0', '"seed": 1'), "checksum of the record does not match"),
        (with_checksum(step="1"), "no Record"),
        (with_checksum(step=2), "record says step 2"),
        ("[]", "no dict: "),
    ):
        file.write_text(changed)
        with pytest.raises(CheckpointDamaged, match=rf"checkpoint .*/1 is damaged: {problem}"):
            step_record(tmp_path / "1")

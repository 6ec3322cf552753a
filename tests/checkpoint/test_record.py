"""Records whose checksum or content is not what a save has written are damage."""

import json

import pytest

from maxpipe.checkpoint import record
from maxpipe.checkpoint.errors import CheckpointDamaged
from maxpipe.checkpoint.record import ITERATOR, Leaf, Record, record_file, step_record

LEAVES = {
    "params.layers.up": Leaf((4, 16, 32), "float32", 7),
    "params.none": Leaf((0, 3), "float32", 0),
    "step": Leaf((), "int32", 2**32 - 1),
    ITERATOR: Leaf((8, 3), "int64", 0),
}
META = {"config": {"seed": 0, "model": {"num_layers": 4}}, "eval_loss": 2.5}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a changed content of step 1 with a right checksum."""
    file = record_file(tmp_path / "checkpoints" / "1")
    file.parent.mkdir(parents=True)

    def write(**changes):
        content = Record(1, META, LEAVES).to_json() | changes
        content.pop("checksum")
        file.write_text(json.dumps({**content, "checksum": record._checksum(content)}))
        return file.parents[1]

    return write


def test_step_record_is_what_was_written_or_damage(write):
    directory = write()
    assert step_record(directory) == Record(1, META, LEAVES)
    file = record_file(directory)
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CheckpointDamaged, match="checksum of the record does not match"):
        step_record(directory)
    for step, problem in (("1", "not the form of one"), (2, "record says step 2")):
        with pytest.raises(CheckpointDamaged, match=problem):
            step_record(write(step=step))
    file.unlink()
    file.symlink_to("/dev/null")
    with pytest.raises(CheckpointDamaged, match="is no file"):
        step_record(directory)

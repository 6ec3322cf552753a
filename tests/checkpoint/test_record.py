"""Records whose checksum is right and whose content no save has written are damage.

FUZZ_CASES=5000 runs that many random ones instead of a few.
"""

import copy
import json
import os
import random
import sys

import pytest

from maxpipe.checkpoint import record
from maxpipe.checkpoint.__main__ import DAMAGE, UNREADABLE, main
from maxpipe.checkpoint.errors import CheckpointDamaged
from maxpipe.checkpoint.record import ITERATOR, Leaf, Record, record_file, step_record

CASES = int(os.environ.get("FUZZ_CASES", "60"))
LEAVES = {
    "params.layers.up": Leaf((4, 16, 32), "float32", 7),
    "params.none": Leaf((0, 3), "float32", 0),
    "step": Leaf((), "int32", 2**32 - 1),
    ITERATOR: Leaf((8, 3), "int64", 0),
}
META = {
    "config": {"seed": 0, "model": {"num_layers": 4}},
    "versions": {"jax": "1.2.3"},
    "fingerprint": {"data": [], "eval": None, "tokenizer": "byte", "documents": 9},
    "eval_loss": 2.5,
}
VALUES = (
    *("x", "", "1", "\ud800", -1, 0, 2**70, 1.5, float("nan"), float("inf"), None, True),
    *([], {}, [1], ["a"], [[[]]], {"a": 1}),
)


@pytest.fixture
def write(tmp_path):
    """Return a function that writes the content of step 1 with a right checksum."""
    file = record_file(tmp_path / "checkpoints" / "1")
    file.parent.mkdir(parents=True)

    def write(content):
        file.write_text(json.dumps({**content, "checksum": record._checksum(content)}))
        return file.parents[1]

    return write


def content():
    sound = Record(1, META, LEAVES).to_json()
    sound.pop("checksum")
    return sound


def places(node, path=()):
    """Yield the path of every node below one."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutate(draw):
    """Return a content with up to three nodes replaced or deleted."""
    mutated = copy.deepcopy(content())
    for _ in range(draw.randint(1, 3)):
        if not (paths := [*places(mutated)]):
            break
        *outer, last = draw.choice(paths)
        node = mutated
        for key in outer:
            node = node[key]
        if draw.random() < 0.2:
            del node[last]
        else:
            node[last] = draw.choice(VALUES)
    return mutated


def test_step_record_is_what_was_written_or_damage(write):
    directory = write(content())
    assert step_record(directory) == Record(1, META, LEAVES)
    file = record_file(directory)
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CheckpointDamaged, match="checksum of the record does not match"):
        step_record(directory)
    file.unlink()
    file.symlink_to("/dev/null")
    with pytest.raises(CheckpointDamaged, match="is no file"):
        step_record(directory)


def test_step_record_that_no_save_has_written_is_damage(write):
    crafted = ({"dtype": ["float32"]}, {"dtype": "x"}, {"digest": True}, {"shape": [-1]})
    for change in crafted:
        changed = content()
        changed["leaves"]["step"].update(change)
        with pytest.raises(CheckpointDamaged, match="record has not the form of one"):
            step_record(write(changed))
    for step, problem in (("1", "not the form of one"), (2, "record says step 2")):
        with pytest.raises(CheckpointDamaged, match=problem):
            step_record(write({**content(), "step": step}))


def test_show_random_records_are_shown_or_damage(write, capsys):
    draw = random.Random(4)
    sys.stderr.reconfigure(errors="backslashreplace")  # as outside of tests
    for _ in range(CASES):
        crafted = mutate(draw)
        run = write(crafted).parents[1]
        assert main(["show", str(run)]) in (0, DAMAGE, UNREADABLE), crafted
        capsys.readouterr()

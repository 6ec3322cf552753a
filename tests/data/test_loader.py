"""The loader: batches do not depend on workers, processes or restarts."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from helpers.hf_folder import write_byte_pairs
from tokenizers import Tokenizer

from maxpipe.config import Config, replace
from maxpipe.config.errors import ConfigError
from maxpipe.data.loader import (
    make_loader,
    moved_state,
    open_tokenizer,
    token_bytes,
    tokenizer_notes,
)


@pytest.fixture
def make_config(tmp_path):
    for i in range(23):
        text = "".join(chr(97 + (i + j) % 26) for j in range(i * i % 37))
        (tmp_path / f"{i:02}.txt").write_text(text)

    def make(batch=4, length=16, **data):
        values = {"source": "text", "path": str(tmp_path / "*.txt"), "eval_fraction": 0.0}
        values |= {"global_batch_size": batch, "sequence_length": length, **data}
        return replace(Config(), **{f"data.{key}": value for key, value in values.items()})

    return make


def _take(loader, count):
    batches, states = [], []
    for _ in range(count):
        batches.append(next(loader))
        states.append(loader.state)
    loader.close()
    return batches, states


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("batch", [4, 40])
def test_loader_resumes_from_every_state(make_config, batch, packing):
    dtypes = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), np.int32)
    config = make_config(batch=batch, packing=packing)
    loader = make_loader(config, "train", range(batch))
    states = [loader.state]
    batches, later = _take(loader, 12)
    states += later
    assert {name: x.dtype for name, x in batches[0].items()} == dtypes | {"weights": np.float32}
    assert {x.shape for x in batches[0].values()} == {(batch, 16)}
    assert states[-1][:, 0].max() >= 1, "the test should cross an epoch"
    for position in range(12):
        loader = make_loader(config, "train", range(batch), states[position])
        resumed, resumed_states = _take(loader, min(2, 12 - position))
        np.testing.assert_equal(resumed, batches[position : position + 2])
        np.testing.assert_equal(resumed_states, states[position + 1 : position + 3])


PARTS = [range(3), range(3, 6), range(0, 6, 2), range(1, 6, 2), [5], range(5)]


def test_loader_of_part_of_the_rows_or_with_workers_reads_the_same(make_config):
    config = make_config(batch=6)
    batches, states = _take(make_loader(config, "train", range(6)), 6)
    for rows in PARTS:
        alone, alone_states = _take(make_loader(config, "train", rows), 6)
        resumed, _ = _take(make_loader(config, "train", rows, states[2][rows]), 3)
        whole = [{name: array[rows] for name, array in batch.items()} for batch in batches]
        np.testing.assert_equal(alone + resumed, whole + whole[3:])
        np.testing.assert_equal(alone_states, [state[rows] for state in states])
    config = make_config(batch=6, num_workers=2, prefetch=2)
    loaded, loaded_states = _take(make_loader(config, "train", range(6), states[1]), 4)
    np.testing.assert_equal(loaded, batches[2:])
    np.testing.assert_equal(loaded_states, states[2:])


def test_make_loader_state_of_other_data_raises(make_config, tmp_path):
    state = _take(make_loader(make_config(), "train", range(4)), 3)[1][-1]
    for change in ({"batch": 5}, {"path": f"{tmp_path}/10.txt,{tmp_path}/11.txt"}):
        with pytest.raises(ConfigError, match="does not fit"):
            make_loader(make_config(**change), "train", range(4), state)


def test_loader_reads_documents_of_its_rows_and_names_one_that_is_bad(tmp_path, make_config):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "abc"}\nnot json\n')
    data = {"source": "jsonl", "path": str(path), "shuffle": False}
    for workers in (0, 1):
        config = make_config(batch=2, num_workers=workers, **data)
        _take(make_loader(config, "train", [0]), 3)
        loader = make_loader(config, "train", range(2))
        with pytest.raises(ConfigError, match=r"bad\.jsonl:2: not a JSON object") as caught:
            next(loader)
        assert str(caught.value).endswith("; data.on_bad_document=skip leaves such documents out")
        loader.close()
        loader.close()


def test_loader_of_changed_data_continues_from_a_moved_state(make_config, tmp_path):
    before = np.array([[0, 8, 5], [1, 3, 0], [2, 2, 7], [0, 7, 1]])
    assert moved_state(before, 9, 9) is before
    moved = moved_state(before, 9, 7)
    np.testing.assert_array_equal(moved, [[1, 1, 0], [1, 5, 0], [2, 6, 0], [1, 0, 0]])
    loader = make_loader(make_config(), "train", range(4))
    state = _take(loader, 7)[1][-1]
    for count in (9, 40):
        (directory := tmp_path / f"other {count}").mkdir()
        for i in range(count):
            (directory / f"{i:02}.txt").write_text(f"document {i}")
        moved = moved_state(state, loader.num_documents, count)
        changed = make_loader(make_config(path=str(directory)), "train", range(4), moved)
        assert all((batch["weights"] == 1).all() for batch in _take(changed, 2)[0])


_PARENT = """
import os, signal, sys
from multiprocessing import active_children
from maxpipe.config import Config, replace
from maxpipe.data.loader import make_loader

if __name__ == "__main__":
    loader = make_loader(replace(Config(), **{"data.num_workers": 1}), "train", range(32))
    next(loader)
    worker = active_children()[0].pid
    os.kill(worker, signal.SIGTERM)
    os.kill(worker, signal.SIGINT)
    for _ in range(20):
        next(loader)
    print("still loading", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_ignore_signals_and_end_with_parent(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # A worker inherits the pipe, so run() returns only after the worker has ended, too.
    command = [sys.executable, str(script)]
    parent = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    assert parent.stdout == b"still loading\n"


def test_adapters_for_conversations_note_that_no_token_ends_a_turn(tmp_path):
    write_byte_pairs(tmp_path, "a b c", ["</s>"], size=300)
    keys = {"data.source": "python_help", "data.chat_template": "chatml", "model.lora.rank": 4}
    config = replace(Config(), **keys, **{"data.tokenizer": str(tmp_path)})
    (note,) = tokenizer_notes(config)
    assert note.startswith("'<|im_end|>' ends a turn, but is no special token of the tokenizer, ")
    assert "model.lora.rank=0" in note
    assert tokenizer_notes(replace(config, **{"model.lora.rank": 0})) == []
    assert tokenizer_notes(replace(config, **{"data.source": "synthetic"})) == []
    stored = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stored.add_special_tokens(["<|im_end|>"])
    stored.save(str(tmp_path / "with_it.json"))
    assert tokenizer_notes(replace(config, **{"data.tokenizer": f"{tmp_path}/with_it.json"})) == []


def test_imported_model_may_lack_added_tokens_of_its_tokenizer(tmp_path):
    stored = Tokenizer.from_file(str(write_byte_pairs(tmp_path, "a b c", ["</s>"], size=300)))
    num_own = stored.get_vocab_size()
    stored.add_special_tokens(["<image>", "<audio>"])
    stored.save(str(tmp_path / "tokenizer.json"))
    keys = {"model.vocab_size": num_own, "data.tokenizer": str(tmp_path)}
    config = replace(Config(), **keys, **{"model.from_hf": str(tmp_path)})
    assert open_tokenizer(config).vocab_size == num_own + 2
    for num_ids, unknown in ((num_own, "2 .* <image>, <audio>;"), (num_own + 1, "1 .* <audio>;")):
        (note,) = tokenizer_notes(replace(config, **{"model.vocab_size": num_ids}))
        assert re.match(f"the model has no ids for {unknown}", note)
    assert tokenizer_notes(replace(config, **{"model.vocab_size": num_own + 2})) == []
    assert tokenizer_notes(Config()) == []
    counts = token_bytes(config)
    assert counts is not None
    assert counts.shape == (num_own,)
    small = replace(config, **{"model.vocab_size": num_own - 1})
    for other, least in ((replace(Config(), **keys), num_own + 2), (small, num_own)):
        with pytest.raises(ConfigError, match=rf"model\.vocab_size: .* at least {least}$"):
            open_tokenizer(other)

"""The loader: batches do not depend on workers, processes or restarts."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.hf_folder import write_byte_pairs
from tokenizers import Tokenizer

from maxpipe.config import Config, replace
from maxpipe.config.errors import ConfigError
from maxpipe.data.loader import (
    Loader,
    make_loader,
    moved_state,
    open_tokenizer,
    token_bytes,
    tokenizer_notes,
)

Equal = Callable[[dict[str, np.ndarray], dict[str, np.ndarray]], None]
Make = Callable[..., Config]


def _take(loader: Loader, count: int) -> tuple[list[dict[str, np.ndarray]], list[np.ndarray]]:
    """Return `count` batches and the state after each."""
    batches, states = [], []
    for _ in range(count):
        batches.append(next(loader))
        states.append(loader.state)
    loader.close()
    return batches, states


@pytest.mark.parametrize("packing", [True, False])
def test_loader_resumes_from_every_state(
    make_config: Make, assert_batches_equal: Equal, packing: bool
) -> None:
    """There are 23 documents, so some of 40 rows start in the second epoch."""
    dtypes = dict.fromkeys(("tokens", "targets", "positions", "segment_ids"), np.int32)
    for batch, positions in ((4, range(12)), (40, (0, 5, 11))):
        config = make_config(batch=batch, packing=packing)
        loader = make_loader(config, "train", range(batch))
        states = [loader.state]
        batches, later = _take(loader, 12)
        states += later
        assert {name: x.dtype for name, x in batches[0].items()} == dtypes | {"weights": np.float32}
        assert {x.shape for x in batches[0].values()} == {(batch, 16)}
        assert states[-1][:, 0].max() >= 1, "the test should cross an epoch"
        for position in positions:
            loader = make_loader(config, "train", range(batch), states[position])
            resumed, resumed_states = _take(loader, 2)
            assert_batches_equal(resumed[0], batches[position])
            np.testing.assert_array_equal(resumed_states[0], states[position + 1])


def test_loader_state_ignores_prefetched_batches(make_config: Make) -> None:
    states = []
    for prefetch in (1, 8):
        loader = make_loader(make_config(prefetch=prefetch), "train", range(4))
        next(loader)
        time.sleep(0.05)
        states.append(loader.state)
        loader.close()
    np.testing.assert_array_equal(*states)


PARTS = [[range(3), range(3, 6)], [range(0, 6, 2), range(1, 6, 2)], [[5], range(5)]]


def test_loader_split_over_processes_gives_same_rows(
    make_config: Make, assert_batches_equal: Equal
) -> None:
    """Each part reads alone, and also continues in the middle what a single process began."""
    for parts in PARTS:
        config = make_config(batch=6)
        batches, states = _take(make_loader(config, "train", range(6)), 6)
        for rows in parts:
            alone, alone_states = _take(make_loader(config, "train", rows), 6)
            resumed, _ = _take(make_loader(config, "train", rows, states[2][rows]), 3)
            for whole, part in zip(batches + batches[3:], alone + resumed, strict=True):
                assert_batches_equal({name: array[rows] for name, array in whole.items()}, part)
            np.testing.assert_array_equal(alone_states[-1], states[-1][rows])


def test_loader_num_workers_does_not_change_batches(
    make_config: Make, assert_batches_equal: Equal
) -> None:
    batches, states = _take(make_loader(make_config(batch=3), "train", range(3)), 6)
    config = make_config(batch=3, num_workers=2, prefetch=2)
    loaded, loaded_states = _take(make_loader(config, "train", range(3), states[1]), 4)
    for a, b in zip(loaded, batches[2:], strict=True):
        assert_batches_equal(a, b)
    np.testing.assert_array_equal(loaded_states, states[2:])


def test_loader_train_and_eval_share_no_document(make_config: Make) -> None:
    config = replace(
        make_config(batch=8, eval_fraction=0.3, packing=False), **{"eval.global_batch_size": 5}
    )
    seen = {}
    for split, rows in (("train", 8), ("eval", 5)):
        batches, _ = _take(make_loader(config, split, range(rows)), 6)
        seen[split] = {tuple(row) for batch in batches for row in batch["tokens"].tolist()}
    assert seen["eval"]
    assert not seen["train"] & seen["eval"]


def test_make_loader_state_of_other_data_raises(make_config: Make, tmp_path: Path) -> None:
    for change in [{"batch": 5}, {"path": "10.txt,11.txt"}]:
        state = _take(make_loader(make_config(), "train", range(4)), 3)[1][-1]
        if "path" in change:
            change = {"path": ",".join(str(tmp_path / name) for name in change["path"].split(","))}
        with pytest.raises(ConfigError, match="does not fit"):
            make_loader(make_config(**change), "train", range(4), state)


def test_loader_reads_documents_of_its_rows_and_names_one_that_is_bad(
    tmp_path: Path, make_config: Make
) -> None:
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


def test_loader_of_changed_data_continues_from_a_moved_state(make_config: Make) -> None:
    """A row keeps its place among the rows, and the number of documents it has passed."""
    before = np.array([[0, 8, 5], [1, 3, 0], [2, 2, 7], [0, 7, 1]])
    assert moved_state(before, 9, 9) is before
    np.testing.assert_array_equal(
        moved_state(before, 9, 7), [[1, 1, 0], [1, 5, 0], [2, 6, 0], [1, 0, 0]]
    )
    config = make_config()
    loader = make_loader(config, "train", range(4))
    state = _take(loader, 7)[1][-1]
    for count in (9, 40):
        directory = Path(config.data.path).parent / f"other {count}"
        directory.mkdir()
        for i in range(count):
            (directory / f"{i:02}.txt").write_text(f"document {i}")
        changed = make_config(path=str(directory))
        moved = moved_state(state, loader.num_documents, count)
        batches, _ = _take(make_loader(changed, "train", range(4), moved), 2)
        assert all((batch["weights"] == 1).all() for batch in batches)


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


def test_workers_ignore_signals_and_end_with_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # A worker inherits the pipe, so run() returns only after the worker has ended, too.
    command = [sys.executable, str(script)]
    parent = subprocess.run(command, stdout=subprocess.PIPE, env=environment, timeout=60)
    assert parent.returncode == -signal.SIGKILL
    assert parent.stdout == b"still loading\n"


def test_imported_model_may_lack_added_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    stored = Tokenizer.from_file(str(write_byte_pairs(tmp_path, "a b c", ["</s>"], size=300)))
    num_own = stored.get_vocab_size()
    stored.add_special_tokens(["<image>"])
    stored.save(str(tmp_path / "tokenizer.json"))
    keys = {"model.vocab_size": num_own, "data.tokenizer": str(tmp_path)}
    config = replace(Config(), **keys, **{"model.from_hf": str(tmp_path)})
    assert open_tokenizer(config).vocab_size == num_own + 1
    assert tokenizer_notes(config) == [
        "the model has no ids for 1 of the tokenizer's tokens; texts must not have them: <image>"
    ]
    counts = token_bytes(config)
    assert counts is not None
    assert counts.shape == (num_own,)
    with pytest.raises(ConfigError, match=rf"model\.vocab_size: .* at least {num_own + 1}"):
        open_tokenizer(replace(Config(), **keys))
    small = replace(config, **{"model.vocab_size": num_own - 1})
    with pytest.raises(ConfigError, match=rf"model\.vocab_size: .* at least {num_own}$"):
        open_tokenizer(small)
    assert tokenizer_notes(Config()) == []

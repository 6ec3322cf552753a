"""What evaluations read: evenly spaced places of all held-out text, each token at most once."""

import json
import re

import numpy as np
import pytest

from maxpipe.config import Config, ConfigError, load, replace
from maxpipe.data import held_out
from maxpipe.data.held_out import open_held_out

LENGTH, ROWS = 16, 4
END = 257  # the token after each document
CHAT = {"data.source": "chat", "data.chat_template": "chatml"}


@pytest.fixture
def make(tmp_path):
    def make_config(texts, **keys):
        file = tmp_path / "held_out.jsonl"
        lines = [{"text": text} for text in texts]
        if keys.get("data.source") == "chat":
            turns = [[("user", "?"), ("assistant", text)] for text in texts]
            lines = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in turns]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        values = {
            "data.source": "jsonl",
            "data.path": str(file),
            "data.eval_path": str(file),
            "data.sequence_length": LENGTH,
            "data.global_batch_size": ROWS,
            "eval.global_batch_size": ROWS,
            "eval.batches_per_source": 0,
        }
        return replace(Config(), **values | keys)

    return make_config


def documents(seed, count=9, longest=70):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest, count)
    letters = np.arange(sum(lengths)) + 0x4E00
    return ["".join(map(chr, part)) for part in np.split(letters, np.cumsum(lengths)[:-1])]


def targets(config, rows=range(ROWS)):
    found = []
    for batch in open_held_out(config, rows)[0]:
        found += [t[w > 0] for t, w in zip(batch["targets"], batch["weights"], strict=True)]
    return np.concatenate(found).tolist()


def text_of(ids):
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def test_all_of_it_is_evaluated_once(make):
    for rows in [1, 3, 8]:
        for keys in [{}, CHAT]:
            for packing in [True, False]:
                texts = documents(rows)
                config = make(texts, **{"data.packing": packing, "eval.batches": 0, **keys})
                config = replace(config, **{"eval.global_batch_size": rows})
                found = sorted(text_of(targets(config, range(rows))).replace("<|im_end|>\n", ""))
                assert found == sorted("".join(texts))


@pytest.mark.parametrize("packing", [True, False])
def test_a_sample_is_spread_over_the_text_and_takes_no_token_twice(make, packing):
    texts = documents(1, count=40)
    config = make(texts, **{"data.packing": packing, "eval.batches": 2})
    evaluated, _ = open_held_out(config, range(ROWS))
    found = targets(config)
    assert found == targets(config)
    letters = [letter for letter in text_of(found) if letter != "\ufffd"]
    assert len(letters) == len(set(letters))
    places = np.sort([ord(letter) - 0x4E00 for letter in letters])
    whole = len("".join(texts))
    gaps = np.diff([*places, places[0] + whole])
    assert gaps.max() < 2 * whole / (2 * ROWS)
    total = sum(len(text.encode()) + 1 for text in texts if text)
    assert str(evaluated) == f"evaluates {len(found):,} of {total:,} tokens"


def test_rows_of_several_processes_are_those_of_one(make):
    config = make(documents(2), **{"eval.batches": 0})
    whole, _ = open_held_out(config, range(ROWS))
    parts = [open_held_out(config, rows)[0] for rows in ([0, 1], [2, 3])]
    assert whole.num_batches > 2
    for batch, *halves in zip(whole, *parts, strict=True):
        for name, x in batch.items():
            np.testing.assert_array_equal(x, np.concatenate([half[name] for half in halves]))
    assert not batch["weights"][-1].any()  # padding


@pytest.mark.parametrize(("packing", "length"), [(True, None), (False, None), (False, 63)])
def test_the_expected_loss_of_a_sample_is_that_of_the_whole(make, packing, length):
    """The "loss" is high at heads of documents, and in the first half of the corpus."""
    errors = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        lengths = [length or int(n) for n in random.integers(1, 9 * LENGTH, 24)]
        texts = [
            "".join(
                chr(97 + 10 * (i < 20) + 5 * (number < 12) + int(random.integers(5)))
                for i in range(n)
            )
            for number, n in enumerate(lengths)
        ]
        config = make(texts, **{"data.packing": packing, "eval.batches": 3})
        whole = [i for text in texts for i in (*text.encode(), END)]
        errors.append(np.mean(targets(config)) - np.mean(whole))
    assert abs(np.mean(errors)) < 3 * np.std(errors) / np.sqrt(len(errors))


def test_a_large_set_is_judged_by_some_of_its_documents(make, monkeypatch):
    monkeypatch.setattr(held_out, "COUNTED", 500)
    config = make(["x" * (50 + i % 7) for i in range(2000)], **{"eval.batches": 2})
    read = []
    of = held_out.EncodedDocuments.__getitem__
    monkeypatch.setattr(
        held_out.EncodedDocuments, "__getitem__", lambda self, i: read.append(i) or of(self, i)
    )
    evaluated, _ = open_held_out(config, range(ROWS))
    assert len(read) < 20
    assert max(read) > 1000
    words = str(evaluated).replace(",", "").split()
    assert words[:4] == ["evaluates", "128", "of", "about"]
    assert abs(int(words[4]) - 54 * 2000) < 3000


def test_sources_of_a_mixture_weigh_as_in_training(tmp_path):
    """Where documents are drawn by weight, the tokens of a source depend on their length."""
    for name, length, count in (("a", 90, 10), ("b", 10, 200)):
        lines = (json.dumps({"text": name * length}) + "\n" for _ in range(count))
        (tmp_path / name).write_text("".join(lines))
    mixture = [{"source": "jsonl", "path": str(tmp_path / x), "weight": 1.0} for x in "ab"]
    config = replace(
        load("base", []).config,
        **{
            "data.mixture": mixture,
            "data.eval_fraction": 0.5,
            "data.sequence_length": 32,
            "eval.global_batch_size": 8,
            "eval.batches_per_source": 1,
        },
    )
    for batches, by, share in [(0, "documents", 0.9), (1, "documents", 0.9), (2, "tokens", 0.5)]:
        keys = {"eval.batches": batches, "data.mixture_by": by}
        found, by_source = open_held_out(replace(config, **keys), range(8))
        weights = dict.fromkeys(map(ord, "ab"), 0.0)
        for batch in found:
            for letter in weights:
                weights[letter] += batch["weights"][batch["targets"] == letter].sum()
        assert re.match(r"\d+ of 210 documents; evaluates ", str(found))
        assert weights[ord("a")] / sum(weights.values()) == pytest.approx(share, abs=0.02)
        assert [*by_source] == [f"jsonl:{tmp_path / x}" for x in "ab"]


def test_held_out_documents_without_tokens_are_an_error(make):
    with pytest.raises(ConfigError, match=r"^data\.eval_path: .*no tokens"):
        open_held_out(make(["", ""]), range(ROWS))
    assert load("base", ["eval.batches=all"]).config.eval.batches == 0

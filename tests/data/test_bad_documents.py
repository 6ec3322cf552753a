"""Documents that cannot be read: they end a run, or are skipped and counted; `check` finds them."""

import json

import numpy as np
import pytest

from maxpipe.config import Config, ConfigError, replace
from maxpipe.data.__main__ import main
from maxpipe.data.documents import open_documents
from maxpipe.data.loader import make_loader

BAD = {3: "not json", 17: '{"text": 5}', 30: '{"other": "x"}'}


@pytest.fixture
def corpus(tmp_path):
    lines = [BAD.get(i, json.dumps({"text": f"document {i}"})) for i in range(40)]
    file = tmp_path / "late.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def config(corpus):
    values = {
        "data.source": "jsonl",
        "data.path": str(corpus),
        "data.global_batch_size": 4,
        "data.sequence_length": 16,
        "data.eval_fraction": 0.0,
        "data.on_bad_document": "skip",
    }
    return replace(Config(), **values)


def take(config, count, state=None):
    loader = make_loader(config, "train", range(4), state)
    batches = [next(loader)["tokens"] for _ in range(count)]
    state = loader.state
    loader.close()
    return batches, state


def test_skipped_documents_leave_the_batches_of_the_others(config, corpus, tmp_path):
    batches, _ = take(config, 30)
    first, state = take(config, 8)
    second, _ = take(config, 6, state)
    np.testing.assert_array_equal(first + second, batches[:14])
    lines = corpus.read_text().splitlines()
    for i in BAD:
        lines[i] = '{"text": ""}'
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n".join(lines) + "\n")
    expected, _ = take(replace(config, **{"data.path": str(empty)}), 30)
    np.testing.assert_array_equal(batches, expected)


def test_skipped_documents_are_named_once_and_counted(config, capfd):
    take(config, 60)  # several epochs
    said = capfd.readouterr().err
    for line in (4, 18, 31):
        assert said.count(f"late.jsonl:{line}: not a JSON object") == 1
    assert said.count("3 of 40 documents were skipped (data.on_bad_document=skip)") == 1


def test_documents_that_cannot_be_skipped_end_with_a_reason(config, corpus, tmp_path):
    file = tmp_path / "gone.txt"
    file.write_text("text")
    of_text = replace(config, **{"data.source": "text", "data.path": str(file)})
    documents = open_documents(of_text.data, "train")
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        documents[0]
    assert type(caught.value) is ConfigError  # it may be there again at the next start
    corpus.write_text("no\n" * 10)
    with pytest.raises(ConfigError, match="hold no tokens"):
        take(config, 1)


def check(*words):
    return main(["check", "configs/base.yml", *words])


def test_check_names_every_document_that_would_end_the_run(corpus, capsys, tmp_path):
    words = ("data.source=jsonl", f"data.path={corpus}")
    assert check(*words) == 1
    said = capsys.readouterr().out
    assert all(f"late.jsonl:{line}: not a JSON object" in said for line in (4, 18, 31))
    assert "3 cannot be read: the run would end" in said
    assert "\nheld out: 1 of 40 documents (few: raise data.eval_fraction), 2.8 % of the tok" in said
    assert check(*words, "data.on_bad_document=skip") == 0
    assert "data.on_bad_document=skip leaves them out" in capsys.readouterr().out
    corpus.write_text('{"text": "a"}\n' * 10 + '{"text": ""}\n')
    assert check(*words, "eval.every=0", "data.eval_fraction=0") == 0
    assert capsys.readouterr().out == (
        "train: 11 documents, 1 of them empty; 30 tokens\n  100 % of the documents are UTF-8\n"
    )


def test_check_counts_what_is_utf8_and_finds_ids_outside_the_vocabulary(tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"ab\xff" if number == 1 else b"ab")
    whole = ("data.eval_fraction=0", "eval.every=0")
    assert check("data.source=text", f"data.path={tmp_path}/*.txt", *whole) == 1
    counts = "train: 3 documents; 8 tokens\n  66.67 % of the documents are UTF-8\n"
    assert capsys.readouterr().out.startswith(counts)
    np.save(tmp_path / "ids.npy", np.array([1, 2, 257, 9999, 257, 3, 257], np.uint16))
    words = ["data.source=token_bin", f"data.path={tmp_path}/ids.npy", *whole]
    assert check(*words, "data.on_bad_document=skip") == 1
    assert "a document holds token ids 9999 to 9999" in capsys.readouterr().out


def test_check_counts_what_is_learned_of_conversations_unless_a_row_cuts_it_off(tmp_path, capsys):
    talks = [
        {"messages": [{"role": r, "content": t} for r, t in (("user", q), ("assistant", "a"))]}
        for q in ("q", "q" * 99)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    words = ["data.source=chat", f"data.path={tmp_path}/chats.jsonl", "data.eval_fraction=0"]
    words += ["data.chat_template=chatml", "eval.every=0"]
    text = "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    learned = len("a<|im_end|>\n")
    total = 2 * (len(text) + learned) + 100
    for packing, count in (("true", 2 * learned), ("false", learned)):
        assert check(*words, f"data.packing={packing}") == 0
        expected = f"2 documents; {total} tokens, {count} of them learned\n"
        assert expected in capsys.readouterr().out

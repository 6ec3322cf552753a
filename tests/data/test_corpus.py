"""Words of a command line name a corpus of one kind."""

import gzip
import json

import pytest

from maxpipe.config import ConfigError
from maxpipe.config.sections import DataConfig
from maxpipe.data.corpus import find_corpus, text_of
from maxpipe.data.documents import open_documents


def texts_of(documents):
    return [documents[i] for i in range(len(documents))]


@pytest.fixture
def folder(tmp_path):
    for name, text in (("b", "second\n"), ("a", "first\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def test_corpus_of_a_glob_a_directory_and_files_is_the_same(folder):
    (folder / "a, b").mkdir()
    (folder / "a, b" / "c, d.txt").write_text("")
    for words in ([f"{folder}/*.txt"], [str(folder)], [f"{folder}/b.txt", f"{folder}/a.txt"]):
        corpus = find_corpus(words)
        assert corpus.source == "text"
        assert texts_of(corpus.open()) == ["first\n", "second\n"]


def test_corpus_of_json_lines_is_told_by_their_endings(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "one"}) + "\n")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "two"}) + "\n")
    corpus = find_corpus([str(tmp_path)], cache_dir=str(tmp_path / "cache"))
    assert corpus.source == "jsonl"
    assert texts_of(corpus.open()) == ["one", "two"]


def test_corpus_of_one_text_is_read_in_the_pieces_of_a_run(tmp_path):
    for length in [128, 8192]:
        text = "".join(f"line {i}\n" for i in range(20_000))
        path = str(tmp_path / "long.txt")
        (tmp_path / "long.txt").write_text(text)
        pieces = texts_of(find_corpus([path], sequence_length=length).open())
        assert "".join(pieces) == text
        run = DataConfig(source="text", path=path, sequence_length=length)
        train, held_out = (texts_of(open_documents(run, split)) for split in ("train", "eval"))
        assert sorted(pieces) == sorted([*train, *held_out])


def test_token_ids_of_parquet_files_are_no_texts(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"tokens": [[1, 2], [3]]}), tmp_path / "a.parquet")
    documents = find_corpus([str(tmp_path)], cache_dir=str(tmp_path / "cache")).open()
    with pytest.raises(ConfigError, match=r"^FILES: document 1 holds token ids already; give te"):
        text_of(documents, 1)


def problem_of(*words):
    with pytest.raises(ConfigError) as caught:
        find_corpus([str(word) for word in words]).open()
    (problem,) = caught.value.problems
    return f"{problem.key}: {problem.message}"


def test_corpus_that_cannot_be_used_names_the_argument(folder):
    assert problem_of(folder / "*.md").startswith("FILES: no file at")
    (folder / "c.jsonl").write_text("{}\n")
    message = problem_of(folder)
    assert message.startswith("FILES: are of several kinds: jsonl such as")
    assert "text such as" in message
    (folder / "d.bin").write_bytes(b"ab")
    assert "holds token ids already" in problem_of(folder / "d.bin")
    (folder / "empty.txt").write_text("")
    assert "is empty" in problem_of(folder / "empty.txt")

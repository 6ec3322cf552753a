"""Words of a command line name a corpus of one kind."""

import pytest
from helpers.documents import all_of

from maxpipe.config import ConfigError
from maxpipe.data.corpus import find_corpus


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
        assert all_of(corpus.open()) == ["first\n", "second\n"]


def test_corpus_that_cannot_be_used_names_the_argument(folder):
    for name, content in (("c.jsonl", b"{}\n"), ("d/d.bin", b"ab"), ("e/empty.txt", b"")):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    for path, message in (
        ("*.md", "no file at"),
        ("?.*", "are of several kinds: jsonl such as .*text such as"),
        ("d/d.bin", ".*holds token ids already"),
        ("e/empty.txt", ".*is empty"),
    ):
        with pytest.raises(ConfigError, match=f"^FILES: {message}"):
            find_corpus([f"{folder}/{path}"]).open()

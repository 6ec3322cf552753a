"""One document per text file: the user's files, or Python's standard library."""

import gzip
import os
from pathlib import Path

import pytest

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig


def test_text_is_sorted_without_empty_files(tmp_path: Path) -> None:
    for name, text in {"b": "second", "a": "first é", "c": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    documents = implementation(SOURCES["text"])(DataConfig(source="text", path=str(tmp_path)))
    assert [documents[i] for i in range(len(documents))] == ["first é", "second"]


def test_text_has_no_mark_of_byte_order_and_packed_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone \xef\xbb\xbf")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"\xef\xbb\xbftwo\r\n"))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"\xff"))
    documents = implementation(SOURCES["text"])(
        DataConfig(source="text", path=str(tmp_path), cache_dir=str(tmp_path / ".cache"))
    )
    assert [documents[0], documents[1]] == ["one \ufeff", "two\n"]
    with pytest.raises(ConfigError, match=r"/c\.txt\.gz is not UTF-8 text: byte 0"):
        documents[2]


def test_text_only_empty_files_raises(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"data\.path: every file at .* is empty"):
        implementation(SOURCES["text"])(DataConfig(source="text", path=str(tmp_path)))


def test_python_stdlib_has_every_module_once() -> None:
    documents = implementation(SOURCES["python_stdlib"])(DataConfig())
    assert len(documents) > 300
    texts = [documents[i] for i in range(len(documents))]
    assert sum(map(len, texts)) > 4_000_000
    assert all(texts)
    assert "import pytest" not in "".join(texts)  # no tests, no packages
    with open(os.__file__, encoding="utf-8") as stream:
        assert texts.count(stream.read()) == 1

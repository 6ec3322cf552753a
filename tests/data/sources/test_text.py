"""Text: a document per file, per line of JSON, or per module of Python's standard library."""

import gzip
import json
import os
import pickle
from pathlib import Path

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents
from maxpipe.data.sources.text import JsonLines, jsonl, python_stdlib, text


def _all(documents: Documents) -> list[object]:
    return [documents[i] for i in range(len(documents))]


def _lines(path: Path) -> JsonLines:
    return jsonl(DataConfig(source="jsonl", path=str(path)))


def test_text_files_are_read_in_sorted_order_without_empty_ones(tmp_path: Path) -> None:
    contents = {
        "c.txt": b"",
        "b.txt.gz": gzip.compress(b"\xef\xbb\xbftwo\r\n"),
        "a.txt": b"\xef\xbb\xbfone \xc3\xa9 \xef\xbb\xbf",  # with a mark of byte order
        "d.txt.gz": gzip.compress(b"\xff"),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    cache = str(tmp_path / ".cache")
    documents = text(DataConfig(source="text", path=str(tmp_path), cache_dir=cache))
    assert [documents[0], documents[1]] == ["one é \ufeff", "two\n"]
    with pytest.raises(ConfigError, match=r"/d\.txt\.gz is not UTF-8 text: byte 0"):
        documents[2]
    with pytest.raises(ConfigError, match=r"data\.path: every file at .* is empty"):
        text(DataConfig(source="text", path=str(tmp_path / "c.txt")))


def test_python_stdlib_has_every_module_once() -> None:
    texts = _all(python_stdlib(DataConfig()))
    assert len(texts) > 300
    assert all(texts)
    whole = "".join(map(str, texts))
    assert len(whole) > 4_000_000
    assert "import pytest" not in whole  # no tests, no packages
    with open(os.__file__, encoding="utf-8") as stream:
        assert texts.count(stream.read()) == 1


TEXTS = ["plain", "two\nlines", "é 漢字", "", "x" * 100]


def test_jsonl_pickled_source_round_trips(tmp_path: Path) -> None:
    for last in [True, False]:
        for end in ["\n", "\r\n", "\n\n", "\r\n\r\n", "\n \t\n"]:
            for name, texts in (("a.jsonl", TEXTS), ("b.jsonl", TEXTS[::-1])):
                lines = [json.dumps({"id": 1, "text": line}, ensure_ascii=False) for line in texts]
                (tmp_path / name).write_bytes((end.join(lines) + (end if last else "")).encode())
            documents = pickle.loads(pickle.dumps(_lines(tmp_path)))
            assert _all(documents) == TEXTS + TEXTS[::-1]


def test_jsonl_corrupt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    others = [b"{", b"[1]", b'{"a": 1}', b'{"text": 3}', b'"text"']
    for line in [*others, b'{"text": "\\ud800"}', b'{"text": "\xff"}']:
        path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "also fine"}\n')
        documents = _lines(path)
        assert (documents[0], documents[2]) == ("fine", "also fine")
        with pytest.raises(
            ConfigError, match=rf"^data\.path: {path}:3: not a JSON object with a string under"
        ):
            documents[1]
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert len(_lines(path)) == 2  # it is indexed again


def test_jsonl_line_number_is_known_without_reading_what_precedes(tmp_path: Path) -> None:
    """The file may be larger than memory, and many of its lines may be bad."""
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, lines in zip(paths, (b"\n\r\n1\n2\n\n\n3", b"\n\n", b"4\r\n\r\n5\n"), strict=True):
        Path(path).write_bytes(lines)
    documents = JsonLines(paths, originals=paths)
    for path in paths:
        Path(path).unlink()
    numbers = [(0, 3), (0, 4), (0, 7), (2, 1), (2, 3)]
    places = [f"{paths[file]}:{number}" for file, number in numbers]
    assert [documents.place(i) for i in range(len(documents))] == places

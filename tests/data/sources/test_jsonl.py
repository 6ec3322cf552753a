"""JSON lines."""

import json
import pickle
from pathlib import Path

import pytest

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents
from maxpipe.data.sources.text import JsonLines

TEXTS = ["plain", "two\nlines", "é 漢字", "", "x" * 100]


def _open(path: Path) -> Documents:
    return implementation(SOURCES["jsonl"])(DataConfig(source="jsonl", path=str(path)))


def test_jsonl_pickled_source_round_trips(tmp_path: Path) -> None:
    for last in [True, False]:
        for end in ["\n", "\r\n", "\n\n", "\r\n\r\n", "\n \t\n"]:
            for name, texts in (("a.jsonl", TEXTS), ("b.jsonl", TEXTS[::-1])):
                lines = [json.dumps({"id": 1, "text": text}, ensure_ascii=False) for text in texts]
                (tmp_path / name).write_bytes((end.join(lines) + (end if last else "")).encode())
            documents = pickle.loads(pickle.dumps(_open(tmp_path)))
            assert [documents[i] for i in range(len(documents))] == TEXTS + TEXTS[::-1]


CORRUPT = [
    b"{",
    b"[1]",
    b'{"a": 1}',
    b'{"text": 3}',
    b'"text"',
    b'{"text": "\\ud800"}',
    b'{"text": "\xff"}',
]


def test_jsonl_corrupt_line_is_named(tmp_path: Path) -> None:
    for line in CORRUPT:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "also fine"}\n')
        documents = _open(path)
        assert (documents[0], documents[2]) == ("fine", "also fine")
        with pytest.raises(
            ConfigError, match=rf"^data\.path: {path}:3: not a JSON object with a string under"
        ):
            documents[1]


def test_jsonl_line_number_is_known_without_reading_what_precedes(tmp_path: Path) -> None:
    """The file may be larger than memory, and many of its lines may be bad."""
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    for path, text in zip(paths, (b"\n\r\n1\n2\n\n\n3", b"\n\n", b"4\r\n\r\n5\n"), strict=True):
        Path(path).write_bytes(text)
    lines = JsonLines(paths, originals=paths)
    for path in paths:
        Path(path).unlink()
    numbers = [(0, 3), (0, 4), (0, 7), (2, 1), (2, 3)]
    places = [f"{paths[file]}:{number}" for file, number in numbers]
    assert [lines.place(i) for i in range(len(lines))] == places


def test_jsonl_changed_file_is_indexed_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    assert len(_open(path)) == 1
    path.write_text('{"text": "a"}\n{"text": "b"}\n')
    assert len(_open(path)) == 2

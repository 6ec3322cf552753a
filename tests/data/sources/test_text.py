"""One document per text file."""

from pathlib import Path

import pytest

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig


def test_documents_in_sorted_order_without_empty_ones(tmp_path: Path) -> None:
    for name, text in {"b": "second", "a": "first é", "c": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    documents = implementation(SOURCES["text"])(DataConfig(source="text", path=str(tmp_path)))
    assert [documents[i] for i in range(len(documents))] == ["first é", "second"]


def test_only_empty_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(ConfigError, match=r"data\.path: every file at .* is empty"):
        implementation(SOURCES["text"])(DataConfig(source="text", path=str(tmp_path)))

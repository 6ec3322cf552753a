"""The default source."""

import os

from maxpipe.config.catalog import SOURCES
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig


def test_documents() -> None:
    documents = implementation(SOURCES["python_stdlib"])(DataConfig())
    assert len(documents) > 300
    texts = [documents[i] for i in range(len(documents))]
    assert sum(map(len, texts)) > 4_000_000
    assert all(texts)
    with open(os.__file__, encoding="utf-8") as stream:
        assert texts.count(stream.read()) == 1


def test_no_tests_and_no_packages() -> None:
    documents = implementation(SOURCES["python_stdlib"])(DataConfig())
    assert "import pytest" not in "".join(documents[i] for i in range(len(documents)))

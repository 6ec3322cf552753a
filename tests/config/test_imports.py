"""Errors of an optional library that is missing, or that is installed and broken."""

import sys

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.config.imports import optional


def message_of(library: str) -> str:
    with pytest.raises(ConfigError) as error, optional(library, "data", "data.source"):
        __import__(library)
    return str(error.value)


def test_optional_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "absent_library", None)
    expected = "data.source: needs absent_library, which is not installed: pip install -e '.[data]'"
    assert message_of("absent_library") == expected


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("import absent_dependency", "No module named 'absent_dependency'"),
        ("raise ImportError('libstdc++.so.6: no such version')", "libstdc++.so.6: no such version"),
    ],
)
def test_optional_broken_library_gives_the_reason(tmp_path, monkeypatch, content, cause):
    (tmp_path / "broken_library.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert f"needs broken_library, which cannot be imported ({cause})" in message_of(
        "broken_library"
    )

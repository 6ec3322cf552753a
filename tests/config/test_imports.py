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


def test_optional_broken_library_gives_the_reason(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken.py").write_text("import absent_dependency")
    cause = "No module named 'absent_dependency'"
    assert f"needs broken, which cannot be imported ({cause})" in message_of("broken")

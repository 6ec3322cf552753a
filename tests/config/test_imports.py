"""What is said of a library that is not there, and of one that is broken."""

import sys

import pytest

from maxpipe.config.errors import ConfigError
from maxpipe.config.imports import optional


def message_of(library: str) -> str:
    with pytest.raises(ConfigError) as found, optional(library, "data", "data.source"):
        __import__(library)
    return str(found.value)


def test_a_library_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "absent_library", None)
    expected = (
        "data.source: needs absent_library, which is not installed: pip install 'maxpipe[data]'"
    )
    assert message_of("absent_library") == expected


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("import absent_dependency", "No module named 'absent_dependency'"),
        ("raise ImportError('libstdc++.so.6: no such version')", "libstdc++.so.6: no such version"),
    ],
)
def test_an_installed_library_that_is_broken_says_why(tmp_path, monkeypatch, content, cause):
    (tmp_path / "broken_library.py").write_text(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert f"needs broken_library, which cannot be imported ({cause})" in message_of(
        "broken_library"
    )

"""Errors, also of an optional library that is missing, or that is installed and broken."""

import pickle
import sys

import pytest

from maxpipe.config import ConfigError, Problem
from maxpipe.config.errors import redacted
from maxpipe.config.imports import optional


def test_config_error_survives_pickling():
    error = ConfigError(Problem("seed", "must be 0", "a.yml:3"), Problem("", "no file"))
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is ConfigError
    assert copy.problems == error.problems
    assert str(copy) == "seed (a.yml:3): must be 0\nno file"


def test_problem_secret_in_a_url_is_not_shown():
    for url in (
        "s3://me:pass-word@bucket/x",
        "s3://me:pass/-word@bucket/x",
        "https://pass-word@host/x",
        "https://host/x?X-Amz-Signature=pass-word&y=1",
        "gs://bucket/x?api_key=pass-word",
    ):
        shown = str(ConfigError(Problem("data.path", f"{url} cannot be read: {url!r}")))
        assert ("word" in shown, "***" in shown) == (False, True), url
        assert shown.endswith(url[url.rindex("/x") :].replace("pass-word", "***") + "'"), url


def test_redacted_text_without_secrets_stays():
    texts = ["s3://bucket/a*.jsonl?", "a@b: c", "10:30 me@host", "x?key"]
    assert [redacted(text) for text in texts] == texts


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

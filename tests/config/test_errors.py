import pickle

from maxpipe.config import ConfigError, Problem
from maxpipe.config.errors import redacted


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

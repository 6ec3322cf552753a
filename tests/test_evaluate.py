"""The command `maxpipe.evaluate` as far as it needs no lm-eval."""

import pytest

from maxpipe.evaluate import main


def _error(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_evaluate_wrong_words_are_refused(tmp_path, capsys):
    for words, message in [
        (["runs/base"], "required: --tasks"),
        (["runs/base", "--tasks", "a", "--limit", "-1"], "--limit: must be at least 1; got -1"),
        (["runs/base", "--tasks", "a", "--batch-size", "0"], "--batch-size: must be at least 1"),
        (["runs/base", "--tasks", "a", "--include", "nowhere"], "there is no directory nowhere"),
        (["runs/base", "--tasks", "a", "--json", "no/f"], "--json: there is no directory no"),
    ]:
        assert message in _error(words, capsys)

import pytest

from maxpipe.checkpoint.errors import CheckpointUnreadable
from maxpipe.supervision.failure import failing_fast


def test_an_explained_error_ends_with_1_and_one_line(capsys):
    with pytest.raises(SystemExit) as end, failing_fast():
        raise CheckpointUnreadable("a newer version wrote it")
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: a newer version wrote it\n"

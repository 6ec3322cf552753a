"""Files stay small enough to be read at once."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("folder", "most"), [("maxpipe", 600), ("maxpipe/pipeline", 500)])
def test_no_file_is_long(folder, most):
    lines = {path: len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert len(lines) > 20
    assert {str(path): n for path, n in lines.items() if n > most} == {}

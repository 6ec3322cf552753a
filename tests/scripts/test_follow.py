"""The files that a key and a batch pass are those that docs/architecture.md lists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST = {"repeats": 18, "batch": 18}


@pytest.mark.parametrize("way", ["repeats", "batch"])
def test_follow_lists_the_files_of_the_architecture_page(way):
    listed = re.search(rf'```text title="{way}"\n(.*?)\n```', PAGE, flags=re.DOTALL)
    command = [sys.executable, "scripts/follow.py", way]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.split()) == sorted(listed.group(1).split())
    assert len(result.stdout.split()) <= MOST[way]

"""Pages of docs/ have the tables and the lists of files that scripts make."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MOST = 20


@pytest.mark.parametrize("way", ["repeats", pytest.param("batch", marks=pytest.mark.slow)])
def test_follow_lists_the_files_of_the_architecture_page(way):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "scripts/follow.py", way]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    listed = re.search(rf'```text title="{way}"\n(.*?)\n```', PAGE, flags=re.DOTALL)
    files = done.stdout.split()
    assert sorted(files) == sorted(listed.group(1).split())
    assert len(files) <= MOST
    if way == "repeats":
        summary = re.search(r"passes (\d+) files; functions run in (\d+)\s*$", done.stderr)
        passed, executed = map(int, summary.groups())
        most = int(re.search(r"the path has up to (\d+) files", PAGE)[1])
        assert passed == len(files)
        # The page's number is a bound, and close enough to tell the truth.
        assert most - 8 <= executed <= most


def test_generate_docs_check_passes_for_the_committed_pages():
    """Run the script by itself, since test helpers add entries to this process's catalogue."""
    command = [sys.executable, ROOT / "scripts" / "generate_docs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"run: python scripts/generate_docs.py\n{done.stdout}{done.stderr}"

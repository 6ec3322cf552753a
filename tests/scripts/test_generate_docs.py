"""Test that the generated tables are up to date."""

import subprocess
import sys

from helpers.scripts import SCRIPTS


def test_generate_docs_check_passes_for_the_committed_pages():
    """Run the script by itself, since test helpers add entries to this process's catalogue."""
    script = SCRIPTS / "generate_docs.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, f"run: python scripts/generate_docs.py\n{done.stdout}{done.stderr}"

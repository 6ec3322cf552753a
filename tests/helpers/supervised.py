"""Find the trainers that supervisors have started."""

import time
from pathlib import Path

SUPERVISED = """
import sys
from maxpipe.supervise.__main__ import main
train = [sys.executable, "-m", "maxpipe.train", *sys.argv[1:]]
sys.exit(main(["--pause", "0.1", "--", *train]))
"""  # a program for `members`


def trainer_of(supervisor: int) -> int:
    """Return the process number of a supervisor's trainer, once it runs."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == supervisor and fields[0] != "Z":
                return int(stat.parent.name)
        time.sleep(0.05)
    raise AssertionError(f"supervisor {supervisor} has no trainer")

"""Notes which lines of maxpipe a process executes; Python runs this file when it starts.

With `LINES_TO` (a folder) and `LINES_OF` (a test's name) in the environment the lines are written
to that folder when the process ends. Needs `sys.monitoring`, so Python 3.12.
"""

import atexit
import importlib.machinery
import json
import os
import sys
import uuid
from pathlib import Path
from types import CodeType

PACKAGE = str(Path(__file__).parents[2] / "maxpipe") + os.sep

executed: set[tuple[str, int]] = set()


def start() -> None:
    """Watch each line of maxpipe's modules until it has run once."""
    monitoring = sys.monitoring
    tool = monitoring.COVERAGE_ID
    monitoring.use_tool_id(tool, "lines")

    def line_runs(code: CodeType, line: int) -> object:
        executed.add((code.co_filename.removeprefix(PACKAGE), line))
        return monitoring.DISABLE

    monitoring.register_callback(tool, monitoring.events.LINE, line_runs)
    get_code = importlib.machinery.SourceFileLoader.get_code

    def watched(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        code = get_code(loader, name)
        if code is not None and code.co_filename.startswith(PACKAGE):
            parts = [code]
            while parts:
                part = parts.pop()
                monitoring.set_local_events(tool, part, monitoring.events.LINE)
                parts += [inner for inner in part.co_consts if isinstance(inner, CodeType)]
        return code

    importlib.machinery.SourceFileLoader.get_code = watched  # type: ignore[method-assign]


def write(test: str) -> None:
    """Write the lines executed since the last call, as those of a test."""
    path = Path(os.environ["LINES_TO"], f"{uuid.uuid4().hex}.json")
    path.write_text(json.dumps({"test": test, "lines": sorted(executed)}))
    executed.clear()


if "LINES_TO" in os.environ:
    start()
    if "LINES_OF" in os.environ:
        atexit.register(write, os.environ["LINES_OF"])

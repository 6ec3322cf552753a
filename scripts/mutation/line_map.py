"""A plugin of pytest that writes the seconds of each test and the lines of maxpipe it executes."""

import json
import os
import sys
import uuid
from pathlib import Path

import pytest
import sitecustomize


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    os.environ["LINES_OF"] = item.nodeid
    sitecustomize.executed.clear()
    sys.monitoring.restart_events()
    begun = sum(os.times()[:4])
    result = yield
    seconds = sum(os.times()[:4]) - begun
    sitecustomize.write(item.nodeid)
    path = Path(os.environ["LINES_TO"], f"{uuid.uuid4().hex}.seconds")
    path.write_text(json.dumps({"test": item.nodeid, "seconds": seconds}))
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        path = Path(os.environ["LINES_TO"], f"{uuid.uuid4().hex}.failed")
        path.write_text(json.dumps({"test": report.nodeid}))

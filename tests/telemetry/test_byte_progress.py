"""Bytes that have been read, on a terminal and in a log."""

import io
import itertools

import pytest

from maxpipe.telemetry.byte_progress import ByteProgress, format_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "file"])
def test_lines_come_every_few_seconds(monkeypatch, stream):
    # The start, then each call; a second reading follows each line.
    clock = iter([0, 3, 6, 6, 7, 12, 12])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = []
    with ByteProgress("init_from", 16_000_000_000, lines.append, stream) as progress:
        for gigabytes in (4, 8, 12, 16):
            progress.show(gigabytes * 10**9)
    assert lines == [
        "init_from   8.00 of 16.00 GB are read",
        "init_from   16.00 of 16.00 GB are read",
    ]


def test_terminal_gets_a_bar_in_bytes_and_no_lines():
    lines, stream = [], Terminal()
    with ByteProgress("init_from", 16_000_000_000, lines.append, stream) as progress:
        progress.show(4_000_000_000)
        progress.show(16_000_000_000)
    assert lines == []
    last = stream.getvalue()
    first = last.split("\r")[1]
    assert first.startswith("init_from   |")
    assert "| 0.00B of 16.0GB" in first
    assert "| 16.0GB of 16.0GB, " in last
    assert last.endswith("B/s\n")


def test_lines_of_a_small_model_are_in_smaller_units(monkeypatch):
    clock = iter([0, 6, 6])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = []
    with ByteProgress("init_from", 3_700_000, lines.append) as progress:
        progress.show(40_000)
    assert lines == ["init_from   0.04 of 3.70 MB are read"]


def test_amount_that_has_not_grown_gets_no_second_line(monkeypatch):
    clock = itertools.count(0, 6)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    lines = []
    with ByteProgress("init_from", 5_200_000, lines.append) as progress:
        for _ in range(3):
            progress.show(2_440_000)
    assert lines == ["init_from   2.44 of 5.20 MB are read"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0.00 kB"), (99_999, "100.00 kB"), (100_000, "0.10 MB"), (2.5e8, "0.25 GB")],
)
def test_format_bytes_takes_the_unit_of_the_amount(count, text):
    assert format_bytes(count) == text

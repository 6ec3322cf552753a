"""Bytes that have been read, on a terminal and in a log."""

import io

from maxpipe.telemetry.byte_progress import ByteProgress, format_bytes


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_every_few_seconds_in_fitting_units(monkeypatch):
    for total, shown, times, lines in [
        # The start, then each call; a second reading follows each line.
        (
            16e9,
            [4e9, 8e9, 12e9, 16e9],
            [0, 3, 6, 6, 7, 12, 12],
            ["8.00 of 16.00 GB", "16.00 of 16.00 GB"],
        ),
        (3.7e6, [4e4], [0, 6, 6], ["0.04 of 3.70 MB"]),
        # An amount that has not grown gets no second line.
        (5.2e6, [2.44e6] * 3, range(0, 60, 6), ["2.44 of 5.20 MB"]),
    ]:
        for stream in (None, io.StringIO()):
            clock, printed = iter(times), []
            monkeypatch.setattr("time.monotonic", lambda clock=clock: next(clock))
            with ByteProgress("init_from", int(total), printed.append, stream) as progress:
                for count in shown:
                    progress.show(int(count))
            assert printed == [f"init_from   {line} are read" for line in lines]


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


def test_format_bytes_takes_the_unit_of_the_amount():
    texts = {0: "0.00 kB", 99_999: "100.00 kB", 100_000: "0.10 MB", 2.5e8: "0.25 GB"}
    assert {count: format_bytes(count) for count in texts} == texts

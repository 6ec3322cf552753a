import contextlib
import io
import os
import pty
import re
import termios

from maxpipe.telemetry.console import (
    ByteProgress,
    Console,
    format_bytes,
    format_count,
    format_seconds,
    format_step_time,
)


def row(step, seconds):
    return {"step": step, "loss": 2.5, "learning_rate": 3e-4, "step_seconds": seconds}


def run(stream, steps, *, start_step=0, total_steps=100, peak_seconds=None):
    steps_of_run = {"total_steps": total_steps, "start_step": start_step, "log_every": 10}
    speed = {"tokens_per_step": 4096, "peak_seconds": peak_seconds}
    console = Console(**steps_of_run, **speed, stream=stream)
    for step in range(start_step + 1, start_step + steps + 1):
        console.step(row(step, 60.0 if step == start_step + 1 else 0.5))
    return console


def test_console_log_every_10_prints_first_tenth_and_last():
    for words, steps in [
        ({"steps": 25, "total_steps": 25}, [1, 10, 20, 25]),
        ({"steps": 13}, [1, 10, 13]),  # stopped early
        ({"steps": 8, "start_step": 33}, [34, 40, 41]),  # resumed
    ]:
        stream = io.StringIO()
        run(stream, **words).close()
        assert [*map(int, re.findall(r"^step +(\d+)/", stream.getvalue(), re.M))] == steps


def test_console_first_step_does_not_enter_median():
    stream = io.StringIO()
    run(stream, 10, peak_seconds=0.25).close()
    first, tenth = stream.getvalue().splitlines()
    assert first.endswith("lr 3.00e-04  60.00 s for the first step  left ?")
    assert tenth.startswith("step  10/100  loss 2.5000  lr 3.00e-04  500 ms/step  8.19k tokens/s")
    assert tenth.endswith("MFU 50.0 %  left 0:45")


def test_console_first_step_of_another_batch_size_does_not_enter_median():
    stream = io.StringIO()
    console = run(stream, 12, peak_seconds=0.25)
    console.new_batch(12, 8192, 0.5)
    for step in range(13, 21):
        console.step(row(step, 30.0 if step == 13 else 1.0))
    console.close()
    *_, first, twentieth = stream.getvalue().splitlines()
    assert first.startswith("step  13/100")
    assert first.endswith("30.00 s for the first step  left ?")
    assert twentieth.endswith("1.00 s/step  8.19k tokens/s  MFU 50.0 %  left 1:20")


def test_console_on_terminal_draws_no_bar_before_the_first_step():
    stream = io.StringIO()
    stream.isatty = lambda: True
    console = run(stream, 0)
    console.print_line("devices     4")
    assert stream.getvalue() == "devices     4\n"
    console.step(row(1, 60.0))
    console.print_line("eval loss 2.0")
    console.close()
    for text in ("step   1/100  loss 2.5000", "|", "eval loss 2.0\n"):
        assert text in stream.getvalue()
    assert "MFU" not in stream.getvalue()  # of an unknown peak


def test_console_on_a_narrow_terminal_breaks_no_word_and_leaves_details_out(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    reader, writer = pty.openpty()
    termios.tcsetwinsize(writer, (24, 80))
    with os.fdopen(writer, "w") as stream:
        console = run(stream, 5, peak_seconds=0.1)
        console.print_line(f"done: 5 steps in {'x' * 40}; `python -m maxpipe.runs plot x` draws it")
        console.close()
    text = ""
    with contextlib.suppress(OSError), os.fdopen(reader, newline="") as terminal:
        for line in terminal:  # to an error, when no writer is left
            text += line
    assert "\n            `python -m maxpipe.runs plot x` draws it\r\n" in text
    last = "step   5/100  loss 2.5000  500 ms/step  8.19k tokens/s  MFU 20.0 %  left 0:48"
    assert last in text


def test_console_goes_on_without_its_terminal(capsys):
    reader, writer = pty.openpty()
    stream = os.fdopen(writer, "w")
    console = run(stream, 2)
    os.close(reader)  # as when a session is logged out of
    for step in (3, 4):
        console.step(row(step, 0.5))
        console.print_line("eval loss 2.0")
    console.close()
    with contextlib.suppress(OSError):
        stream.close()
    warning = "warning: standard output cannot be written: Input/output error; the run continues"
    assert capsys.readouterr().err.splitlines() == [warning]


def test_bytes_that_are_read_are_printed_every_few_seconds(monkeypatch):
    # The start, then each call; a second reading follows each line.
    clock, printed = iter([0, 3, 6, 6, 7, 12, 12]), []
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress = ByteProgress("init_from", 16_000_000_000, printed.append)
    for count in (4, 8, 12, 16):
        progress.show(count * 10**9)
    assert printed == [
        "init_from   8.00 GB of 16.00 GB are read",
        "init_from   16.00 GB of 16.00 GB are read",
    ]


def test_formats_keep_three_digits_and_use_the_largest_units():
    tables = {
        format_seconds: {0.4: "0:00", 75: "1:15", 3661: "1:01:01", 90061: "1d 1:01:01"},
        format_step_time: {12.345: "12.35 s", 0.0642: "64 ms", 0.00123: "1.23 ms"},
        format_bytes: {0: "0.00 kB", 99_999: "100.00 kB", 100_000: "0.10 MB", 2.5e8: "0.25 GB"},
        format_count: {0: "0", 999: "999", 999.7: "1.00k", 61234: "61.2k", 2e13: "20.0T"},
    }
    for format_, texts in tables.items():
        assert {value: format_(value) for value in texts} == texts

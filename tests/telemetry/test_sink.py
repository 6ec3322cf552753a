"""A writer of telemetry that fails: what is said, what is tried again, and what is given up."""

import errno

import pytest

from maxpipe.telemetry.sink import Sink, TelemetryError


class Writer:
    """Notes what it is asked for; fails while `is_full`."""

    def __init__(self):
        self.is_full = False
        self.asked = []

    def write(self, text):
        self.asked.append(text)
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        self.write("close")


@pytest.fixture
def writer():
    return Writer()


@pytest.fixture
def lines():
    return []


def write(sink, *texts):
    for text in texts:
        sink.use(lambda writer, text=text: writer.write(text))


@pytest.mark.parametrize("tries_again", [False, True])
def test_sink_writes_and_closes_once_and_may_give_up_after_an_error(writer, lines, tries_again):
    sink = Sink(
        "the log",
        lambda: writer,
        is_required=False,
        print_line=lines.append,
        tries_again=tries_again,
    )
    write(sink, "a")
    writer.is_full = True
    write(sink, "b", "c")
    writer.is_full = False
    for _ in range(2):
        sink.close(Writer.close)
        write(sink, "late")
    assert writer.asked == (["a", "b", "c", "close"] if tries_again else ["a", "b"])
    reason = "the log cannot be written: No space left on device"
    warning = f"warning: {reason}; training continues; telemetry.required=true would end it"
    lack = "the log lacks what could not be written 2 times"
    assert lines == [warning, lack][: 1 + tries_again]


@pytest.mark.parametrize(
    ("failures", "tries_again", "pause", "asked", "said"),
    [
        (1, False, 0, [], None),  # given up at once
        (1, True, 0, ["a", "b", "c", "close"], None),
        (2, True, 0, ["b", "c", "close"], "once"),
        (3, True, 0, ["c", "close"], "2 times"),
        (1, True, 1000, [], "3 times"),  # does not open for every use
    ],
)
def test_sink_that_cannot_be_opened_is_opened_later_if_it_may(
    writer, lines, monkeypatch, failures, tries_again, pause, asked, said
):
    monkeypatch.setattr("maxpipe.telemetry.sink.REOPENING_SECONDS", pause)
    errors = [OSError(errno.ENOSPC, "No space left on device")] * failures

    def opening():
        if errors:
            raise errors.pop()
        return writer

    sink = Sink(
        "the log", opening, is_required=False, print_line=lines.append, tries_again=tries_again
    )
    write(sink, "a", "b", "c")
    sink.close(Writer.close)
    assert writer.asked == asked
    assert lines[0].startswith("warning: the log cannot be written: No space left on device; ")
    assert lines[1:] == ([f"the log lacks what could not be written {said}"] if said else [])


@pytest.mark.parametrize("fails_at", ["open", "write", "close"])
def test_required_sink_raises_whenever_it_fails(writer, lines, fails_at):
    def open_writer():
        writer.is_full = fails_at == "open"
        if writer.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return writer

    def run():
        sink = Sink("the log", open_writer, is_required=True, print_line=lines.append)
        writer.is_full = fails_at == "write"
        write(sink, "a")
        writer.is_full = fails_at == "close"
        sink.close(Writer.close)

    reason = r"^the log cannot be written: No space left on device \(telemetry.required\)$"
    with pytest.raises(TelemetryError, match=reason):
        run()
    assert lines == []

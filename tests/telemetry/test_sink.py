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


def sink_of(writer, lines, is_required=False, **options):
    return Sink(
        "the log", lambda: writer, is_required=is_required, print_line=lines.append, **options
    )


def write(sink, *texts):
    for text in texts:
        sink.use(lambda writer, text=text: writer.write(text))


def test_sink_writes_and_closes_once(writer, lines):
    for tries_again in (False, True):
        writer.asked.clear()
        sink = sink_of(writer, lines, tries_again=tries_again)
        write(sink, "a", "b")
        sink.close(Writer.close)
        sink.close(Writer.close)
        write(sink, "late")
        assert (writer.asked, lines) == (["a", "b", "close"], [])


def test_sink_gives_a_writer_up_after_its_first_error(writer, lines):
    sink = sink_of(writer, lines)
    writer.is_full = True
    write(sink, "a", "b")
    sink.close(Writer.close)
    assert writer.asked == ["a"]
    reason = "the log cannot be written: No space left on device"
    assert lines == [f"warning: {reason}; training continues; telemetry.required=true would end it"]


def test_sink_that_cannot_be_opened_is_said_and_training_continues(lines):
    for error in (OSError(errno.EACCES, "denied"), OSError("denied")):

        def fail(error=error):
            raise error

        sink = Sink("the log", fail, is_required=False, print_line=lines.append)
        write(sink, "a")
        sink.close(Writer.close)
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("warning: the log cannot be written: denied; training continues")


@pytest.fixture
def opening(writer):
    """Return a function that opens the writer, and fails while there are errors in its list."""

    def _opening():
        if _opening.errors:
            raise _opening.errors.pop()
        return writer

    _opening.errors = [OSError(errno.ENOSPC, "No space left on device")]
    return _opening


def opened(opening, lines):
    return Sink("the log", opening, is_required=False, print_line=lines.append, tries_again=True)


@pytest.mark.parametrize(("failures", "said"), [(1, None), (2, "once"), (3, "2 times")])
def test_sink_that_tries_again_is_opened_later_and_counts_uses(
    writer, lines, opening, monkeypatch, failures, said
):
    monkeypatch.setattr("maxpipe.telemetry.sink.REOPENING_SECONDS", 0)
    opening.errors *= failures
    sink = opened(opening, lines)
    write(sink, "a", "b", "c")
    sink.close(Writer.close)
    assert writer.asked == [*"abc"[failures - 1 :], "close"]
    assert lines[0].startswith("warning: the log cannot be written: No space left on device; ")
    assert lines[1:] == ([f"the log lacks what could not be written {said}"] if said else [])


def test_sink_that_tries_again_does_not_open_for_every_use(writer, lines, opening):
    sink = opened(opening, lines)
    write(sink, "a", "b")
    sink.close(Writer.close)
    assert writer.asked == []
    assert lines[1:] == ["the log lacks what could not be written 2 times"]


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

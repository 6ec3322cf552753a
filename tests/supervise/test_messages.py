"""Messages between supervisors and their council, as lines."""

import pytest

from maxpipe.devices.cluster import Sizes
from maxpipe.supervise.messages import (
    End,
    Ended,
    Joined,
    Save,
    Start,
    Stopping,
    decode,
    encode,
)


@pytest.mark.parametrize(
    "message",
    [
        Joined(2, "a"),
        Joined(2, "a", "a:1", 3, 1, Sizes((1, 2), 60.0, "{}")),
        Ended(1, -9),
        Stopping(15),
        Start(3, 7, "j", (0, 2), ("a:1", "b:2"), "word", "{}", 2),
        Save(3),
        End(3, 2.0),
    ],
)
def test_message_decoded_is_what_was_encoded(message):
    assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "Fly {}",
        "End {}",
        'Ended {"attempt": 1, "code": "x"}',
        'Ended {"attempt": 1, "code": 1, "more": 1}',
        'End {"attempt": 1, "seconds": NaN}',
        'End {"attempt": 1, "seconds": 1e999}',
        "Save 1",
        "Save " + "[" * 9999,
    ],
)
def test_decode_of_another_line_raises_value_error(line):
    with pytest.raises(ValueError):  # noqa: PT011
        decode(line)

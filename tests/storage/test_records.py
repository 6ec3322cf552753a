"""Records of JSON as typed values, and damaged ones."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from maxpipe.storage.records import parse_record, read_record


@dataclass(frozen=True)
class Inner:
    at: float = 0.0


@dataclass(frozen=True)
class Outer:
    name: str
    count: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict)
    waiting: Sequence[int] = ()
    inner: Inner | None = None


def test_record_read_has_the_types_of_its_fields(tmp_path):
    text = '{"name": "a", "count": 3, "hosts": {"2": "b"}, "waiting": [2], "inner": {"at": 0.5}}'
    (tmp_path / "record").write_text(text)
    assert read_record(tmp_path / "record", Outer) == Outer("a", 3, {2: "b"}, [2], Inner(0.5))
    assert parse_record('{"name": "a", "inner": null}', Outer) == Outer("a")


DAMAGED = [
    *("", "{", "[]", "{}", "null", "1", "[" * 200_000, b"\xff"),
    '{"name": 1}',
    '{"name": "a", "more": 1}',
    '{"name": "a", "count": true}',
    '{"name": "a", "count": 1.0}',
    f'{{"name": "a", "count": {"9" * 4300}}}',
    f'{{"name": "a", "count": -{2**53 + 1}}}',
    '{"name": "a", "hosts": {"b": "c"}}',
    '{"name": "a", "hosts": []}',
    '{"name": "a", "waiting": {}}',
    '{"name": "a", "waiting": "12"}',
    '{"name": "a", "inner": {"at": NaN}}',
    '{"name": "a", "inner": {"at": 1e999}}',
    '{"name": "a", "inner": []}',
]


def test_record_that_is_damaged_raises_value_error():
    for text in DAMAGED:
        with pytest.raises(ValueError):  # noqa: PT011
            pytest.fail(f"{text[:50]!r} is {parse_record(text, Outer)}")


def test_record_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "record")
    with pytest.raises(ValueError, match="is no file"):
        read_record(tmp_path / "record", Outer)


def test_parse_of_random_changes_returns_a_record_or_raises_value_error():
    import random

    draw = random.Random(46)
    good = '{"name": "a", "count": 3, "hosts": {"2": "b"}, "waiting": [2], "inner": {"at": 0.5}}'
    parts = ["{", "}", "[", "]", '"', ":", ",", "null", "9" * 30, "-", "e", "\\ud800", "\0", "true"]
    for _ in range(2000):
        at = draw.randrange(len(good))
        text = good[:at] + draw.choice(parts) + good[at + draw.randrange(4) :]
        try:
            record = parse_record(text, Outer)
        except ValueError:
            continue
        json.dumps([record.name, record.count, [*record.hosts.items()], [*record.waiting]])
        assert type(record.count) is int
        assert all(type(index) is int for index in (*record.hosts, *record.waiting))

"""Records of JSON as typed values, and damaged ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from maxpipe.storage.records import Damaged, parse_record, read_record


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
    pairs: tuple[list[int], ...] = ()


def test_record_read_has_the_types_of_its_fields(tmp_path):
    text = '{"name": "a", "count": 3, "hosts": {"2": "b"}, "waiting": [2], "inner": {"at": 0.5}}'
    (tmp_path / "record").write_text(text)
    assert read_record(tmp_path / "record", Outer) == Outer("a", 3, {2: "b"}, [2], Inner(0.5))
    assert parse_record('{"name": "a", "inner": null}', Outer) == Outer("a")
    assert parse_record('{"name": "a", "inner": {"at": 1}, "pairs": [[1]]}', Outer) == Outer(
        "a", inner=Inner(1.0), pairs=([1],)
    )
    assert parse_record('{"a": [null]}', dict[str, object]) == {"a": [None]}


DAMAGED = [
    *("", "{", "[]", "{}", "null", "1", "[" * 200_000, b"\xff"),
    *('{"name": 1}', '{"name": "a", "more": 1}', '{"name": "a", "count": true}'),
    *('{"name": "a", "count": 1.0}', f'{{"name": "a", "count": {"9" * 4301}}}'),
    *('{"name": "a", "hosts": {"b": "c"}}', '{"name": "a", "hosts": []}'),
    *('{"name": "a", "waiting": {}}', '{"name": "a", "waiting": "12"}'),
    *('{"name": "a", "inner": {"at": NaN}}', '{"name": "a", "inner": {"at": 1e999}}'),
    *('{"name": "a", "inner": []}', '{"name": "a", "pairs": [[1, "2"]]}'),
]


def test_record_that_is_no_record_is_damaged(tmp_path):
    for text in DAMAGED:
        with pytest.raises(Damaged):
            pytest.fail(f"{text[:50]!r} is {parse_record(text, Outer)}")
    for name in (".", "none", "x" * 1000):
        with pytest.raises(Damaged):
            read_record(tmp_path / name, Outer)

"""ArrayRecord files, written by its own writer, of examples encoded by hand."""

import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from helpers.documents import opened

from maxpipe.config.errors import ConfigError

TEXTS = ["plain", "é 漢字", "", "x" * 1000]


def delimited(number, content):
    length, size = b"", len(content)
    while size >= 0x80:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def example(**features):
    entries = b""
    for name, value in features.items():
        is_number = isinstance(value, int)
        feature = delimited(
            3 if is_number else 1, delimited(1, bytes([value]) if is_number else value)
        )
        entries += delimited(1, delimited(1, name.encode()) + delimited(2, feature))
    return delimited(1, entries)


def write(path, *records):
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def open_source(tmp_path, *records):
    if records:
        write(tmp_path / "a.array_record", *records)
    return opened("array_record", tmp_path)


def test_array_record_reads_records_in_any_order(tmp_path):
    records = [example(id=i, url=b"text", text=text.encode()) for i, text in enumerate(TEXTS)]
    documents = open_source(tmp_path, *records)
    assert len(documents) == 4
    assert [documents[i] for i in (3, 1, 0, 2)] == [TEXTS[i] for i in (3, 1, 0, 2)]


def test_array_record_other_record_is_named(tmp_path):
    others = [
        *(example(content=b"a"), b"plain text"),
        *(example(text=b"abc")[:-2], example(text=b"\xff")),
    ]
    write(tmp_path / "0.array_record", *[example(text=b"fine")] * 3)
    documents = open_source(tmp_path, example(text=b"fine"), *others)
    assert documents[3] == "fine"
    for i in range(1, 5):
        with pytest.raises(ConfigError, match=rf"a\.array_record: record {i} is no tf\.train\.Ex"):
            documents[3 + i]
    (tmp_path / "b.array_record").write_text("no records")
    with pytest.raises(ConfigError, match=r"b\.array_record cannot be read as ArrayRecord"):
        open_source(tmp_path)

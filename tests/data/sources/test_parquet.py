"""Parquet files, written by pyarrow."""

import sys

import numpy as np
import pytest
from helpers.documents import all_of, opened

from maxpipe.config.errors import ConfigError
from maxpipe.data.documents import BadDocument

pa = pytest.importorskip("pyarrow", reason="needs the extra `data`")
pq = pytest.importorskip("pyarrow.parquet")

TEXTS = ["plain", "two\nlines", "é 漢字", "", "x" * 1000, "last"]


def open_source(tmp_path):
    return opened("parquet", tmp_path, cache_dir=str(tmp_path / "cache"))


def test_parquet_reads_texts_of_all_files_and_row_groups(tmp_path):
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        for name, texts in (("a.parquet", TEXTS), ("b.parquet", [None, *TEXTS[::-1]])):
            table = pa.table({"id": range(len(texts)), "text": pa.array(texts, kind)})
            pq.write_table(table, tmp_path / name, row_group_size=4, compression="zstd")
        documents = open_source(tmp_path)
        assert all_of(documents) == [*TEXTS, "", *TEXTS[::-1]], kind


def test_parquet_reads_token_ids_and_names_a_row_with_a_null_among_them(tmp_path):
    for kind in [pa.list_(pa.uint16()), pa.large_list(pa.int64())]:
        rows = [[1, 2, 3], [], [7] * 100, [3, None]]
        pq.write_table(pa.table({"tokens": pa.array(rows, kind)}), tmp_path / "a.parquet")
        documents = open_source(tmp_path)
        for i, row in enumerate(rows[:3]):
            np.testing.assert_array_equal(documents[i], row)
        with pytest.raises(
            BadDocument, match=r"^data\.path: .*a\.parquet: row 3: a null among the token ids"
        ):
            documents[3]


def test_parquet_text_that_is_not_utf8_is_a_bad_document_with_file_and_row(tmp_path):
    stored = pa.array([b"\xff\xfe bad", b"x"], pa.binary()).buffers()
    texts = pa.Array.from_buffers(pa.string(), 2, stored)
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": texts}), tmp_path / "b.parquet")
    documents = open_source(tmp_path)
    with pytest.raises(BadDocument, match=rf"^data\.path: {tmp_path}/b\.parquet: row 0 is not UTF"):
        documents[1]
    assert (documents[0], documents[2]) == ("a", "x")


def test_parquet_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"

    def refused(message):
        with pytest.raises(ConfigError, match=rf"^data\.path: \S*a\.parquet{message}"):
            open_source(tmp_path)

    path.write_text("no parquet")
    refused(" cannot be read as parquet")
    for content, message in [
        ({"content": ["a"], "id": [1]}, ' has the columns content, id; it needs "text" or "token'),
        ({"text": [1.5]}, r": column 'text' holds double, not text or lists of token ids"),
    ]:
        pq.write_table(pa.table(content), path)
        refused(message)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        ConfigError, match=r"data\.source: needs pyarrow.*pip install -e '.\[data\]'"
    ):
        open_source(tmp_path)

"""Files of token ids, and random ids."""

import pickle

import numpy as np
import pytest
from helpers.documents import all_of, opened

from maxpipe.config.errors import ConfigError

EOS = 257
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]


def _flat(documents):
    return np.array([token for ids in documents for token in [*ids, EOS]], np.uint16)


def test_token_files_round_trip_with_and_without_an_index(tmp_path):
    _flat(DOCUMENTS).tofile(tmp_path / "a.bin")
    # Two ends in a row make no document; tokens after the last end are one.
    np.append(_flat([*DOCUMENTS, []]), np.uint16(11)).tofile(tmp_path / "b.bin")
    np.save(tmp_path / "c.npy", _flat(DOCUMENTS).astype(np.int64))
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "d.bin")
    np.save(tmp_path / "d.idx.npy", np.array([0, 4, 5]))
    read = [ids.tolist() for ids in all_of(opened("token_bin", tmp_path))]
    indexed = [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9]]
    assert read == [*DOCUMENTS, *DOCUMENTS, [11], *DOCUMENTS, *indexed]
    _flat([list(range(250))] * 1000).tofile(tmp_path / "e.bin")
    assert len(pickle.dumps(opened("token_bin", tmp_path))) < 100_000  # without the tokens


def test_token_files_that_cannot_be_read_are_refused(tmp_path):
    def refused(message):
        with pytest.raises(ConfigError, match=rf"^data\.path: \S*{message}"):
            opened("token_bin", tmp_path)

    (tmp_path / "a.bin").write_bytes(b"123")
    refused(r"a\.bin has 3 bytes, not a multiple of the 2")
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    refused(r"a\.bin holds no end-of-document token 257 .* no a\.idx\.npy")
    for starts in [[0, 4, 4], [0, 10]]:
        np.save(tmp_path / "a.idx.npy", np.array(starts))
        refused(r"a\.idx\.npy does not ascend")
    (tmp_path / "a.idx.npy").unlink()
    (tmp_path / "a.bin").unlink()
    for array in [np.ones((2, 2), np.int32), np.array([{"a": 1}], object)]:
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        refused(r"a\.npy is ")


def test_synthetic_documents_are_in_range_and_stay_what_they_were():
    short = opened("synthetic", sequence_length=2)
    expected = [[164, 131, 69, 79], [132, 194], [67, 28, 77, 106]]
    assert [np.asarray(short[i]).tolist() for i in range(3)] == expected
    for values, num_ids in (({}, 259), ({"tokenizer": "ids:32"}, 32)):
        documents = opened("synthetic", sequence_length=64, **values)
        drawn = [np.asarray(documents[i]) for i in range(300)]
        lengths = [len(ids) for ids in drawn]
        assert min(lengths) >= 1
        assert 100 <= max(lengths) <= 128
        end = {257 if num_ids == 259 else 31}
        assert {*np.concatenate(drawn).tolist()} == {*range(num_ids)} - end

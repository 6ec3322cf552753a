"""Files of token ids, and random ids."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError
from maxpipe.config.imports import implementation
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import Documents

EOS = 257
DOCUMENTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]


def _open(path: Path) -> Documents:
    return implementation(SOURCES["token_bin"])(DataConfig(source="token_bin", path=str(path)))


def _read(documents: Documents) -> list[list[int]]:
    return [np.asarray(documents[i]).tolist() for i in range(len(documents))]


def _flat(documents: list[list[int]]) -> np.ndarray:
    return np.array([token for ids in documents for token in [*ids, EOS]], np.uint16)


def test_token_bin_bin_files_round_trip(tmp_path: Path) -> None:
    _flat(DOCUMENTS).tofile(tmp_path / "a.bin")
    # Two ends in a row make no document; tokens after the last end are one.
    np.append(_flat([*DOCUMENTS, []]), np.uint16(11)).tofile(tmp_path / "b.bin")
    documents = pickle.loads(pickle.dumps(_open(tmp_path)))
    assert _read(documents) == [*DOCUMENTS, *DOCUMENTS, [11]]


def test_token_bin_npy_files_and_indices_round_trip(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", _flat(DOCUMENTS).astype(np.int64))
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "b.bin")
    np.save(tmp_path / "b.idx.npy", np.array([0, 4, 5]))
    assert _read(_open(tmp_path)) == [*DOCUMENTS, [0, 1, 2, 3], [4], [5, 6, 7, 8, 9]]
    _flat([list(range(250))] * 1000).tofile(tmp_path / "c.bin")
    assert len(pickle.dumps(_open(tmp_path))) < 100_000  # without the tokens


def test_token_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ConfigError, match=rf"^data\.path: \S*{message}"):
            _open(tmp_path)

    (tmp_path / "a.bin").write_bytes(b"123")
    refused(r"a\.bin has 3 bytes, not a multiple of the 2")
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    refused(r"a\.bin holds no end-of-document token 257 .* no a\.idx\.npy")
    for starts in [[1, 4], [0, 4, 4], [0, 10]]:
        np.save(tmp_path / "a.idx.npy", np.array(starts))
        refused(r"a\.idx\.npy does not ascend")
    for array in [np.ones(3), np.ones((2, 2), np.int32), np.array([{"a": 1}], object)]:
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        (tmp_path / "a.idx.npy").unlink(missing_ok=True)
        (tmp_path / "a.bin").unlink(missing_ok=True)
        refused(r"a\.npy is ")


def test_synthetic_documents_are_reproducible_and_in_range() -> None:
    documents = implementation(SOURCES["synthetic"])(
        DataConfig(source="synthetic", sequence_length=64)
    )
    drawn = [documents[i] for i in range(300)]
    np.testing.assert_array_equal(drawn[7], documents[7])
    lengths = [len(ids) for ids in drawn]
    assert (min(lengths), max(lengths)) >= (1, 100)
    assert max(lengths) <= 128
    ids = np.concatenate(drawn)
    assert set(ids.tolist()) == set(range(259)) - {257}
    small = implementation(SOURCES["synthetic"])(
        DataConfig(source="synthetic", sequence_length=64, tokenizer="ids:32")
    )
    assert {token for i in range(30) for token in small[i].tolist()} == {*range(31)}


def test_synthetic_documents_of_a_tokenizer_stay_what_they_were() -> None:
    documents = implementation(SOURCES["synthetic"])(
        DataConfig(source="synthetic", sequence_length=2)
    )
    assert [documents[i].tolist() for i in range(3)] == [
        [164, 131, 69, 79],
        [132, 194],
        [67, 28, 77, 106],
    ]

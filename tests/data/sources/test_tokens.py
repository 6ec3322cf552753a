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


def test_token_bin_npy_files_round_trip(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", _flat(DOCUMENTS).astype(np.int64))
    assert _read(_open(tmp_path)) == DOCUMENTS


def test_token_bin_index_gives_document_starts(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.idx.npy", np.array([0, 4, 5]))
    assert _read(_open(tmp_path)) == [[0, 1, 2, 3], [4], [5, 6, 7, 8, 9]]


def test_token_bin_pickle_does_not_contain_tokens(tmp_path: Path) -> None:
    _flat([list(range(250))] * 1000).tofile(tmp_path / "a.bin")
    assert len(pickle.dumps(_open(tmp_path))) < 100_000


def test_token_bin_invalid_index_raises(tmp_path: Path) -> None:
    for starts in [[1, 4], [0, 4, 4], [0, 10]]:
        np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
        np.save(tmp_path / "a.idx.npy", np.array(starts))
        with pytest.raises(ConfigError, match=r"data\.path: \S*a\.idx\.npy does not ascend"):
            _open(tmp_path)


def test_token_bin_half_a_token_raises(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(
        ConfigError, match=r"data\.path: \S*a\.bin has 3 bytes, not a multiple of the 2"
    ):
        _open(tmp_path)


def test_token_bin_without_document_end_raises(tmp_path: Path) -> None:
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match=r"no end-of-document token 257 .* no a\.idx\.npy"):
        _open(tmp_path)


def test_token_bin_npy_of_other_shape_or_dtype_raises(tmp_path: Path) -> None:
    for array in [np.ones(3), np.ones((2, 2), np.int32), np.array([{"a": 1}], object)]:
        np.save(tmp_path / "a.npy", array, allow_pickle=True)
        with pytest.raises(ConfigError, match=r"data\.path: \S*a\.npy is "):
            _open(tmp_path)


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

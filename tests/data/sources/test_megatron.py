"""Files of Megatron-LM, and mixtures of them by tokens."""

import pickle
from itertools import chain

import numpy as np
import pytest
from helpers.documents import all_of, opened
from helpers.megatron import write_indexed

from maxpipe.config import Config, ConfigError, replace
from maxpipe.data.loader import make_loader

EOS = 257
DOCUMENTS = [[[1, 2, 3]], [[4], [5, 6]], [], [[7, 8, 9, 10]]]  # the second of two sentences
FLAT = [[*chain(*document)] for document in DOCUMENTS]


def read(path):
    return [ids.tolist() for ids in all_of(opened("megatron", path))]


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "i8", "u2"])
def test_documents_are_those_of_the_index(dtype, tmp_path):
    write_indexed(tmp_path / "a", DOCUMENTS, dtype)
    with open(tmp_path / "a.idx", "ab") as file:
        file.write(bytes(5))  # modes
    assert read(tmp_path / "a") == FLAT
    assert opened("megatron", tmp_path / "a").lengths().tolist() == [3, 3, 0, 4]


def test_files_are_named_by_prefix_ending_directory_or_glob_and_mapped(tmp_path):
    write_indexed(tmp_path / "a_text_document", DOCUMENTS)
    write_indexed(tmp_path / "b.v2_text_document", [[[11]]] * 2_000)
    a, b = tmp_path / "a_text_document", tmp_path / "b.v2_text_document"
    both = [*FLAT, *[[11]] * 2_000]
    for path in (a, f"{a}.bin", f"{a}.idx"):
        assert read(path) == FLAT
    for path in (tmp_path, f"{tmp_path}/*", f"{tmp_path}/*_document", f"{b}, {a}.idx"):
        assert read(path) == both
    documents = opened("megatron", tmp_path)
    assert len(pickle.dumps(documents)) < 1000
    assert documents.lengths().tolist() == [len(ids) for ids in both]


def test_files_that_cannot_be_read_are_refused(tmp_path):
    def refused(message, path):
        with pytest.raises(ConfigError, match=rf"^data\.path: {message}"):
            opened("megatron", path)

    def written(name, index, cut=0):
        (tmp_path / f"{name}.bin").write_bytes(tokens[: len(tokens) - cut])
        (tmp_path / f"{name}.idx").write_bytes(index)
        return tmp_path / name

    write_indexed(tmp_path / "a", DOCUMENTS)
    tokens, index = ((tmp_path / f"a.{ending}").read_bytes() for ending in ("bin", "idx"))
    damaged = [index[:20], index[:-1], b"X" + index[1:], index[:9] + b"\2" + index[10:]]
    damaged.append(index[:17] + b"\7" + index[18:])  # floats
    for number, content in enumerate(damaged):
        message = rf"\S+{number}\.idx is not Megatron-LM's index of token ids, or is cut short"
        refused(message, written(f"{number}", content))
    refused(r"\S+b\.bin is cut short: \S+b\.idx speaks of 20 bytes", written("b", index, cut=2))
    (tmp_path / "b.idx").unlink()
    refused(r"there is no \S+b\.idx", tmp_path / "b")
    refused("no file at", tmp_path / "c")
    refused("token files must be on this machine", "s3://bucket/a")
    entries = (
        r"\[{source: megatron, path: a, weight: 0\.3}, {source: megatron, path: b, weight: 7}\]"
    )
    refused(f'a blend is data.mixture_by=tokens data.mixture="{entries}"', "0.3 a 7 b")


def test_ends_of_documents_may_be_there_already(tmp_path):
    write_indexed(tmp_path / "plain", DOCUMENTS)
    write_indexed(tmp_path / "ended", [[*d[:-1], [*d[-1], EOS]] if d else [] for d in DOCUMENTS])
    rows = []
    for name in ("plain", "ended"):
        data = {"source": "megatron", "path": str(tmp_path / name), "eval_fraction": 0.0}
        config = replace(Config(), **{f"data.{key}": value for key, value in data.items()})
        loader = make_loader(config, "train", range(4))
        rows.append(next(loader))
        loader.close()
    np.testing.assert_equal(*rows)


@pytest.fixture
def mixed(tmp_path):
    """Return a configuration that mixes long, short and very short documents of ids by tens."""
    random, mixture = np.random.default_rng(0), []
    for number, (mean, count, weight) in enumerate([(800, 60, 6), (30, 500, 3), (2, 3000, 1)]):
        path = tmp_path / f"source{number}"
        lengths = random.integers(mean // 2, mean * 3 // 2, count, endpoint=True)
        documents = [[10 * number + i % 10 for i in range(length)] for length in lengths]
        if number == 1:
            tokens = [token for ids in documents for token in [*ids, EOS]]
            np.array(tokens, np.uint16).tofile(f"{path}.bin")
        else:
            write_indexed(path, [[ids] for ids in documents])
        source = "token_bin" if number == 1 else "megatron"
        mixture.append({"source": source, "path": f"{path}.bin", "weight": weight})
    data = {"mixture": mixture, "mixture_by": "tokens", "global_batch_size": 8}
    return replace(Config(), **{f"data.{key}": value for key, value in data.items()})


@pytest.mark.parametrize(("packing", "length"), [(True, 256), (False, 64)])
def test_shares_of_tokens_are_those_asked_for(mixed, packing, length):
    """The begin and the end of a document count, which is much where documents have two tokens."""
    keys = {"data.packing": packing, "data.sequence_length": length}
    loader = make_loader(replace(mixed, **keys), "train", range(8))
    counts = np.zeros(3)
    for _ in range(500):
        batch = next(loader)
        ids = np.where(batch["targets"] < 256, batch["targets"], batch["tokens"])
        counts += np.bincount(ids[batch["weights"] > 0] // 10, minlength=3)
    loader.close()
    np.testing.assert_allclose(counts / counts.sum(), [0.6, 0.3, 0.1], rtol=0.01)


def test_mixture_by_tokens_resumes_from_every_state(mixed):
    def take(count, state=None):
        loader = make_loader(mixed, "train", range(8), state)
        batches = [(next(loader), loader.state) for _ in range(count)]
        loader.close()
        return batches

    everything = take(12)
    for at in (0, 3, 10):
        (resumed,) = take(1, everything[at][1])
        np.testing.assert_equal(resumed, everything[at + 1])


def test_source_too_rare_to_be_drawn_is_refused(mixed):
    mixture = [*mixed.data.mixture[:2], {**mixed.data.mixture[2], "weight": 1e-9}]
    with pytest.raises(ConfigError, match=r"^data\.mixture: entry 3 is less than 1 of 4,096,000"):
        make_loader(replace(mixed, **{"data.mixture": mixture}), "train", range(8))

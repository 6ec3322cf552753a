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
    assert read(tmp_path / "a") == FLAT


def test_files_are_named_by_prefix_ending_directory_or_glob_and_mapped(tmp_path):
    a, b = f"{tmp_path}/a_document", f"{tmp_path}/b.v2_document"
    write_indexed(a, DOCUMENTS)
    write_indexed(b, [[[11]]] * 2_000)
    both = [*FLAT, *[[11]] * 2_000]
    assert all(read(path) == FLAT for path in (a, f"{a}.bin", f"{a}.idx"))
    of_both = (tmp_path, f"{tmp_path}/*", f"{tmp_path}/*_document", f"{b}, {a}.idx")
    assert all(read(path) == both for path in of_both)
    assert len(pickle.dumps(opened("megatron", tmp_path))) < 1000
    assert opened("megatron", tmp_path).lengths().tolist() == [len(ids) for ids in both]


def test_directory_may_hold_links_to_itself_a_prefix_of_its_name_and_shards_without_tokens(
    tmp_path, capsys
):
    web = tmp_path / "web"
    web.mkdir()
    write_indexed(web / "a", DOCUMENTS)
    write_indexed(web / "b", [])
    write_indexed(web / "c", [[], []])
    for name in ("again", "and_again"):
        (web / name).symlink_to(web)
    assert read(web) == [*FLAT, [], []]
    assert capsys.readouterr().err == ""  # indices are not files left out
    write_indexed(tmp_path / "web", [[[11]]])
    assert read(web) == [[11]]
    assert read(f"{web}/") == [*FLAT, [], []]


def test_files_that_cannot_be_read_are_refused(tmp_path):
    def refused(message, path):
        with pytest.raises(ConfigError, match=rf"^data\.path: {message}"):
            opened("megatron", path)

    write_indexed(tmp_path / "a", DOCUMENTS)
    tokens, index = ((tmp_path / f"a.{ending}").read_bytes() for ending in ("bin", "idx"))
    damaged = [index[:20], index[:-1], b"X" + index[1:], index[:9] + b"\2" + index[10:]]
    damaged += [index[:26] + b"\0" + index[27:], index[:-8] + b"\5" + index[-7:]]  # documents
    damaged += [index[:17] + b"\7" + index[18:], index]  # floats; only tokens are missing
    for number, content in enumerate(damaged):
        (tmp_path / f"{number}.bin").write_bytes(tokens[:-2])
        (tmp_path / f"{number}.idx").write_bytes(content)
        wrong = r"\.idx is not Megatron-LM's index of token ids, or is cut short"
        short = r"\.bin is cut short: \S+\.idx speaks of 20 bytes"
        refused(rf"\S+{number}{short if content is index else wrong}", tmp_path / f"{number}")
    (tmp_path / "a.idx").write_bytes(b"")
    refused(r"\S+a\.idx is empty", tmp_path / "a")
    (tmp_path / "a.idx").unlink()
    refused(r"there is no \S+a\.idx", tmp_path / "a")
    refused("token files must be on this machine", "s3://bucket/a")
    blend = r'data.mixture_by=tokens data.mixture="\[{source: megatron, path: a, weight: 0\.3}, {'
    refused(f"give a blend as {blend}", "0.3 a 7 b")
    refused("no file at '2024 web/a.bin'", "2024 web/a")
    write_indexed(tmp_path / "a", [[[1, -2]]], "i4")
    keys = {"source": "megatron", "path": f"{tmp_path}/a", "eval_fraction": 0.0}
    loader = make_loader(
        replace(Config(), **{f"data.{k}": v for k, v in keys.items()}), "train", [0]
    )
    with pytest.raises(ConfigError, match=r"^data\.path: a document holds the token id -2"):
        next(loader)
    loader.close()


@pytest.fixture
def mixed(tmp_path):
    """Return a configuration that mixes long, short and very short documents of ids by tens."""
    random, mixture = np.random.default_rng(0), []
    for number, (mean, count, weight) in enumerate([(800, 60, 6), (30, 500, 3), (2, 3000, 1)]):
        path = tmp_path / f"{number}.bin"
        lengths = random.integers(mean // 2, mean * 3 // 2, count, endpoint=True)
        documents = [[10 * number + i % 10 for i in range(length)] for length in lengths]
        ended = [[*ids, EOS] for ids in documents]
        if number == 1:
            np.array([*chain(*ended)], np.uint16).tofile(path)
        else:
            write_indexed(path.with_suffix(""), [[ids] for ids in (ended if number else documents)])
        source = "token_bin" if number == 1 else "megatron"
        mixture.append({"source": source, "path": str(path), "weight": weight})
    return replace(Config(), **{"data.mixture": mixture, "data.mixture_by": "tokens"})


@pytest.mark.parametrize(("packing", "length"), [(True, 256), (False, 64)])
def test_shares_of_tokens_are_those_asked_for(mixed, packing, length):
    keys = {"data.packing": packing, "data.sequence_length": length, "data.global_batch_size": 8}
    loader = make_loader(replace(mixed, **keys), "train", range(8))
    counts = np.zeros(3)
    for batch, _ in zip(loader, range(500), strict=False):
        ids = np.where(batch["targets"] < 256, batch["targets"], batch["tokens"])
        counts += np.bincount(ids[batch["weights"] > 0] // 10, minlength=3)
    loader.close()
    np.testing.assert_allclose(counts / counts.sum(), [0.6, 0.3, 0.1], rtol=0.01)


def test_source_too_rare_to_be_drawn_or_without_tokens_is_refused(mixed):
    mixed.data.mixture[2]["weight"] = 1e-9
    with pytest.raises(ConfigError, match=r"^data\.mixture: entry 3 is less than 1 of 4,096,000"):
        make_loader(mixed, "train", range(32))
    write_indexed(mixed.data.mixture[0]["path"].removesuffix(".bin"), [[], []])
    with pytest.raises(ConfigError, match=r"^data\.mixture: entry 1 has no tokens"):
        make_loader(mixed, "train", range(32))

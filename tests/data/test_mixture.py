"""Mixtures of sources: shares, epochs of each source, and exact resume."""

from functools import cache

import numpy as np
import pytest

from maxpipe.config import ConfigError, load, replace
from maxpipe.data.documents import describe_sources
from maxpipe.data.loader import make_loader
from maxpipe.data.rows import CYCLE, ROUND, DocumentOrder, MixedOrder, shares

SIZES = [30, 400, 7]
WEIGHTS = [1.0, 2.5, 0.5]


@cache
def draws(seed, shuffle, start=0, stop=2 * ROUND):
    orders = [DocumentOrder(size, seed, shuffle) for size in SIZES]
    order = MixedOrder(orders, shares(WEIGHTS), seed)
    found = [order(*divmod(g, order.num_documents)) for g in range(start, stop)]
    sources = np.searchsorted(np.cumsum(SIZES), found, side="right")
    return sources, np.asarray(found) - np.array([0, *np.cumsum(SIZES)])[sources]


@pytest.mark.parametrize("shuffle", [True, False])
def test_mixed_order_sources_have_shares_and_epochs(shuffle):
    sources, documents = draws(0, shuffle)
    assert np.bincount(sources[:ROUND]).tolist() == [250, 625, 125]
    assert np.bincount(sources).tolist() == [500, 1250, 250]
    for source, size in enumerate(SIZES):
        counts = np.bincount(documents[sources == source], minlength=size)
        assert counts.min() > 0
        assert counts.max() - counts.min() <= 1
    for part in np.split(sources[:ROUND], 4):
        shares_of_part = np.bincount(part, minlength=3) / len(part)
        np.testing.assert_allclose(shares_of_part, [0.25, 0.625, 0.125], atol=0.08)
    for row in range(10):  # it takes draws r, r + B, ...
        assert (np.bincount(sources[:ROUND][row::10], minlength=3) > [10, 40, 3]).all()


def test_mixed_order_depends_on_seed_and_round():
    starts = [(0, 0), (1, 0), (0, 1)]  # seed and round
    found = [draws(seed, True, n * ROUND, n * ROUND + 50)[0].tolist() for seed, n in starts]
    assert found[0] not in found[1:]


def test_mixed_order_keeps_to_draws_that_are_not_whole_and_repeats_no_document():
    draws, size = np.array([0.05, 0.55, 7.3, ROUND - 7.9]), 1 << 30
    order = MixedOrder([DocumentOrder(size, 0, shuffle=False)] * 4, draws, seed=0)
    for first in (0, CYCLE - 20):  # of 40 rounds, the latter across the end of a cycle
        found = [order(0, g) for g in range(first * ROUND, (first + 40) * ROUND)]
        sources, documents = np.divmod(found, size)
        for source in range(4):
            ours = documents[sources == source]
            assert abs(ours.min() - first * draws[source]) < 3
            assert sorted(ours) == [*range(ours.min(), ours.min() + len(ours))]
        drawn = np.cumsum([np.bincount(s, minlength=4) for s in np.split(sources, 40)], axis=0)
        assert np.abs(drawn - np.arange(1, 41)[:, None] * draws).max() < 3


def test_shares_sum_to_round_and_are_at_least_1():
    for weights in [[1], [1, 1, 1], [1e-9, 1], [1e9, 1, 1], [0.3, 0.3, 0.4], [5] * 900]:
        found = shares(weights)
        assert sum(found) == ROUND
        assert min(found) >= 1
        exact = np.asarray(weights) / sum(weights) * ROUND
        assert np.abs(found - exact)[exact > 2].max(initial=0) <= len(weights)


@pytest.fixture
def config(tmp_path):
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text("ABCDEFGHIJ"[i] * (i + 3))
    lines = "".join(f'{{"text": "{str(i % 10) * (i % 5 + 2)}"}}\n' for i in range(40))
    (tmp_path / "digits.jsonl").write_text(lines)
    file = tmp_path / "mixture.yml"
    file.write_text(
        "data:\n  global_batch_size: 4\n  sequence_length: 16\n  eval_fraction: 0.2\n  mixture:\n"
        f"  - {{source: text, path: '{tmp_path}/*.txt', weight: 1}}\n"
        f"  - {{source: jsonl, path: {tmp_path}/digits.jsonl, weight: 3e0}}\n"
    )
    return load(str(file)).config


def take(config, count, state=None, split="train"):
    loader = make_loader(config, split, range(4), state)
    batches = [(next(loader), loader.state) for _ in range(count)]
    loader.close()
    return batches


def test_loader_of_mixture_resumes_from_every_state_and_draws_from_all_sources(config):
    everything = take(config, 12)
    for at in (0, 3, 10):
        (resumed,) = take(config, 1, everything[at][1])
        np.testing.assert_equal(resumed, everything[at + 1])
    for batches in (everything, take(config, 10, split="eval")):
        tokens = np.concatenate([batch["tokens"] for batch, _ in batches])
        digits, letters = ((tokens >= ord(a)) & (tokens <= ord(b)) for a, b in ("09", "AJ"))
        assert digits.any(axis=0).all()
        assert letters.any()


def test_sources_that_repeat_are_described_with_the_ends_of_their_paths(config):
    mixture = [{"source": "text", "path": path, "weight": 1} for path in ("/a/web", "/a/b,/a/c")]
    data = replace(config, **{"data.mixture": mixture}).data
    assert describe_sources(data) == "0.5 text:web + 0.5 text:b by documents"


def test_open_mixture_problem_names_entry(config, tmp_path):
    (tmp_path / "digits.jsonl").unlink()
    reason = r"^data\.mixture: entry 2: data\.path: no file at .*digits\.jsonl"
    with pytest.raises(ConfigError, match=reason):
        make_loader(config, "train", range(4))


def test_config_invalid_mixture_raises():
    for value, message in [
        ("[{source: txt, weight: 1}]", "entry 1: source 'txt' is not one of .*; did you mean text"),
        ("[{source: text, weight: 0}]", "entry 1: needs a weight above 0; got 0"),
        ("[{}]", "entry 1: source 'None' is not one of"),
        ("[{source: text, weight: 1}, {source: jsonl, weight: 2000}]", "a weight is 0.0005 of all"),
        ("[{source: synthetic, path: a, weight: 1}]", "synthetic reads no path: set source: text"),
        ("[{source: text, wait: 1, weight: 1}]", "entry 1: has no 'wait', only source, path"),
        ("[text]", r"expected a list such as \[\{source: jsonl, .* got 'text' in it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load("configs/base.yml", [f"data.mixture={value}"])
    two = "data.mixture=[{source: text, weight: 1}, {source: jsonl, weight: 0}]"
    for changes, message in [
        ("[[9, 1]]", r"expected \[\[after step, weights of the 2 entries .* got \[\[9, 1\]\]"),
        ("[[9, 1, 1], [9, 1, 2]]", "steps rising"),
        ("[[9.5, 1, 1]]", "steps rising"),
        ("[[9, 0, 0]]", "a weight is 0 of all"),
        ("[[9, 2, -1]]", "a weight is -1 of all"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load("configs/base.yml", [two, f"data.mixture_changes={changes}"])
    words = ["data.mixture=[{source: python_stdlib, weight: 1}]", "data.path=a.txt"]
    with pytest.raises(ConfigError, match=r"leaves data\.path without effect"):
        load("configs/base.yml", words)

"""Chunks of equal cost: the best split by trying all, and never slower than an even one."""

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxpipe.config import load, resolve
from maxpipe.config.balance import balanced, layer_costs
from maxpipe.pipeline.schedules import SCHEDULES
from maxpipe.pipeline.simulate import Costs, simulate

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.yml"))


def chunk_costs(costs, sizes, last=0.0):
    found, begin = [], 0
    for size in sizes:
        found.append(sum(costs[begin : begin + size]))
        begin += size
    found[-1] += last
    return found


@given(
    costs=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=1, max_size=9),
    last=st.sampled_from([0.0, 1.0, 5.0]),
    data=st.data(),
)
def test_no_other_split_has_a_cheaper_worst_chunk(costs, last, data):
    chunks = data.draw(st.integers(1, len(costs)))
    sizes = balanced(costs, chunks, last=last)
    assert len(sizes) == chunks
    assert min(sizes) >= 1
    assert sum(sizes) == len(costs)
    every = []
    for cuts in combinations(range(1, len(costs)), chunks - 1):
        ends = [*cuts, len(costs)]
        every.append(max(chunk_costs(costs, [e - b for b, e in zip([0, *ends], ends, strict=False)], last)))
    assert max(chunk_costs(costs, sizes, last)) == pytest.approx(min(every))


def test_a_head_of_two_layers_takes_two_layers_from_the_last_chunk():
    assert balanced([1.0] * 10, 4, last=2.0) == [3, 3, 3, 1]


def test_where_the_worst_chunk_is_given_the_others_are_even():
    assert balanced([1.0] * 8, 4, last=4.0) == [3, 2, 2, 1]
    assert balanced([1.0] * 6, 3, last=9.0) == [3, 2, 1]


def makespan(costs, sizes):
    """Of 1F1B with four microbatches per stage; the head is the unit of cost, a third of it forward."""
    layers = chunk_costs(costs, sizes)
    times = Costs([x / 3 for x in layers], [2 * x / 3 for x in layers], head=1.0)
    return simulate(SCHEDULES.get("1f1b").build(len(sizes), 4 * len(sizes)), times).makespan


def even(total, chunks):
    return [total // chunks + (i < total % chunks) for i in range(chunks)]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_presets_are_no_slower_than_with_even_stages(path, stages):
    config = load(path).config
    model = resolve(load(path, []), 64).model if config.model.head_dim == -1 else config.model
    costs = layer_costs(model, config.data.sequence_length, recomputes=False)
    auto = balanced(costs, stages, last=1.0)
    assert makespan(costs, auto) <= makespan(costs, even(len(costs), stages)) * (1 + 1e-9)


def test_a_tenth_faster_where_the_head_dominates():
    """Sixteen layers of Llama 3's head against its layers in the 1B model: a head is as much as four layers."""
    costs = [0.25] * 16
    assert makespan(costs, balanced(costs, 4, last=1.0)) < 0.9 * makespan(costs, even(16, 4))

"""What the seconds of a plan leave out, in words."""

import pytest
from helpers.small_plan import small_plan

from maxpipe.render.plan_omissions import omission_lines


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "model.attention=dot_product: splash cannot be used, model.head_dim=64"),
        ({"model.attention": "dot_product"}, "model.attention=dot_product"),
        ({"model.num_query_heads": 2, "model.num_kv_heads": 2}, None),
    ],
)
def test_scores_in_memory_are_a_line_with_the_reason(values, reason):
    lines = [line for line in omission_lines(small_plan("v5p:2x2x1", **values)) if "scores" in line]
    assert len(lines) == (reason is not None)
    assert all(reason in line for line in lines)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, []),
        ({"optimizer.name": "muon"}, ["Muon's update"]),
        ({"model.quantisation": "int8"}, ["int8"]),
        ({"model.quantisation": "fp8", "optimizer.name": "muon"}, ["Muon's update", "fp8"]),
    ],
)
def test_what_closed_forms_do_not_price_is_a_line_each(values, words):
    lines = [x for x in omission_lines(small_plan("v5p:2x2x1", **values)) if "closed forms" in x]
    assert len(lines) == len(words)
    assert all(word in line for word, line in zip(words, lines, strict=True))

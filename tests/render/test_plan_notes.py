"""What figures of a plan rest on, and what they leave out, in words."""

import dataclasses

from helpers.small_plan import small_plan

from maxpipe.render.plan_notes import basis_lines
from maxpipe.render.plan_omissions import omission_lines


def test_a_network_without_a_known_bandwidth_is_a_line_of_plans_over_several_slices():
    for topology, is_unknown in (("v4:2x2x1", True), ("v5p:2x2x1", False)):
        plan = small_plan(topology)
        several = dataclasses.replace(plan, request=plan.request.on(topology, 2))
        words = "the network of v4 is unknown"
        assert any(words in line for line in basis_lines(several)) is is_unknown
        assert not any(words in line for line in basis_lines(plan))


def test_what_closed_forms_do_not_price_is_a_line_each():
    scores = "model.attention=dot_product"
    for values, words in (
        ({}, [f"{scores}: splash cannot be used, model.head_dim=64"]),
        ({"model.attention": "dot_product"}, [scores]),
        ({"model.num_query_heads": 2, "model.num_kv_heads": 2}, []),
        ({"model.quantisation": "fp8", "optimizer.name": "muon"}, [scores, "Muon's update", "fp8"]),
    ):
        lines = omission_lines(small_plan("v5p:2x2x1", **values))
        found = [line for line in lines if "scores" in line]
        found += [line for line in lines if "closed forms" in line and "scores" not in line]
        assert len(found) == len(words), values
        assert all(word in line for word, line in zip(words, found, strict=True)), values

"""What would fit where nothing does: each tried by a search, in a time, and said to be tried."""

import dataclasses

from maxpipe.plan.search.best import make_plan
from maxpipe.plan.search.candidate import Proof
from maxpipe.plan.search.remedies import more_chips, remedies


def on_capacity(request, share, facts):
    least = make_plan(request, facts).outcome.least
    machine = dataclasses.replace(request.machine, capacity=share * least.memory)
    return dataclasses.replace(request, machine=machine)


def test_remedies_say_what_is_tried(request_and_facts):
    request, facts = request_and_facts
    lines = []
    plan = make_plan(on_capacity(request, 0.9, facts), facts)
    found = remedies(plan, facts, lines.append).lines
    assert plan.winner is None
    assert lines[0] == "trying      --tokens-per-step 4096"
    assert lines[-1].startswith("trying      --topology v5e:")
    assert found[0].startswith("fewer tokens: --tokens-per-step ")
    assert found[1].startswith("more chips: --topology v5e:")


def test_more_chips_are_larger_slices_and_then_several_of_the_largest(request_and_facts):
    request, _ = request_and_facts
    machines = [*more_chips(request.on("v5e:8x8"))]
    slices = [("v5e:16x16", 2), ("v5e:16x16", 4), ("v5e:16x16", 8)]
    assert [(on.machine.topology, on.machine.slices) for _, on in machines] == [
        ("v5e:8x16", 1),
        ("v5e:16x16", 1),
        *slices,
    ]
    assert machines[2][0] == "--topology v5e:16x16 compile.num_slices=2"
    assert machines[2][1].config.compile.num_slices == 2
    of_cubes = [on.machine for _, on in more_chips(request.on("v5p:2x2x1"))]
    assert [m.num_chips for m in of_cubes[:3]] == [8, 16, 32]
    assert [m.num_chips for m in of_cubes[-4:]] == [6144 * n for n in (1, 2, 4, 8)]
    several = [on.machine for _, on in more_chips(request.on("v5e:16x16", 2))]
    assert [(m.topology, m.slices) for m in several] == [("v5e:16x16", 2 * n) for _, n in slices]
    gpus = [words for words, _ in more_chips(request.on("H100:2"))]
    assert gpus == ["--topology H100:4", "--topology H100:8"]
    assert [*more_chips(request.on("cpu:2"))] == []


def test_a_smaller_margin_is_no_remedy_where_the_compiler_refused(request_and_facts):
    """A larger one leaves so much free that closed forms refuse what the compiler refused."""
    request, facts = request_and_facts
    plan = make_plan(request, facts)
    least = min(plan.rows, key=lambda row: row.memory)
    machine = dataclasses.replace(request.machine, capacity=least.memory / 0.6)
    refused = dataclasses.replace(least, proof=Proof(1e12, None, False, "", 1.0))
    on = dataclasses.replace(request, machine=machine)
    compiled = dataclasses.replace(plan, request=on, misfits=[refused])
    lines = remedies(compiled, facts, lambda line: None).lines
    assert all(line.endswith("--memory-margin 41%") for line in lines)
    assert lines

"""Devices of a stage have rows of their own: gradients, and how often they are summed."""

from contextlib import nullcontext
from functools import cache

import jax
import pytest
from helpers.engines import (
    MpmdUnderTest,
    assert_equals_one_device,
    assert_same,
    make_batch,
    sequential,
    tiny,
)
from jax.sharding import PartitionSpec as P

from maxpipe.compile.collectives import axes_of, groups_of
from maxpipe.compile.hlo import parse
from maxpipe.config import ConfigError
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.pipeline.engines.mpmd.row_parallel import (
    RowParallel,
    check_gather,
    manual_axes,
    total_of,
)
from maxpipe.pipeline.manual import Gather
from maxpipe.sharding.rules import AxisRules

ROWS = 48
AXES = ("data", "fsdp", "expert", "context")
MESH = jax.sharding.AbstractMesh((2, 2, 2, 1, 2), (*AXES, "tensor"))
ALONE = jax.sharding.AbstractMesh((1, 1, 1, 1, 2), (*AXES, "tensor"))


def config_of(words="", **values):
    common = "schedule=1f1b num_microbatches=4 remat_policy=minimal num_layers=2 z_loss=0.01 "
    return tiny(f"{common} stage=2 fsdp=2 global_batch_size={ROWS} {words}", **values)


@pytest.mark.slow
def test_sequences_over_an_axis_without_attention_across_it_equal_one_device():
    """XLA divides tokens over fsdp, for a device's own ones are not all that it attends to."""
    changes = {"activation_batch": ["data"], "activation_length": ["context", "fsdp"]}
    rules = [[name, changes.get(name, axes)] for name, axes in DEFAULT_RULES]
    assert_equals_one_device(config_of("data=2", **{"sharding.logical_axis_rules": rules}))


def test_weights_that_are_cast_once_a_step_have_the_gradients_of_those_cast_in_units():
    """Of stages of one row of devices, whose weights no axis splits."""
    batch = make_batch(ROWS)
    words = ("dtype=bfloat16 fsdp_gather=once", "dtype=bfloat16", "fsdp_gather=once")
    once, each, without_casts = (MpmdUnderTest(config_of(f"fsdp=1 {w}")) for w in words)
    assert_same(once.train(batch), each.train(batch))
    subjects = (once, each, without_casts)
    assert [[*s.engine.training.runner.gathers] for s in subjects] == [[0, 1], [], []]


@cache
def on_four_devices(gather):
    return MpmdUnderTest(config_of(f"fsdp_gather={gather} data=2"))


@pytest.mark.parametrize("gather", ["per_iteration", "once"])
def test_evaluation_sums_over_rows_of_all_devices_and_over_no_padding(gather):
    """20 rows in 4 microbatches of a multiple of 4 rows are padded to 32."""
    batch = make_batch(20, seed=1)
    expected = sequential(config_of().model, ROWS).evaluate(batch)
    assert on_four_devices(gather).evaluate(batch) == pytest.approx(expected, rel=1e-5)


def sums_by_axis(compiled, mesh, axis):
    return sum(
        len(i.operands)
        for computation in parse(compiled.as_text()).computations.values()
        for i in computation.instructions.values()
        if i.opcode.removesuffix("-start") in ("all-reduce", "reduce-scatter")
        and axis in axes_of(groups_of(i, mesh.size), mesh.shape).split(",")
    )


@pytest.mark.parametrize("gather", ["per_iteration", "once"])
def test_every_gradient_is_summed_once_a_step_and_units_sum_nothing(gather):
    """Over fsdp units scatter what they gather; the norms' gradients wait for the end."""
    subject = on_four_devices(gather)
    engine = subject.engine
    over_data, over_fsdp = {}, {}
    for stage, name, compiled, _ in engine.compile():
        for axis, sums in (("data", over_data), ("fsdp", over_fsdp)):
            sums[str(name)] = sums_by_axis(compiled, engine.meshes[stage], axis)
    runs = dict.fromkeys(over_data, 0)

    def counted(name, run):
        def count(*args):
            runs[name] += 1
            return run(*args)

        return count

    runner = engine.training.runner
    for chunk, (outputs, run) in runner.reductions.items():
        runner.reductions[chunk] = outputs, counted(f"reduce{chunk}", run)
    for chunk, (inputs, run) in runner.gathers.items():
        runner.gathers[chunk] = inputs, counted(f"gather{chunk}", run)
    subject.train(make_batch(ROWS))
    weights = [len(jax.tree.leaves(stage)) for stage in engine.abstract]
    units = [name for name in over_data if name[0] in "FB"]
    assert units == ["F0", "F1", "B1", "B0"]
    assert [over_data[name] for name in units] == [0, 0, 0, 0]
    # The loss is summed as well, on the last stage.
    assert [over_data["reduce0"], over_data["reduce1"]] == [weights[0], weights[1] + 1]
    ends = {name: count for name, count in runs.items() if name not in units}
    assert ends == dict.fromkeys(ends, 1)
    assert len(ends) == (4 if gather == "once" else 2)
    if gather == "once":
        assert over_fsdp == over_data
    else:
        # Two norms in a layer, and one in the head.
        assert [over_fsdp["reduce0"], over_fsdp["reduce1"]] == [2, 4]
        # The loss and the gradient of the head's kernel belong to the last forward.
        in_units = [over_fsdp[name] for name in units]
        assert in_units == [0, 1, weights[1] - 4, weights[0] - 2]


RULES = {
    "activation_batch": ["data", "fsdp", "expert"],
    "activation_length": ["context"],
    "layers_per_stage": [],
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, AXES),
        ({"activation_batch": ["data"]}, ("data", "context")),
        (
            {"activation_batch": ["data"], "activation_length": ["context", "fsdp"]},
            ("data", "context"),
        ),
        ({"layers_per_stage": ["fsdp"]}, ("data", "expert", "context")),
        ({"activation_batch": ["tensor"]}, ()),
    ],
    ids=str,
)
def test_units_are_manual_over_axes_of_rows_and_tokens_alone(changes, expected):
    rules = AxisRules([*(RULES | changes).items()], MESH)
    assert manual_axes(rules, once=False) == manual_axes(rules, once=True) == expected
    alone = AxisRules([*(RULES | changes).items()], ALONE)
    assert manual_axes(alone, once=False) == ()
    assert manual_axes(alone, once=True) == AXES
    check_gather("per_iteration", expected, rules)
    fits = nullcontext() if "fsdp" in expected else pytest.raises(ConfigError, match="once needs")
    with fits:
        check_gather("once", expected, rules)


@pytest.mark.parametrize(
    ("once", "spec", "axes", "running"),
    [
        (False, P("fsdp", "tensor"), ("data", "expert"), P("fsdp", "tensor")),
        (False, P(None, "tensor"), ("data", "fsdp", "expert"), P(None, "tensor")),
        (True, P("fsdp", "tensor"), ("data", "fsdp", "expert"), P(None, "tensor")),
        # Experts are split in use, too, so there is nothing to sum over their axis.
        (False, P("expert", "fsdp"), ("data",), P("expert", "fsdp")),
        (True, P("expert", "fsdp"), ("data", "fsdp"), P("expert", None)),
    ],
)
def test_sums_of_gradients_are_kept_scattered_unless_weights_are_gathered_once(
    once, spec, axes, running
):
    in_use = {"expert"} if "expert" in spec else set()
    gather = Gather(spec, "float32", "float32", in_use=in_use)
    total = total_of(spec, gather, RowParallel(AXES, {}, once), MESH)
    assert (total.axes, total.running, total.spec) == (axes, running, spec)
    assert total.stacked == P(axes, *running)

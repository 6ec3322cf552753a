"""Gathering weights and summing their gradients by hand, and the sharding rules that this allows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.builder import build_engine_inputs
from maxpipe.config import ConfigError
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.pipeline.engines.scheduled.engine import ScheduledEngine, check_rules
from maxpipe.pipeline.manual import MANUAL_AXES, Gather, gather_tree, psum, ring, sum_replicas

P = PartitionSpec


def make_axes(stage=1, data=1, fsdp=1, context=1, tensor=1):
    sizes = stage, data, fsdp, context, tensor
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("stage", "data", "fsdp", "context", "tensor"))


def run(f, in_specs, out_specs, **sizes):
    """`f` on a mesh of these sizes, manual over `MANUAL_AXES`, as a function of whole arrays."""
    return jax.jit(
        jax.shard_map(
            f,
            mesh=make_axes(**sizes),
            axis_names=set(MANUAL_AXES),
            check_vma=False,
            in_specs=in_specs,
            out_specs=out_specs,
        )
    )


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


SPECS = [
    P(),
    P("fsdp"),
    P(None, "fsdp"),
    P(None, ("stage", "fsdp")),
    P(("fsdp", "data"), "stage"),
    P("tensor", "fsdp"),
]


@pytest.mark.parametrize("num_leading", [0, 2])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_whole_parameters_and_scattered_sums(spec, num_leading):
    """`scatter` is the sum over the devices of an axis, each left with the part that it holds of the parameter."""
    gather = Gather(spec, jnp.float32, jnp.float32)
    manual = P(*[None] * num_leading, *[None if entry == "tensor" else entry for entry in spec])
    leading = (3, 2)[:num_leading]
    weight, scales = random(*leading, 8, 8), np.arange(1, 9, dtype=np.float32)

    def f(shard, scale):
        whole = gather.whole(shard, (None,) * num_leading)
        mine = gather.scatter(whole * scale[0], (None,) * num_leading)
        return whole, sum_replicas(gather, mine, MANUAL_AXES)

    sizes = {"data": 2, "fsdp": 2} | ({"tensor": 2} if "tensor" in spec else {"stage": 2})
    num_manual = 4 if "tensor" in spec else 8
    whole, total = run(f, (manual, P(MANUAL_AXES)), (P(), manual), **sizes)(
        weight, scales[:num_manual]
    )
    np.testing.assert_array_equal(whole, weight)
    np.testing.assert_allclose(total, weight * scales[:num_manual].sum(), rtol=1e-6)


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_gradients_through_a_gather_are_summed_in_float32(param_dtype):
    """One large and many small gradients: bfloat16 sums would lose the small ones."""
    gather = Gather(P("fsdp"), param_dtype, jnp.bfloat16)
    weight, values = np.ones((8, 2), param_dtype), np.array([256] + [1] * 7, np.float32)

    def f(shard, value):
        loss = lambda tree: jnp.sum(
            gather_tree({"w": gather}, tree)["w"].astype(jnp.float32) * value[0]
        )  # noqa: E731
        assert gather(shard).dtype == jnp.bfloat16
        return jax.grad(loss)({"w": shard})["w"]

    gradient = run(f, (P("fsdp"), P("fsdp")), P("fsdp"), fsdp=8)(weight, values)
    assert gradient.dtype == jnp.dtype(param_dtype)
    np.testing.assert_array_equal(gradient, np.full((8, 2), 263, np.float32).astype(param_dtype))


def test_integers_are_gathered_as_they_are():
    gather = Gather(P("fsdp"), jnp.int32, jnp.bfloat16)
    whole = run(gather.whole, P("fsdp"), P(), fsdp=2)(np.arange(1000, 1004))
    assert whole.dtype == jnp.int32
    np.testing.assert_array_equal(whole, np.arange(1000, 1004))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shift", [1, -1])
def test_ring(size, shift):
    """With other axes beside it, every one of their devices in a ring of its own."""
    values = np.arange(size * 2, dtype=np.float32).reshape(size, 2)
    moved = run(
        lambda x: ring(x, size, shift), P("stage", "data"), P("stage", "data"), stage=size, data=2
    )(values)
    np.testing.assert_array_equal(moved, np.roll(values, shift, axis=0))


def test_sums_over_axes_of_one_device_beside_an_automatic_axis():
    """XLA's partitioner refuses `lax.psum` of what it has split."""
    x = random(4, 6)
    split = jax.device_put(x, NamedSharding(make_axes(tensor=2), P("tensor")))
    total = run(lambda x: psum(x @ x.T, MANUAL_AXES), P(), P(), tensor=2)(split)
    np.testing.assert_allclose(total, x @ x.T, rtol=1e-5)


def parts_with(rules, **values):
    """EngineInputs of a pipeline under the default rules, some of them replaced."""
    changed = [rule for rule in DEFAULT_RULES if rule[0] not in {name for name, _ in rules}] + rules
    config = tiny(
        **{
            "pipeline.schedule": "lockstep_1f1b",
            "mesh.ici.stage": 2,
            "mesh.ici.fsdp": 2,
            "mesh.ici.tensor": 2,
            "sharding.logical_axis_rules": changed,
        }
        | values
    )
    return build_engine_inputs(config, make_mesh(config))


@pytest.mark.parametrize(
    ("rule", "remedy"),
    [
        (["activation_batch", []], "[activation_batch, [fsdp]]"),
        (["activation_batch", ["stage", "fsdp"]], "[activation_batch, [fsdp]]"),
        (["stage", []], "[stage, [stage]]"),
        (["stage", ["fsdp"]], "[stage, [stage]]"),
        (["repeat", ["fsdp"]], "[repeat, []]"),
        (["layers_per_stage", ["fsdp"]], "[layers_per_stage, []]"),
        (["vocab", ["tensor", "fsdp"]], "from 'vocab' and give them to 'outer_embed'"),
    ],
    ids=str,
)
def test_rules_that_the_program_is_not_written_for_are_refused(rule, remedy):
    rules = [rule, ["outer_embed", []]] if rule[0] == "vocab" else [rule]
    with pytest.raises(ConfigError) as error:
        ScheduledEngine(parts_with(rules))
    assert "sharding.logical_axis_rules" in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize(
    "rules",
    [
        [],
        [["activation_batch", ["fsdp", "data"]]],
        [["activation_batch", ["data", "fsdp", "expert"]]],
        [["embed", []], ["outer_embed", ["fsdp"]]],
        [["mlp", ["fsdp"]], ["embed", ["tensor"]]],
    ],
    ids=str,
)
def test_other_rules_are_accepted(rules):
    check_rules(parts_with(rules))

"""GPipe in a caller's own shard_map equals calling the stages in turn."""

import doctest
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from maxpipe.pipeline import gpipe
from maxpipe.pipeline.gpipe import PipelineModule, execute_pipeline, execute_pipeline_step

WIDTH = 4
STACKED, WHOLE = PartitionSpec("pipe"), PartitionSpec()


def shard_map(f, stages, in_specs, out_specs, check_vma=True):
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.jit(jax.shard_map(f, mesh=Mesh(jax.devices()[:stages], ("pipe",)), **specs))


def batch(rows=8):
    return jax.random.normal(jax.random.key(1), (rows, WIDTH))


def weights(stages):
    return jax.random.normal(jax.random.key(0), (stages, WIDTH, WIDTH))


def layer(w, x, scale):
    return x + scale * jnp.tanh(x @ w)


def in_turn(w, x, scale):
    for stage in w:
        x = layer(stage, x, scale)
    return x


def pipeline(module, x, *args, num_microbatches=2, axis="pipe", **kwargs):
    options = {"num_microbatches": num_microbatches, "model_axis_name": axis}
    return execute_pipeline(module, x, *args, **options, **kwargs)


def summed(module, x, *args, **kwargs):
    return jax.lax.psum(pipeline(module, x, *args, **kwargs), "pipe")


def assert_close(a, b):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.max(np.abs(b))), a, b
    )


@pytest.mark.parametrize(
    ("stages", "microbatches", "check_vma"),
    [(1, 1, True), (2, 1, False), (2, 4, True), (4, 2, False), (4, 8, True)],
)
def test_execute_pipeline_of_functions_equals_calling_them_in_turn(stages, microbatches, check_vma):
    def forward(w, x, scale):
        run = lambda y, scale: layer(w[0], y, scale)  # noqa: E731
        return pipeline(run, x, scale, num_microbatches=microbatches)[None]

    piped = shard_map(forward, stages, (STACKED, WHOLE, WHOLE), STACKED, check_vma)
    w, x = weights(stages), batch()
    outputs = piped(w, x, 0.5)
    assert not outputs[:-1].any()
    assert_close(outputs[-1], in_turn(w, x, 0.5))
    actual = jax.grad(lambda w, x: jnp.sum(jnp.sin(piped(w, x, 0.5))), argnums=(0, 1))(w, x)
    expected = jax.grad(lambda w, x: jnp.sum(jnp.sin(in_turn(w, x, 0.5))), argnums=(0, 1))(w, x)
    assert_close(actual, expected)


def test_execute_pipeline_with_waiting_stages_has_finite_gradients():
    """The derivative of the norm is not finite at zero."""

    def forward(w, x):
        return summed(lambda y: w[0] * y / jnp.linalg.norm(y), x)

    piped = shard_map(forward, 4, (STACKED, WHOLE), WHOLE)
    assert np.isfinite(jax.grad(lambda w: piped(w, batch()).sum())(jnp.arange(1.0, 5.0))).all()


def assert_equals_in_turn(piped, plain, parameters):
    assert_close(piped(parameters, batch()), plain(parameters, batch()))
    actual, expected = (
        jax.grad(lambda p, f=f: jnp.sum(f(p, batch()) ** 2))(parameters) for f in (piped, plain)
    )
    assert_close(actual, expected)


def of_stage(stacked, i):
    return jax.tree.map(lambda p: p[i], stacked)


def test_execute_pipeline_of_an_nnx_module_equals_calls_in_turn():
    graph, _ = nnx.split(nnx.eval_shape(lambda: nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))))
    states = [nnx.state(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i))) for i in range(2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def forward(state, x):
        return summed(nnx.merge(graph, of_stage(state, 0)), x, num_microbatches=4)

    def plain(stacked, x):
        return nnx.merge(graph, of_stage(stacked, 1))(nnx.merge(graph, of_stage(stacked, 0))(x))

    piped = shard_map(forward, 2, (STACKED, WHOLE), WHOLE)
    assert_equals_in_turn(piped, plain, stacked)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jnp.tanh(nn.Dense(WIDTH)(x))


class Bound(nn.Module):
    @nn.compact
    def __call__(self, x):
        return summed(Layer(), x)


def test_execute_pipeline_of_a_bound_linen_module_equals_calls_in_turn():
    x = batch()
    init = shard_map(Bound().init, 2, (WHOLE, WHOLE), WHOLE, check_vma=False)
    params = init(jax.random.key(0), x)
    y = shard_map(Bound().apply, 2, (WHOLE, WHOLE), WHOLE)(params, x)
    dense = params["params"]["Layer_0"]["Dense_0"]
    for _ in range(2):
        x = x + jnp.tanh(x @ dense["kernel"] + dense["bias"])
    assert_close(y, x)


KEYS = jax.random.split(jax.random.key(7), 2)


def bound_dropout(key):
    return nn.Dropout(0.5, deterministic=False).bind({}, rngs={"dropout": key})


def nnx_dropout(key):
    return nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=key))


def module_dropout(x, key):
    model = PipelineModule("pipe", 4, lambda: nn.Dropout(0.5, deterministic=False))
    return jax.lax.psum(model.apply({}, x, rngs={"dropout": key}), "pipe")


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, key: summed(bound_dropout(key), x, num_microbatches=4),
        lambda x, key: summed(nnx_dropout(key), x, num_microbatches=4),
        module_dropout,
    ],
)
def test_dropout_masks_differ_by_microbatch_and_stage(forward):
    run, x = shard_map(forward, 4, (WHOLE, WHOLE), WHOLE), jnp.ones((4, 4096))
    y = np.asarray(run(x, KEYS[0]))
    np.testing.assert_array_equal(y, run(x, KEYS[0]))
    assert (y != run(x, KEYS[1])).any()
    # Four masks in a row keep 1/16, scaled by 2 each; one mask for all stages would keep half.
    assert set(np.unique(y)) == {0.0, 16.0}
    kept = y != 0
    assert np.mean(kept) == pytest.approx(0.5**4, abs=0.01)
    assert all((kept[a] != kept[b]).any() for a in range(4) for b in range(a))


class Twice(nn.Module):
    @nn.compact
    def __call__(self, x):
        dropout = nn.Dropout(0.5, deterministic=False)
        return jnp.stack([summed(dropout, x) for _ in range(2)])


def step_result(module, x):
    return execute_pipeline_step(module, x, x, model_axis_name="pipe")[1]


def nnx_twice(call, x, key):
    module = nnx_dropout(key)
    return jnp.stack([jax.lax.psum(call(module, x), "pipe") for _ in range(2)])


@pytest.mark.parametrize(
    "twice",
    [
        partial(nnx_twice, pipeline),
        partial(nnx_twice, step_result),
        lambda x, key: Twice().apply({}, x, rngs={"dropout": key}),
    ],
)
def test_execute_pipeline_draws_other_numbers_in_a_second_call(twice):
    """An NNX module counts its draws, the parent of a Linen module does."""
    run = shard_map(twice, 2, (WHOLE, WHOLE), WHOLE)
    first, second = run(jnp.ones((2, 64)), KEYS[0])
    assert (first != second).any()


class Normed(nn.Module):
    train: bool = False
    sows: bool = False

    @nn.compact
    def __call__(self, x):
        if self.sows:
            self.sow("intermediates", "input", x)
        return nn.BatchNorm(use_running_average=not self.train)(x)


def on_two_devices(model, apply=None):
    init = shard_map(model.init, 2, (WHOLE, WHOLE), STACKED)
    variables = init(jax.random.key(0), batch())
    apply = apply or model.apply
    run = shard_map(lambda p, x: jax.lax.psum(apply(p, x), "pipe"), 2, (STACKED, WHOLE), WHOLE)
    return variables, run(variables, batch())


def test_pipeline_module_reads_batch_statistics():
    variables, y = on_two_devices(PipelineModule("pipe", 2, Normed))
    assert variables["batch_stats"]["Normed_0"]["BatchNorm_0"]["mean"].shape == (2, WIDTH)
    assert_close(y, batch() / (1 + 1e-5))  # means of 0 and variances of 1, two stages


def test_pipeline_module_refuses_a_stage_that_changes_its_state():
    with pytest.raises(ValueError, match="use_running_average=True"):
        on_two_devices(PipelineModule("pipe", 2, lambda: Normed(train=True)))
    model = PipelineModule("pipe", 2, lambda: Normed(sows=True))
    on_two_devices(model)  # what is sown is not asked for
    with pytest.raises(ValueError, match="Normed writes intermediates"):
        on_two_devices(model, lambda p, x: model.apply(p, x, mutable=["intermediates"])[0])


def test_pipeline_module_names_the_stage_axis_of_partitioned_parameters():
    def dense():
        kernel = nn.with_partitioning(nn.initializers.lecun_normal(), (None, None))
        return nn.Dense(WIDTH, kernel_init=kernel)

    variables, _ = on_two_devices(PipelineModule("pipe", 2, dense))
    kernel = variables["params"]["Dense_0"]["kernel"]
    assert (kernel.names, kernel.value.shape) == (("pipe", None, None), (2, WIDTH, WIDTH))
    specs = nn.get_partition_spec(variables)["params"]["Dense_0"]
    assert (specs["kernel"], specs["bias"]) == (PartitionSpec("pipe", None, None), PartitionSpec())


def test_execute_pipeline_refuses_an_nnx_module_that_updates_batch_statistics():
    def forward(x, train):
        module = nnx.BatchNorm(WIDTH, use_running_average=not train, rngs=nnx.Rngs(0))
        return summed(module, x)

    run = lambda train: shard_map(lambda x: forward(x, train), 2, (WHOLE,), WHOLE)  # noqa: E731
    assert_close(run(False)(batch()), batch() / (1 + 1e-5))
    with pytest.raises(ValueError, match="BatchNorm does"):
        run(True)(batch())


def test_pipeline_module_equals_calling_its_stages_in_turn():
    model = PipelineModule("pipe", num_microbatches=2, module_fn=Layer)
    params = shard_map(model.init, 4, (WHOLE, WHOLE), STACKED)(jax.random.key(0), batch())
    kernels = params["params"]["Layer_0"]["Dense_0"]["kernel"]
    assert kernels.shape == (4, WIDTH, WIDTH)
    assert len(np.unique(kernels)) == kernels.size  # every stage has its own initial values

    def plain(params, x):
        for i in range(4):
            x = Layer().apply({"params": of_stage(params["params"]["Layer_0"], i)}, x)
        return x

    piped = shard_map(
        lambda p, x: jax.lax.psum(model.apply(p, x), "pipe"), 4, (STACKED, WHOLE), WHOLE
    )
    assert_equals_in_turn(piped, plain, params)


def test_execute_pipeline_step_passes_results_to_the_next_stage():
    def step(state, x):
        return execute_pipeline_step(lambda y: 2 * y, state, x, model_axis_name="pipe")

    run = shard_map(step, 4, (STACKED, WHOLE), (STACKED, STACKED))
    state, output = run(jnp.array([9.0, 1.0, 2.0, 3.0]), jnp.array([5.0]))
    assert state.tolist() == [6.0, 10.0, 2.0, 4.0]
    assert output.tolist() == [0.0, 0.0, 0.0, 6.0]


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (
            lambda x: pipeline(jnp.sin, x, num_microbatches=3),
            "must divide the batch's rows, 8 here",
        ),
        (lambda x: pipeline(jnp.sin, x[0, 0], num_microbatches=1), "rows, 0 here"),
        (lambda x: pipeline(lambda x: (x, x), x), r"array like its input, \(4, 4\) .*; got \("),
        (lambda x: pipeline(Layer(), x), "must be bound"),
        (lambda x: pipeline(jnp.sin, x, axis="x"), "model_axis_name='x'"),
        (lambda x: step_result(jnp.sum, x), "array like its input"),
        (lambda x: step_result(nnx.Linear(WIDTH, 2, rngs=nnx.Rngs(0)), x), r"shape=\(8, 2\)"),
    ],
)
def test_execute_pipeline_with_wrong_arguments_names_the_mistake(run, says):
    with pytest.raises(ValueError, match=says):
        shard_map(run, 2, (WHOLE,), STACKED)(batch())


class Scaled(nn.Module):
    @nn.compact
    def __call__(self, x, *, microbatch, mutable, rngs, method, state):
        return nn.Dense(WIDTH)(x) * (microbatch + mutable + rngs + method + state)


def test_execute_pipeline_passes_on_keyword_arguments_of_any_name():
    names = {"microbatch": 1.0, "mutable": 2.0, "rngs": 3.0, "method": 4.0, "state": 5.0}

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return PipelineModule("pipe", 2, Scaled)(x, **names)

    variables, y = on_two_devices(Model())
    kernel = variables["params"]["PipelineModule_0"]["Scaled_0"]["Dense_0"]["kernel"]
    assert_close(y, 15 * (15 * batch() @ kernel[0]) @ kernel[1])


def test_docstring_examples_run():
    results = doctest.testmod(gpipe)
    assert results.attempted > 20
    assert not results.failed

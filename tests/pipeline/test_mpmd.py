"""One's own function over stages equals the plain function; what does not fit is refused."""

import doctest
import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxpipe.pipeline import mpmd
from maxpipe.pipeline.mpmd import forward_only, load_schedule, mark_stage_boundary, pipelined
from maxpipe.pipeline.schedules.table import from_ticks

ROWS, MICROBATCHES = 24, 3


def example():
    path = Path(__file__).parents[2] / "examples" / "own_model_mpmd.py"
    spec = importlib.util.spec_from_file_location("own_model_mpmd", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = example()


def meshes(*sizes):
    devices = iter(jax.devices())
    return [Mesh([next(devices) for _ in range(size)], ("data",)) for size in sizes]


def table(schedule="1f1b", stages=3, repeats=1):
    return load_schedule(schedule, stages, MICROBATCHES, repeats)


def assert_close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def chain(params, batch, num_chunks=3, layer=lambda x, w: jnp.sin(x @ w)):
    x = batch["x"]
    for chunk in range(num_chunks):
        x = mark_stage_boundary(layer(x, params["w"][chunk]))
    return jnp.mean((x - batch["y"]) ** 2)


GRADIENT = jax.value_and_grad(chain)


def chain_params(num_chunks=3):
    keys = jax.random.split(jax.random.key(0), num_chunks)
    return {"w": [jax.random.normal(key, (4, 4)) for key in keys]}


def chain_batch(rows=ROWS):
    return {"x": jax.random.normal(jax.random.key(1), (rows, 4)), "y": jnp.ones((rows, 4))}


def step_of(loss, of="1f1b", sizes=(1, 1, 1), **options):
    return pipelined(jax.value_and_grad(loss), table(of), meshes(*sizes), **options)


def assert_equals_plain(step, loss=chain):
    results = step(chain_params(), chain_batch())
    assert_close(results, jax.value_and_grad(loss)(chain_params(), chain_batch()))
    return results


def test_example_of_the_docstring_passes():
    results = doctest.testmod(mpmd)
    assert results.attempted > 10
    assert results.failed == 0


class TestExample:
    """Uneven, with tied weights, a skip connection from first to last stage, and checkpoints."""

    batch = jax.random.normal(jax.random.key(1), (ROWS, EXAMPLE.FEATURES))

    @pytest.fixture(scope="class")
    def params(self):
        return EXAMPLE.Autoencoder().init(jax.random.key(0), self.batch)

    @pytest.fixture(scope="class")
    def expected(self, params):
        return jax.value_and_grad(EXAMPLE.loss)(params, self.batch)

    @pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 4)], ids=str)
    @pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
    def test_loss_and_gradients_equal_those_of_the_plain_function(
        self, params, expected, schedule, sizes
    ):
        step = step_of(EXAMPLE.loss, schedule, sizes, batch_specs=P("data"))
        placed = jax.device_put(params, step.param_shardings(params, self.batch))
        results = step(placed, self.batch)
        assert_close(results, expected)
        # Gradients lie where parameters do, so that an optimizer finds both in one place.
        for gradient, parameter in zip(*map(jax.tree.leaves, (results[1], placed)), strict=True):
            assert gradient.sharding == parameter.sharding
            assert gradient.sharding.device_set in [{*mesh.devices.flat} for mesh in meshes(*sizes)]

    def test_stages_own_what_they_read_first(self, params):
        step = step_of(EXAMPLE.loss)
        shardings = step.param_shardings(params, self.batch)
        by_stage = step.by_stage(jax.device_put(params, shardings))
        names = [
            {str(path[1].key) for path, _ in jax.tree_util.tree_leaves_with_path(part)}
            for part in by_stage
        ]
        denses = {f"CheckpointDense_{i}" for i in range(4)}
        assert names == [{"shared"}, denses, {"LayerNorm_0"}]
        assert_close(step.join(by_stage), params)

    def test_optimizer_on_each_stage_equals_one_for_all(self, params):
        step = step_of(EXAMPLE.loss, sizes=(2, 1, 1), batch_specs=P())
        optimizer = optax.sgd(0.1, momentum=0.9)

        def update(params, state, gradients):
            changes, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, changes), state

        placed = jax.device_put(params, step.param_shardings(params, self.batch))
        by_stage = step.by_stage(placed)
        states = [optimizer.init(part) for part in by_stage]
        state = optimizer.init(params)
        for _ in range(2):
            _, gradients = step(step.join(by_stage), self.batch)
            updated = map(jax.jit(update), by_stage, states, step.by_stage(gradients))
            by_stage, states = zip(*updated, strict=True)
            _, gradients = jax.value_and_grad(EXAMPLE.loss)(params, self.batch)
            params, state = update(params, state, gradients)
        assert_close(step.join(by_stage), params)


def test_layouts_of_parameters_and_batch_are_those_of_the_specs():
    specs = {"w": [P("data"), P(), P(None, "data")]}
    batch_specs = {"x": P("data"), "y": P()}
    step = step_of(chain, sizes=(2, 1, 4), param_specs=specs, batch_specs=batch_specs)
    results = assert_equals_plain(step)
    for mesh, spec, gradient in zip(step.meshes, specs["w"], results[1]["w"], strict=True):
        assert gradient.sharding == NamedSharding(mesh, spec)


def test_meshes_with_explicit_axes_and_sizes_that_do_not_divide_each_other_are_used():
    """Microbatches of eight rows lie on two devices, and are replicated on three."""
    axis = {"axis_types": (AxisType.Explicit,)}
    explicit = [Mesh(mesh.devices, ("data",), **axis) for mesh in meshes(2, 3, 1)]
    step = pipelined(GRADIENT, table(), explicit, batch_specs={"x": P("data"), "y": P()})
    params, batch = chain_params(), chain_batch()
    placed = jax.device_put(params, NamedSharding(explicit[0], P()))
    assert_close(step(placed, batch), GRADIENT(params, batch))


def test_v_placement_runs_both_ends_of_a_model_on_the_first_stage():
    loss = partial(chain, num_chunks=4)
    step = pipelined(jax.value_and_grad(loss), table("zb_v", 2, 2), meshes(1, 1))
    params, batch = chain_params(4), chain_batch()
    assert_close(step(params, batch), jax.value_and_grad(loss)(params, batch))
    devices = [{d.id for d in s.device_set} for s in step.param_shardings(params, batch)["w"]]
    assert devices == [{0}, {1}, {1}, {0}]


def test_evaluation_returns_the_loss():
    step = pipelined(chain, forward_only(table("zb_h1")), meshes(1, 1, 1))
    params, batch = chain_params(), chain_batch()
    assert [*map(str, mpmd.dump(step.sliced(params, batch)))] == ["F0", "F1", "F2"]
    assert_close(step(params, batch), chain(params, batch))


def test_batches_of_several_sizes_and_auxiliary_values_are_averaged():
    def with_aux(params, batch):
        value = chain(params, batch)
        return value, {"loss": 2 * value, "rows": batch["x"].shape[0]}

    step = pipelined(jax.value_and_grad(with_aux, has_aux=True), table(), meshes(1, 1, 1))
    params = chain_params()
    for rows in (ROWS, 2 * ROWS):
        batch = chain_batch(rows)
        (value, aux), gradients = step(params, batch)
        assert_close((value, gradients), jax.value_and_grad(chain)(params, batch))
        assert aux["loss"] == pytest.approx(2 * value)
        assert aux["rows"] == rows / MICROBATCHES


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("mean", (jnp.float32(2e9), jnp.float32(200), jnp.float32(1))),
        ("sum", (jnp.int32(-6), jnp.uint32(600), jnp.int32(3))),
    ],
)
def test_integers_are_averaged_in_float32_and_added_up_in_32_bits(reduction, expected):
    def with_integers(params, batch):
        signed = jnp.int32(2_000_000_000 if reduction == "mean" else -2)
        return chain(params, batch), (signed, jnp.uint8(200), True)

    function = jax.value_and_grad(with_integers, has_aux=True)
    step = pipelined(function, table(), meshes(1, 1, 1), reduction=reduction)
    assert_close(step(chain_params(), chain_batch())[0][1], expected)


def test_gradients_without_the_value_equal_those_of_the_plain_function():
    def with_rows(params, batch):
        return chain(params, batch), batch["x"].shape[0]

    params, batch = chain_params(), chain_batch()
    expected = jax.grad(chain)(params, batch)
    step = pipelined(jax.grad(chain), table(), meshes(1, 1, 1))
    assert_close(step(params, batch), expected)
    step = pipelined(jax.grad(with_rows, has_aux=True), table(), meshes(1, 1, 1))
    gradients, rows = step(params, batch)
    assert_close(gradients, expected)
    assert rows == ROWS / MICROBATCHES


def test_sum_with_a_shared_divisor_equals_a_weighted_mean():
    def loss(params, batch, divisor):
        x = batch["x"]
        for matrix in params["w"]:
            x = mark_stage_boundary(jnp.sin(x @ matrix))
        return jnp.sum(batch["weight"] * jnp.sum(x**2, axis=1)) / divisor

    weight = jnp.arange(ROWS) % 5.0
    batch = chain_batch() | {"weight": weight}
    step = step_of(loss, reduction="sum")
    arguments = chain_params(), batch, jnp.sum(weight)
    assert_close(step(*arguments), jax.value_and_grad(loss)(*arguments))


def test_numbers_of_python_do_not_change_the_dtype_of_activations():
    def loss(params, batch, scale):
        return chain(params, batch, layer=lambda x, w: jnp.sin(x @ w) * scale)

    arguments = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (chain_params(), chain_batch()))
    assert step_of(loss)(*arguments, 0.5)[0].dtype == jnp.bfloat16


def test_keys_are_folded_with_the_microbatch_and_legacy_ones_are_not():
    def loss(params, batch, key):
        x = batch["x"] * jax.random.bernoulli(key, shape=batch["x"].shape)
        return chain(params, batch | {"x": x})

    step = step_of(loss)
    params, batch, key = chain_params(), chain_batch(), jax.random.key(3)
    rows = ROWS // MICROBATCHES

    def average(key_of):
        results = [
            jax.value_and_grad(loss)(
                params, {n: x[m * rows : (m + 1) * rows] for n, x in batch.items()}, key_of(m)
            )
            for m in range(MICROBATCHES)
        ]
        return jax.tree.map(lambda *x: sum(x) / MICROBATCHES, *results)

    assert_close(step(params, batch, key), average(lambda m: jax.random.fold_in(key, m)))
    old = jax.random.PRNGKey(3)
    with pytest.warns(UserWarning, match=r"pass jax.random.key\(seed\)"):
        assert_close(step(params, batch, old), average(lambda m: old))


def test_bfloat16_gradients_are_summed_in_float32():
    """Two hundred and fifty-six ones and then single ones: bfloat16 would lose the latter."""

    def loss(params, batch):
        x = mark_stage_boundary(params["w"] * batch)
        return jnp.sum(x.astype(jnp.float32))

    batch = jnp.array([[256.0], [1.0], [1.0], [1.0], [1.0]], jnp.bfloat16)
    step = pipelined(
        jax.value_and_grad(loss), load_schedule("1f1b", 1, 5), meshes(1), reduction="sum"
    )
    _, gradients = step({"w": jnp.ones((1,), jnp.bfloat16)}, batch)
    assert gradients["w"].dtype == jnp.bfloat16
    assert gradients["w"] == 260


def test_arrays_that_the_function_captures_reach_every_stage():
    scale = jax.device_put(jnp.arange(1.0, 5.0), jax.devices()[0])

    loss = partial(chain, layer=lambda x, w: jnp.sin(x @ w) * scale)
    assert_equals_plain(step_of(loss), loss)


def test_constraints_hold_on_every_stage_of_one_size():
    stages = meshes(2, 2, 2)
    spec = NamedSharding(stages[0].abstract_mesh, P("data"))

    def layer(x, w):
        return jax.lax.with_sharding_constraint(jnp.sin(x @ w), spec)

    loss = partial(chain, layer=layer)
    assert_equals_plain(pipelined(jax.value_and_grad(loss), table(), stages, batch_specs=P()))


def trained_after_the_marks(params, batch):
    return jnp.mean(chain(chain_params(), batch) * params["w"][0])


def of_chain(**options):
    return lambda: step_of(chain, sizes=(1, 3, 1), **options)(chain_params(), chain_batch())


def of_batch(**changes):
    return lambda: step_of(chain)(chain_params(), chain_batch() | changes)


def of_function(function, table_of=table, stages=(1, 1, 1)):
    return lambda: pipelined(function, table_of(), meshes(*stages))(chain_params(4), chain_batch())


def of_meshes(*stages):
    return lambda: pipelined(jax.value_and_grad(chain), table(), stages)


def invalid_table():
    ticks = {"F": np.ogrid[:2, :1][0] + [[0, 1]], "B": np.ogrid[:2, :1][0] + [[3, 4]]}
    return from_ticks("own", 2, 1, ticks)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (of_function(jax.value_and_grad(partial(chain, num_chunks=2))), "has 2 stage marks, but"),
        (of_function(jax.value_and_grad(partial(chain, num_chunks=4))), "needs 3; call"),
        (of_function(chain), r"value_and_grad\(loss\).* forward_only\(table\)"),
        (of_function(jax.value_and_grad(trained_after_the_marks)), "before the first mark"),
        (of_function(GRADIENT, lambda: forward_only(table())), "an evaluation the loss itself"),
        (of_function(jax.value_and_grad(chain, argnums=(0, 1))), "without argnums"),
        (of_function(GRADIENT, invalid_table, (1, 1)), "0B0 at tick 3, stage 0 is too early"),
        (of_batch(x=jnp.ones((ROWS + 1, 4))), r"multiple of the 3 .*: batch\['x'\] has 25"),
        (of_batch(x=jnp.ones((2 * ROWS, 4))), r"same .*: batch\['x'\] has 48, .* has 24"),
        (of_batch(step=3), r"batch\['step'\] has 0.*; pass what is no row"),
        (of_meshes(*meshes(1, 1)), "2 meshes, but .* 3 stages"),
        (of_meshes(*meshes(1) * 3), "devices of its own"),
        (of_meshes(*meshes(1, 1), Mesh(jax.devices()[2:3], ("fsdp",))), "all the same names"),
        (of_chain(), r"batch_specs=PartitionSpec\('data'\)"),
        (of_chain(param_specs=P("data")), r"params\['w'\]\[1\] \[4, 4\] .* on stage 1: the mesh"),
        (of_chain(batch_specs=P("fsdp")), r"batch\['x'\] .*: its mesh has the axes data"),
        (of_chain(batch_specs={"z": P()}), "batch_specs is no prefix of the tree"),
        (of_chain(param_specs={"w": "data"}), "leaves of param_specs must be PartitionSpecs"),
        (of_chain(param_specs=P(), reduction="max"), "reduction='max': must be"),
        (lambda: jax.jit(step_of(chain))(chain_params(), chain_batch()), "call it outside of jax"),
        (lambda: step_of(chain).by_stage(jax.device_get(chain_params())), "put all there by"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()

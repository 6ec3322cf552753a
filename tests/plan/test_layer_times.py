"""FLOPs in closed form against XLA's analysis of the compiled layer, embedding and head."""

import jax
import jax.numpy as jnp
import pytest
from helpers.stage_configs import config_of

from maxpipe.config.options import update
from maxpipe.model.layers import SideInputs
from maxpipe.model.parameters import map_specs, trainable, with_trainable
from maxpipe.model.program import ModelProgram
from maxpipe.plan.layer_times import first_layers, layer_times

ROWS = 2


class Compiled:
    """FLOPs of the parts of a model by XLA, on one device and without loops."""

    def __init__(self, config):
        self.program, length = ModelProgram(config.model), config.data.sequence_length
        shapes = map_specs(
            lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), self.program.specs
        )
        ids = jax.ShapeDtypeStruct((ROWS, length), jnp.int32)
        row = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
        self.x = jax.ShapeDtypeStruct((ROWS, length, config.model.embed_dim), jnp.float32)
        self.weights = jax.ShapeDtypeStruct((ROWS, length), jnp.float32)
        self.side = SideInputs(ids, ids, row)
        self.ids, self.layer = ids, shapes["layers"]
        self.outer = {name: shapes[name] for name in ("embed", "head")}

    def forward(self):
        return flops(self._block, self.layer, self.x, self.side)

    def backward(self, *argnums):
        return self._backward(self._block, self.layer, *argnums) - self.forward()

    def first_layer(self):
        layer = self.outer["embed"]["first"]["0"]
        forward = flops(self._first_block, layer, self.x, self.side)
        return forward, self._backward(self._first_block, layer, 0, 1) - forward

    def _backward(self, block, layer, *argnums):
        def both(layer, x, side, gradient):
            y, pull = jax.vjp(lambda *args: block(*args, side), layer, x)
            return y, [pull(gradient)[i] for i in argnums]

        return flops(both, layer, self.x, self.side, self.x)

    def trained(self):

        def both(moving, layer, x, side, gradient):
            def f(moving, x):
                return self._block(with_trainable(layer, moving), x, side)

            y, pull = jax.vjp(f, moving, x)
            return y, pull(gradient)

        moving = trainable(self.program.specs["layers"], self.layer)
        return flops(both, moving, self.layer, self.x, self.side, self.x) - self.forward()

    def head(self, *, is_frozen=False):
        argnums = 1 if is_frozen else (0, 1)
        loss = jax.value_and_grad(lambda *args: self.program.head_loss(*args)[0], argnums=argnums)
        return flops(loss, self.outer, self.x, self.ids, self.weights)

    def _block(self, layer, x, side):
        return self.program.block(layer, x, side, None)[0]

    def _first_block(self, layer, x, side):
        return self.program.first_block(layer, x, side, None)


def flops(f, *args):
    return jax.jit(f).lower(*args).compile().cost_analysis()["flops"]


@pytest.fixture(scope="module")
def config():
    wide = {"model.embed_dim": 512, "model.num_kv_heads": 2, "model.mlp_dim": 1024}
    wide |= {"model.vocab_size": 2048, "model.dtype": "float32"}
    return config_of(**wide, **{"pipeline.remat_policy": "none"})


@pytest.fixture(scope="module")
def compiled(config):
    return Compiled(config)


@pytest.fixture(scope="module")
def unit(config):
    model, tokens = config.model, ROWS * config.data.sequence_length
    heads, kv_heads = model.num_query_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = model.embed_dim * (2 * heads + 2 * kv_heads + 3 * model.mlp_dim)
    return 2 * tokens * weights, 2 * tokens * heads * config.data.sequence_length


# What is left out comes to about one per cent at this width.
TOLERANCE = 0.02


def test_a_layer(config, compiled, unit):
    weights, attention = unit
    times = layer_times(config)
    layer = weights + attention
    assert compiled.forward() == pytest.approx(layer + attention, rel=TOLERANCE)
    assert compiled.backward(1) == pytest.approx(
        times.input_gradient * layer + 2 * attention, rel=TOLERANCE
    )
    both = (times.input_gradient + times.weight_gradient) * layer + 2 * attention
    assert compiled.backward(0, 1) == pytest.approx(both, rel=TOLERANCE)


def test_the_head(config, compiled, unit):
    assert compiled.head() == pytest.approx(layer_times(config).head * sum(unit), rel=TOLERANCE)


def test_base_of_adapters_has_no_gradients_of_weights(config, unit):
    adapted = update(config, {"model.lora.rank": 64, "model.lora.targets": ["all-linear"]})
    compiled, times = Compiled(adapted), layer_times(adapted)
    forward, attention = compiled.forward(), unit[1]
    both = times.input_gradient + times.weight_gradient
    expected = both * (forward - attention) + 2 * attention
    assert compiled.trained() == pytest.approx(expected, rel=TOLERANCE)
    assert compiled.head(is_frozen=True) == pytest.approx(
        times.head * (forward - attention), rel=TOLERANCE
    )


def test_first_dense_layers_are_those_compiled(config, unit):
    """Two of them, in units of a layer with a router and two of four experts."""
    mixture = {"experts": 4, "per_token": 2, "mlp_dim": 256}
    values = {f"model.moe.{key}": value for key, value in mixture.items()}
    changes = values | {"model.num_layers": 18, "model.first_dense_layers": 2}
    mixed = update(config, changes)
    model, tokens = mixed.model, ROWS * mixed.data.sequence_length
    weights, attention = unit
    per_token = model.embed_dim * (3 * model.mlp_dim - model.moe.experts - 2 * 3 * 256)
    other_layer = weights - 2 * tokens * per_token + attention
    forward, backward = Compiled(mixed).first_layer()
    times = first_layers(mixed)
    assert times.forward * other_layer == pytest.approx(2 * (forward - attention), rel=TOLERANCE)
    both = times.input_gradient + times.weight_gradient
    assert both * other_layer == pytest.approx(2 * (backward - 2 * attention), rel=TOLERANCE)


def test_first_dense_layers_are_computed_again_once():
    changes = {"model.moe.experts": 4, "model.num_layers": 18, "model.first_dense_layers": 2}
    twice = {"pipeline.remat_policy": "full", "pipeline.remat_layers": True}  # for other layers
    none, full = (
        first_layers(config_of(**changes | values))
        for values in ({"pipeline.remat_policy": "none"}, twice)
    )
    assert full.input_gradient - none.input_gradient == pytest.approx(none.forward)
    assert (full.forward, full.weight_gradient) == (none.forward, none.weight_gradient)


def test_what_is_computed_again_counts():
    for values, more in (
        ({"pipeline.remat_policy": "full"}, 1.0),
        ({"pipeline.remat_policy": "full", "pipeline.remat_layers": True}, 2.0),
        ({"pipeline.remat_policy": "full", "pipeline.remat_iterations": False}, 0.0),
        ({"pipeline.remat_policy": "minimal"}, 0.0),
        ({"pipeline.remat_policy": "none"}, 0.0),
    ):
        none = layer_times(config_of(**{"pipeline.remat_policy": "none"}))
        times = layer_times(config_of(**values))
        assert times.input_gradient == pytest.approx(none.input_gradient + more), (values, more)
        assert (times.weight_gradient, times.head) == (none.weight_gradient, none.head)


def test_a_policy_that_keeps_one_product_saves_its_share():
    full, kept = (
        layer_times(config_of(**{"pipeline.remat_policy": p})).input_gradient
        for p in ("full", "save_out_proj")
    )
    products = 64 * (4 * 64 + 3 * 192) + 64 * 32
    assert full - kept == pytest.approx(64 * 64 / products)

"""Products in 8 bits against float64, their gradients, and values without a usable scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import LATENT, tiny

from maxpipe.model.layers import SideInputs, input_gradient, project, weight_gradient
from maxpipe.model.parameters import init_params
from maxpipe.model.program import ModelProgram
from maxpipe.model.quantisation import FORMATS, project_quantised
from maxpipe.pipeline.jaxprs import inner_jaxprs, open_jaxpr

# Root mean square of the error over that of the product, of normal operands; docs/quantisation.md.
BOUNDS = {"int8": 0.014, "fp8": 0.040}
SHAPES = {1: ((2, 3, 96), (96, 5, 6)), 2: ((2, 3, 8, 12), (8, 12, 6))}
LETTERS = {1: "bti,iho->btho", 2: "btih,iho->bto"}
TOKENS = (2, 3)


def operands(contracted, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 5)
    x_shape, w_shape = SHAPES[contracted]
    outputs = w_shape[contracted:]
    tokens = jnp.exp(3 * jax.random.normal(keys[0], (*TOKENS, *[1] * contracted)))
    channels = jnp.exp(3 * jax.random.normal(keys[1], outputs))
    x = tokens * jax.random.normal(keys[2], x_shape)
    weight = channels * jax.random.normal(keys[3], w_shape)
    cotangent = jax.random.normal(keys[4], (*TOKENS, *outputs))
    return x.astype(dtype), weight.astype(dtype), cotangent.astype(dtype)


def product(form, contracted, *, is_full=False):
    def multiply(x, weight):
        return project_quantised(FORMATS[form], is_full, x, weight, contracted)

    return multiply


def rms_error(actual, exact, sizes):
    exact = np.asarray(exact, np.float64) / sizes
    difference = np.asarray(actual, np.float64) / sizes - exact
    return np.sqrt(np.mean(difference**2) / np.mean(exact**2))


@pytest.mark.parametrize(("form", "contracted"), zip(FORMATS, SHAPES, strict=True))
def test_error_of_a_product_is_bounded_whatever_the_size_of_tokens_and_channels(form, contracted):
    x, weight, _ = operands(contracted)
    exact = np.einsum(LETTERS[contracted], np.float64(x), np.float64(weight))
    summed = tuple(range(2, x.ndim)), tuple(range(contracted))
    tokens = np.linalg.norm(np.reshape(x, (*TOKENS, -1)), axis=-1)
    tokens = np.expand_dims(tokens, tuple(range(2, exact.ndim)))
    channels = np.sqrt(np.sum(np.square(weight), axis=summed[1]))
    error = rms_error(product(form, contracted)(x, weight), exact, tokens * channels)
    assert BOUNDS[form] / 3 < error < BOUNDS[form]


@pytest.mark.parametrize("form", FORMATS)
def test_forward_has_the_gradients_of_a_product_that_rounds_nothing(form):
    x, weight, cotangent = operands(1)
    actual = jax.vjp(product(form, 1), x, weight)[1](cotangent)
    expected = jax.vjp(project, x, weight)[1](cotangent)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("contracted", SHAPES)
def test_full_quantises_the_gradient_of_activations_and_not_that_of_weights(form, contracted):
    x, weight, cotangent = operands(contracted)
    dx, dw = jax.vjp(product(form, contracted, is_full=True), x, weight)[1](cotangent)
    np.testing.assert_array_equal(dw, weight_gradient(x, cotangent, contracted))
    exact = np.asarray(input_gradient(cotangent, weight, contracted))
    error = rms_error(dx, exact, 1.0)
    assert BOUNDS[form] / 5 < error < BOUNDS[form]


def operand_dtypes(jaxpr):
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "dot_general":
            yield tuple(v.aval.dtype.name for v in eqn.invars)
        for inner in inner_jaxprs(eqn):
            yield from operand_dtypes(inner)


@pytest.mark.parametrize("form", FORMATS)
def test_products_take_two_operands_of_8_bits_each(form):
    x, weight, cotangent = operands(1, jnp.bfloat16)

    def gradients(x, weight, cotangent):
        y, vjp = jax.vjp(product(form, 1, is_full=True), x, weight)
        return y, *vjp(cotangent)

    # Results and gradients have the dtype of activations.
    results = jax.eval_shape(gradients, x, weight, cotangent)
    assert [a.dtype for a in results] == [jnp.bfloat16] * 3
    name = jnp.dtype(FORMATS[form].dtype).name
    of_weight = ("bfloat16", "bfloat16")
    pairs = sorted(operand_dtypes(jax.make_jaxpr(gradients)(x, weight, cotangent)))
    assert pairs == sorted([(name, name), (name, name), of_weight])


@pytest.mark.parametrize("form", FORMATS)
def test_tokens_of_any_size_have_finite_products(form):
    x, weight, _ = operands(1)
    multiply = jax.jit(product(form, 1))
    plain = multiply(x.at[0, 0].set(1.0), weight)
    for size in (0.0, 1e-37, 1e30):
        y = multiply(x.at[0, 0].set(size), weight)
        np.testing.assert_array_equal(np.delete(y, 0, 1), np.delete(plain, 0, 1))
        expected = np.where(size < 1e-30, 0, size) * plain[0, 0]
        np.testing.assert_allclose(y[0, 0], expected, rtol=1e-5)
    # What is not finite stays so for its token alone.
    for value in (np.nan, np.inf):
        y = np.asarray(multiply(x.at[0, 1, 3].set(value), weight))
        assert not np.isfinite(y[0, 1]).any()
        assert np.isfinite(np.delete(y.reshape(6, 5, 6), 1, 0)).all()


@pytest.mark.parametrize(
    ("others", "count"),
    [({}, 7), (LATENT, 10), ({"model.lora.rank": 2}, 7), ({"model.attention_bias": True}, 7)],
)
def test_projections_of_a_layer_are_quantised_and_neither_adapters_nor_the_head(others, count):
    config = tiny(**{"model.quantisation": "int8"} | others).model
    program = ModelProgram(config)
    params = {n: init_params(specs, jax.random.key(0)) for n, specs in program.specs.items()}
    x, ids = jnp.zeros((1, 8, config.embed_dim)), jnp.zeros((1, 8), jnp.int32)
    side = SideInputs(ids, ids, ids[0], ids[0, 0])
    layer = [*operand_dtypes(jax.make_jaxpr(program.block)(params["layers"], x, side, None))]
    assert layer.count(("int8", "int8")) == count
    adapters = 2 * 7 if config.lora.rank else 0
    assert layer.count(("float32", "float32")) == adapters + 2  # two of attention
    assert [*operand_dtypes(jax.make_jaxpr(program.logits)(params, x))] == [("float32", "float32")]

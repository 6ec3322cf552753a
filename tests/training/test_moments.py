"""Moments in bfloat16: rounding without bias, equal on every layout, resumed to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from helpers.trainers import assert_same_bits, placed, run

from maxpipe.builder import build_trainer
from maxpipe.model.program import ModelProgram
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.moments import sources, to_bfloat16
from maxpipe.training.update import Optimizer

NARROW = {"optimizer.moment_dtype": "bfloat16"}


@pytest.mark.parametrize("x", [1.0003, -3.14159, 1e-30, 0.0, 1.9999999, -2.0])
def test_mean_over_all_bits_is_the_number_itself(x):
    x = np.float32(x)
    results = jax.jit(to_bfloat16)(jnp.full(2**16, x), jnp.arange(2**16, dtype=jnp.uint16))
    rounded = np.asarray(results).astype(np.float64)
    np.testing.assert_allclose(rounded.mean(), np.float64(x), rtol=1e-12)
    # They are the two neighbours, or the number alone.
    assert len(np.unique(rounded)) == (1 if x in (0.0, -2.0) else 2)
    assert np.abs(rounded - x).max() <= 2**-7 * abs(x)


def updated(arrange, layer_index, name="adamw"):
    """Return the moments of a layout after two updates with the same gradients, as {path: array}.

    `arrange` maps a tree {"embed", "layers", "head"}, layers [4, ...], to the layout.
    """
    config = tiny(**NARROW, **{"optimizer.name": name})
    specs = ModelProgram(config.model).specs
    rng = np.random.default_rng(0)

    def draw(spec, *layers):
        return rng.standard_normal((*layers, *spec.shape), np.float32)

    is_spec = {"is_leaf": lambda node: hasattr(node, "axes")}
    trees = [
        {
            part: jax.tree.map(
                lambda s, part=part: draw(s, *[4] * (part == "layers")), tree, **is_spec
            )
            for part, tree in specs.items()
        }
        for _ in range(3)
    ]
    params, *gradients = map(arrange, trees)
    optimizer = Optimizer(config.optimizer, arrange(specs), layer_index=layer_index)
    state = optimizer.init(params)
    for step, gradient in enumerate(gradients):
        rest = jnp.int32(step), jnp.float32(1), jnp.bool_(True)
        params, state = jax.jit(optimizer.update)(params, gradient, state, *rest)
    return state


def rows(tree, chosen):
    return jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "axes") else leaf[np.array(chosen)], tree
    )


def test_every_layout_draws_the_same():
    index = np.arange(4).reshape(2, 2, 1)

    def stacked(tree):
        def reshape(leaf):
            return leaf if hasattr(leaf, "axes") else leaf.reshape(2, 2, 1, *leaf.shape[1:])

        return tree | {"layers": jax.tree.map(reshape, tree["layers"])}

    def second_stage(tree):
        chunks = {chunk: rows(tree["layers"], [2 * chunk, 2 * chunk + 1]) for chunk in (0, 1)}
        return {"chunks": chunks, "head": tree["head"]}

    flat = updated(lambda tree: tree, np.arange(4))
    assert {x.dtype for x in jax.tree.leaves(flat) if x.ndim} == {jnp.dtype("bfloat16")}
    folded = updated(stacked, index)
    staged = updated(second_stage, (np.array([0, 1]), np.array([2, 3])))
    for of, moment in ((flat.mu, "mu"), (flat.nu, "nu")):
        of_folded, of_staged = getattr(folded, moment), getattr(staged, moment)
        expected = stacked(of)
        assert_same_bits(of_folded, expected)
        assert_same_bits(of_staged, second_stage(of))


def test_layers_moments_steps_and_parameters_draw_apart():
    config = tiny()
    of = sources(ModelProgram(config.model).specs, np.arange(4))["layers"]["mlp"]
    shape = (4, 16, 32)
    drawn = [
        np.asarray(source.draw(jnp.int32(step), number, shape))
        for source in (of["up"], of["gate"])
        for step in (0, 1)
        for number in (1, 2)
    ]
    different = [layer.tobytes() for bits in drawn for layer in bits]
    assert len(set(different)) == len(different) == 8 * 4
    # Uniform, also along rows, columns and layers.
    bits = np.stack(drawn).reshape(-1, *shape) / 2**16 - 0.5
    assert abs(bits.mean()) < 0.01
    assert abs(bits.var() * 12 - 1) < 0.02
    for axis in range(4):
        neighbours = np.take(bits, range(1, bits.shape[axis]), axis)
        others = np.take(bits, range(bits.shape[axis] - 1), axis)
        assert abs(12 * (neighbours * others).mean()) < 0.05


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("schedule=circular stage=2 fsdp=2 num_repeats=2", "muon"),
        pytest.param(
            "schedule=1f1b stage=2 layers_per_stage=[3,1]", "adamw", marks=pytest.mark.slow
        ),
        pytest.param("engine=sequential fsdp=2", "adamw", marks=pytest.mark.slow),
        pytest.param("schedule=lockstep_1f1b stage=2", "lion", marks=pytest.mark.slow),
    ],
)
def test_run_resumes_to_the_bit(words, name):
    config = tiny(f"{words} global_batch_size=16", **NARROW, **{"optimizer.name": name})
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)
    place = BatchPlacer(mesh, trainer.batch_spec, 16)
    state, _ = run(trainer, place, trainer.init(jax.random.key(0)), range(4), 16)
    halfway, _ = run(trainer, place, trainer.init(jax.random.key(0)), range(2), 16)
    saved = trainer.to_canonical(halfway)
    assert jnp.dtype("bfloat16") in {leaf.dtype for leaf in jax.tree.leaves(saved.opt_state)}
    again = trainer.from_canonical(placed(trainer, saved))
    again, _ = run(trainer, place, again, range(2, 4), 16)
    assert_same_bits(trainer.to_canonical(again), trainer.to_canonical(state))

"""The reference equals a plain loop, whatever the microbatches, mesh and rematerialisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import TOLERANCE, EngineUnderTest, canonical_params, make_batch, tiny

from maxpipe.model.layers import SideInputs
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.jaxprs import CHECKPOINTS, inner_jaxprs, open_jaxpr

ROWS = 16


def sequential(words=""):
    return tiny(f"engine=sequential dropout=0.2 global_batch_size={ROWS} {words}")


def by_hand(config, batch, key):
    """Compute a batch's losses without scan, rematerialisation or microbatches.

    Returns:
      ((sum of the losses, (that of tokens, auxiliary ones)), gradients of the sum).
    """
    program = ModelProgram(config.model)
    side = SideInputs(batch["positions"], batch["segment_ids"], jnp.arange(ROWS))

    def loss(params):
        x, of_sequences = program.embed(params, batch["tokens"]), program.no_auxiliary()
        for i in range(config.model.num_layers):
            layer = jax.tree.map(lambda p, i=i: p[i], params["layers"])
            x, aux = program.block(layer, x, side, jax.random.fold_in(key, i))
            of_sequences = jax.tree.map(jnp.add, of_sequences, aux)
        of_tokens, _ = program.head_loss(params, x, batch["targets"], batch["weights"])
        of_tokens /= jnp.sum(batch["weights"])
        means = jax.tree.map(lambda a: a / ROWS, of_sequences)
        return of_tokens + sum(means.values()), (of_tokens, means)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(canonical_params(program))


def test_sequential_equals_a_plain_loop_over_layers():
    config = sequential("z_loss=0.01 tie_embeddings=true block=balanced")
    batch = make_batch(ROWS)
    (_, (loss, means)), gradients = by_hand(config, batch, jax.random.key(0))
    actual = EngineUnderTest(config).train(batch)
    assert actual.loss == pytest.approx(float(loss), rel=TOLERANCE)
    assert actual.auxiliary == pytest.approx(jax.tree.map(float, means), rel=TOLERANCE)
    assert set(means) == {"size_loss"}
    for a, b in zip(jax.tree.leaves(actual.gradients), jax.tree.leaves(gradients), strict=True):
        assert np.max(np.abs(a - b)) <= TOLERANCE * np.max(np.abs(b))


def test_evaluate_is_the_training_loss_without_dropout_and_z_loss():
    batch = make_batch(ROWS)
    sums = EngineUnderTest(sequential("z_loss=0.01")).evaluate(batch)
    plain = EngineUnderTest(sequential("dropout=0.0")).train(batch)
    assert sums["weight"] == batch["weights"].sum()
    assert sums["cross_entropy"] / sums["weight"] == pytest.approx(plain.loss, rel=TOLERANCE)


def products(jaxpr, size):
    total = 0
    for eqn in open_jaxpr(jaxpr).eqns:
        sizes = [n for atom in (*eqn.invars, *eqn.outvars) for n in atom.aval.shape]
        total += eqn.primitive.name == "dot_general" and size in sizes
        total += sum(products(inner, size) for inner in inner_jaxprs(eqn))
    return total


@pytest.mark.parametrize("tiles", [1, 2])
def test_logits_are_computed_once(tiles):
    """In a step logits and the gradients of both operands are a product each."""
    subject = EngineUnderTest(sequential(f"vocab_size=96 logit_tiles={tiles}"))
    assert products(subject.traced(), 96) == 3


def test_scan_layers_false_writes_every_layer_out():
    looped, written = (
        products(EngineUnderTest(sequential(f"scan_layers={scan} mlp_dim=96")).traced(), 96)
        for scan in (True, False)
    )
    assert written == 4 * looped > 0


def gathers(jaxpr, shape, *, in_layer=False):
    """Count what a jaxpr lays out of a shape: [in what is rematerialised, elsewhere]."""
    counts = np.zeros(2, int)
    for eqn in jaxpr.eqns:
        is_one = eqn.primitive.name == "sharding_constraint" and eqn.outvars[0].aval.shape == shape
        counts += is_one * np.array([in_layer, not in_layer])
        within = in_layer or eqn.primitive.name in CHECKPOINTS
        for inner in inner_jaxprs(eqn):
            counts += gathers(open_jaxpr(inner), shape, in_layer=within)
    return counts


@pytest.mark.parametrize(
    ("microbatches", "scan", "in_layer"), [(2, False, False), (1, False, True), (2, True, True)]
)
def test_weights_that_xla_holds_for_all_microbatches_are_not_gathered_again(
    microbatches, scan, in_layer
):
    """Those of layers that are compiled each by itself: XLA gathers them before the loop."""
    config = sequential(f"num_microbatches={microbatches} scan_layers={scan} fsdp=4 mlp_dim=96")
    within, elsewhere = gathers(
        EngineUnderTest(config).traced().jaxpr, (config.model.embed_dim, 96)
    )
    assert bool(within) is in_layer
    assert elsewhere > 0  # by the forward

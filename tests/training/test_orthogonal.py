"""Several devices orthogonalise matrices as one does, and share the work."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from helpers.trainers import run

from maxpipe.builder import build_trainer
from maxpipe.compile.hlo import executions, parse
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.layout import LAYER_AXES
from maxpipe.pipeline.weights import Weights
from maxpipe.sharding.rules import AxisRules
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.update import Optimizer

MUON = {"optimizer.name": "muon", "optimizer.learning_rate": 1e-2, "optimizer.schedule": "constant"}
EXPERTS = "moe.experts=4 moe.dispatch=all_to_all first_dense_layers=1 num_layers=5"


def updated(words, on_mesh):
    """Return (parameters after an update with drawn gradients, HLO of the update)."""
    config = tiny(words if "stage" in words else f"engine=sequential {words}", **MUON)
    specs = ModelProgram(config.model).specs
    mesh = make_mesh(config)
    rules = AxisRules(config.sharding.logical_axis_rules, mesh)
    layers = config.model.stacked_layers
    weights = Weights(
        rules, specs, LAYER_AXES, (1, mesh.shape["stage"], layers // mesh.shape["stage"])
    )
    rng = np.random.default_rng(0)
    drawn = [
        jax.tree.map(lambda p: rng.standard_normal(p.shape, np.float32), weights.abstract())
        for _ in range(2)
    ]
    shardings = weights.shardings() if on_mesh else None
    if on_mesh:
        drawn = [jax.device_put(tree, shardings) for tree in drawn]
    optimizer = Optimizer(config.optimizer, specs, shardings=shardings)
    state = jax.jit(optimizer.init)(drawn[0])
    rest = jnp.int32(0), jnp.float32(1), jnp.bool_(True)
    update = jax.jit(optimizer.update).lower(*drawn, state, *rest).compile()
    return update(*drawn, state, *rest)[0], update.as_text()


def product_flops(hlo):
    def sizes(text):
        return [int(size) for size in re.search(r"\[([\d,]*)\]", text)[1].split(",") if size]

    flops = 0
    for computation, i, runs in executions(parse(hlo)):
        if i.opcode == "dot":
            left = sizes(computation.instructions[i.operands[0]].type)
            summed = re.search(r"lhs_contracting_dims=\{(\d+)\}", i.attributes)
            flops += 2 * runs * math.prod(sizes(i.type)) * left[int(summed[1])]
    return flops


FIRST = [
    ("fsdp=2 data=2 context=2 num_layers=8", 8),
    ("fsdp=2 tensor=2", 4),
    ("stage=2 fsdp=4 num_layers=2", None),  # some devices have nothing to do
    # Experts stay where they are; a first dense layer lies over all stages.
    (f"stage=2 fsdp=2 {EXPERTS}", None),
]
FURTHER = [
    ("fsdp=4", 4),
    ("stage=2 fsdp=2", 4),
    (f"expert=2 fsdp=2 data=2 {EXPERTS}", None),
]


@pytest.mark.parametrize(
    ("words", "share"), [*FIRST, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)]
)
def test_devices_share_the_products_and_update_as_one_does(words, share):
    params, hlo = updated(words, on_mesh=True)
    expected, alone = updated(words, on_mesh=False)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    if share:
        assert product_flops(hlo) == product_flops(alone) / share > 0
    # Matrices are sent once and back, not in each product.
    assert "all-reduce" not in hlo
    assert "all-to-all" in hlo


def losses(words):
    config = tiny(f"{words} global_batch_size=16", **MUON)
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)
    place = BatchPlacer(mesh, trainer.batch_spec, 16)
    _, metrics = run(trainer, place, trainer.init(jax.random.key(0)), range(3), 16)
    return [float(step["loss"]) for step in metrics]


@pytest.fixture(scope="module")
def losses_of_one_device():
    return losses("engine=sequential")


SLOW = [
    "schedule=circular stage=2 fsdp=2 num_repeats=2",
    "schedule=gpipe stage=2 data=2",
    "schedule=lockstep_1f1b stage=2 fsdp=2",
]


@pytest.mark.parametrize(
    "words",
    [
        "schedule=1f1b stage=2 fsdp=2 layers_per_stage=[3,1]",
        *(pytest.param(words, marks=pytest.mark.slow) for words in SLOW),
    ],
)
def test_losses_are_those_of_one_device_on_every_engine(words, losses_of_one_device):
    np.testing.assert_allclose(losses(words), losses_of_one_device, rtol=1e-5)

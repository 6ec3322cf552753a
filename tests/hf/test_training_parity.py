"""Losses and gradients from imported weights are those of torch, recorded in tests/golden/hf."""

import dataclasses

import jax
import numpy as np
import pytest
from helpers.engines import make_mesh
from helpers.hf_models import LENGTH, OPTIMIZER, ROWS, STEPS, TRAINED, batch, probe, recorded
from helpers.hf_parameters import config_of, gradients_of, parameters_of

from maxpipe.builder import build_trainer
from maxpipe.config import Config, replace, resolve
from maxpipe.training.batches import BatchPlacer

TOLERANCE = 1e-4  # of a loss, and of the norm of a gradient
TWO_STAGES = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
LAYOUTS = {
    "sequential": {"pipeline.engine": "sequential"},
    "lockstep_1f1b": TWO_STAGES
    | {"pipeline.schedule": "lockstep_1f1b", "pipeline.num_repeats": 2, "mesh.ici.fsdp": 2},
    "zb_v": TWO_STAGES | {"pipeline.schedule": "zb_v", "pipeline.num_repeats": 2},
}


def trainer_of(layout):
    """Return (trainer, place, state) with the imported weights."""
    values = {f"optimizer.{key}": value for key, value in OPTIMIZER.items()}
    values |= {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0, "steps": STEPS}
    values |= {"data.sequence_length": LENGTH, "data.global_batch_size": ROWS, "eval.every": 0}
    config = replace(Config(), **values, **LAYOUTS[layout])
    config = dataclasses.replace(config, model=config_of(TRAINED).model)
    config = resolve(config, config.mesh.ici.stage * config.mesh.ici.fsdp)
    mesh = make_mesh(config)
    trainer = build_trainer(config, mesh)
    leaves = parameters_of(TRAINED, config.model)

    def read(path, like):
        leaf = leaves
        for key in path:
            leaf = leaf[key]
        return jax.device_put(leaf, like.sharding)

    state = trainer.replace_parameters(trainer.init(jax.random.key(0)), read)
    return trainer, BatchPlacer(mesh, trainer.batch_spec, ROWS), state


@pytest.mark.parametrize(
    "layout",
    [pytest.param(n, marks=[] if n == "lockstep_1f1b" else [pytest.mark.slow]) for n in LAYOUTS],
)
def test_losses_of_20_steps_are_those_of_torch(layout):
    trainer, place, state = trainer_of(layout)
    losses = []
    for step in range(STEPS):
        tokens, targets = batch(step)
        state, metrics = trainer.step(
            state,
            place(
                {
                    "tokens": tokens,
                    "targets": targets,
                    "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape),
                    "segment_ids": np.ones_like(tokens),
                    "weights": np.ones(tokens.shape, np.float32),
                }
            ),
        )
        losses.append(float(metrics["loss"]))
    expected = recorded("training")["losses"]
    assert losses[-1] < 0.9 * losses[0]
    assert np.abs(np.asarray(losses) - expected).max() <= TOLERANCE


def test_gradients_are_those_of_torch():
    loss, gradients = gradients_of(TRAINED, *batch(0))
    golden = recorded("training")
    assert abs(loss - golden["losses"][0]) <= TOLERANCE
    assert gradients.keys() == golden["gradients"].keys()
    for name, gradient in gradients.items():
        expected = golden["gradients"][name]
        tolerance = TOLERANCE * expected["norm"]
        assert abs(np.linalg.norm(gradient) - expected["norm"]) <= tolerance, name
        product = float((gradient * probe(name, gradient.shape)).sum())
        assert abs(product - expected["product"]) <= tolerance, name

"""The MPMD engine on the same fixed parameters and batches as `engines.EngineUnderTest`."""

import dataclasses
from typing import Any

import jax
import numpy as np

from helpers.engines import Result, canonical_params, make_mesh
from maxpipe.builder import build_trainer
from maxpipe.config import Config
from maxpipe.model.program import ModelProgram
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.mpmd_trainer import MpmdTrainer


class MpmdUnderTest:
    """An engine with a live state whose parameters are `canonical_params`."""

    def __init__(self, config: Config):
        self.mesh = make_mesh(config)
        trainer = build_trainer(config, self.mesh)
        assert isinstance(trainer, MpmdTrainer)
        self.engine = trainer
        self.pipeline = self.engine.pipeline
        shapes = self.engine.abstract_canonical()
        params = canonical_params(ModelProgram(config.model))
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        state = dataclasses.replace(state, params=params)
        placed = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, shapes)
        self.state = self.engine.from_canonical(placed)

    def train(self, batch: dict[str, np.ndarray], key: int = 0, observe: Any = None) -> Result:
        drawn = jax.random.key(key) if self.pipeline.needs_key else None
        keys = [jax.device_put(drawn, stage.step.sharding) for stage in self.state.stages]
        params = [stage.params for stage in self.state.stages]
        loss, gradients = self.pipeline.loss_and_gradients(
            params, self.state.copies, self.place(batch), keys, observe
        )
        whole = {
            name: tree for stage in gradients for name, tree in stage.items() if name != "chunks"
        }
        chunks = {c: tree for stage in gradients for c, tree in stage["chunks"].items()}
        ordered = [chunks[c] for c in sorted(chunks)]
        whole["layers"] = jax.tree.map(
            lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *ordered
        )
        return Result(float(loss), jax.tree.map(np.asarray, whole))

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return BatchPlacer(self.mesh, self.engine.batch_spec, len(batch["tokens"]))(batch)

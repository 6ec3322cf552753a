"""The mpmd engine on the same fixed parameters and batches as `engines.EngineUnderTest`."""

import dataclasses

import jax
import numpy as np

from helpers.engines import Result, canonical_params, make_mesh, result_of
from maxpipe.builder import build_trainer
from maxpipe.config import Config
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.engines.base import Batch
from maxpipe.pipeline.engines.mpmd.runner import Observer
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.mpmd_trainer import MpmdTrainer


class MpmdUnderTest:
    """A trainer with a live state whose parameters are `canonical_params`."""

    def __init__(self, config: Config):
        self.mesh = make_mesh(config)
        trainer = build_trainer(config, self.mesh)
        assert isinstance(trainer, MpmdTrainer)
        self.trainer, self.engine = trainer, trainer.engine
        shapes = trainer.abstract_canonical()
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        state = dataclasses.replace(state, params=canonical_params(ModelProgram(config.model)))
        placed = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), state, shapes)
        self.state = trainer.from_canonical(placed)

    def train(
        self, batch: dict[str, np.ndarray], key: int = 0, observe: Observer | None = None
    ) -> Result:
        self.engine.observer = observe
        metrics, gradients = self.engine.loss_and_gradients(
            self.state.params, self.place(batch), jax.random.key(key)
        )
        outer = {n: tree for stage in gradients for n, tree in stage.items() if n != "chunks"}
        chunks = {c: tree for stage in gradients for c, tree in stage["chunks"].items()}
        in_order = [chunks[c] for c in sorted(chunks)]
        layers = jax.tree.map(lambda *leaf: self.engine.to_canonical(leaf), *in_order)
        return result_of(metrics, jax.tree.map(np.asarray, outer | {"layers": layers}))

    def evaluate(self, batch: dict[str, np.ndarray]) -> dict[str, float]:
        sums = self.engine.evaluate(self.state.params, self.place(batch))
        return {name: float(value) for name, value in sums.items()}

    def place(self, batch: dict[str, np.ndarray]) -> Batch:
        return BatchPlacer(self.mesh, self.engine.batch_spec, len(batch["tokens"]))(batch)

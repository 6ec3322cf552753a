"""Run an engine on a fixed batch, for comparison with the sequential engine.

Parameters come from NumPy and depend on their path, so that every engine starts from the same
canonical values. Constant parameters (norm scales, biases) are perturbed, because a gradient
through an exact 1 or 0 can hide a mistake.
"""

import dataclasses
import math
import zlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from maxpipe.builder import build_engine_inputs
from maxpipe.config import MESH_AXES, Config, ModelConfig, replace, resolve
from maxpipe.config.catalog import ENGINES
from maxpipe.config.imports import implementation
from maxpipe.devices.mesh import build_mesh
from maxpipe.model.layers import EXPERT_DROPS, EXPERT_LOAD
from maxpipe.model.parameters import Params, ParamSpec
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.weights import Weights

SEQUENCE_LENGTH = 8
VOCAB_SIZE = 64
TOLERANCE = 1e-5

TINY = {
    "model.num_layers": 4,
    "model.embed_dim": 16,
    "model.num_query_heads": 4,
    "model.num_kv_heads": 2,
    "model.mlp_dim": 32,
    "model.vocab_size": VOCAB_SIZE,
    "data.sequence_length": SEQUENCE_LENGTH,
    "data.global_batch_size": 16,
    "eval.every": 0,
}
LATENT = {
    "model.attention_kind": "mla",
    "model.num_kv_heads": 4,
    "model.mla.q_lora_rank": 12,
    "model.mla.kv_lora_rank": 8,
    "model.mla.qk_nope_head_dim": 4,
    "model.mla.qk_rope_head_dim": 2,
    "model.mla.v_head_dim": 6,
    "model.rope_interleaved": True,
}


@dataclass(frozen=True)
class Result:
    """Losses of a global batch and NumPy gradients, layers in model order.

    Attributes:
      loss: of tokens.
      gradients: of the sum of all losses.
      auxiliary: other losses by name.
      load: assignments of tokens to experts [N, E]; None without experts.
      drops: those of them above the capacity [N]; None without one.
    """

    loss: float
    gradients: Params
    auxiliary: dict[str, float] = dataclasses.field(default_factory=dict)
    load: np.ndarray | None = None
    drops: np.ndarray | None = None


def result_of(metrics: dict[str, Any], gradients: Params) -> Result:
    """Return what an engine's metrics and canonical gradients say."""
    metrics = jax.device_get(metrics)
    load, drops = metrics.pop(EXPERT_LOAD, None), metrics.pop(EXPERT_DROPS, None)
    values = {name: float(value) for name, value in metrics.items()}
    return Result(values.pop("loss"), gradients, values, load, drops)


def tiny(**values: Any) -> Config:
    """Return a resolved configuration of a very small model: `tiny(**{"mesh.ici.stage": 2})`."""
    config = replace(Config(), **(TINY | values))
    return resolve(config, math.prod(getattr(config.mesh.ici, axis) for axis in MESH_AXES))


def with_layers_outside(place: str, num_outside: int, **values: Any) -> Config:
    """Return two stages of two layers, four microbatches, and layers outside the pipeline.

    Args:
      place: of `pipeline.outside_layers`.
      num_outside: layers outside.
      **values: full key -> value, with one of `pipeline.schedule`.
    """
    inside = sum(values.get("pipeline.layers_per_stage", (2, 2)))
    return tiny(
        **{
            "pipeline.num_microbatches": 4,
            "pipeline.parallel_layers": inside,
            "pipeline.outside_layers": place,
            "model.num_layers": inside + num_outside,
            "mesh.ici.stage": 2,
        }
        | values
    )


def make_mesh(config: Config) -> jax.sharding.Mesh:
    """Build the mesh of a configuration over as many devices as it needs."""
    sizes = [getattr(config.mesh.ici, axis) for axis in MESH_AXES]
    return build_mesh(config, jax.devices()[: math.prod(sizes)])


def make_batch(rows: int, *, packed: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw tokens, weights from 0 to 2 (every fifth row 0) and segments of random lengths."""
    rng = np.random.default_rng(seed)
    shape = (rows, SEQUENCE_LENGTH)
    weights = rng.choice([0.0, 1.0, 1.0, 2.0], shape).astype(np.float32)
    weights[::5] = 0
    columns = np.arange(SEQUENCE_LENGTH)
    starts = (
        rng.integers(1, SEQUENCE_LENGTH, (rows, 1))
        if packed
        else np.full((rows, 1), SEQUENCE_LENGTH)
    )
    return {
        "tokens": rng.integers(0, VOCAB_SIZE, shape).astype(np.int32),
        "targets": rng.integers(0, VOCAB_SIZE, shape).astype(np.int32),
        "positions": np.where(columns < starts, columns, columns - starts).astype(np.int32),
        "segment_ids": np.where(columns < starts, 1, 2).astype(np.int32),
        "weights": weights,
    }


def canonical_params(program: ModelProgram) -> Params:
    """Draw {"embed", "layers" [num_layers, ...], "head"} as NumPy arrays, seeded by their paths."""

    def make(path: tuple[jax.tree_util.DictKey, ...], spec: ParamSpec) -> np.ndarray:
        leading = (program.config.stacked_layers,) if path[0].key == "layers" else ()
        # The first norm would magnify the rounding errors of activations near 0.
        stddev = 1.0 if path[-1].key == "embedding" else spec.stddev or 0.1
        rng = np.random.default_rng(zlib.crc32(jax.tree_util.keystr(path).encode()))
        return (rng.standard_normal((*leading, *spec.shape)) * stddev + spec.fill).astype(
            np.float32
        )

    return jax.tree_util.tree_map_with_path(
        make, program.specs, is_leaf=lambda x: isinstance(x, ParamSpec)
    )


class EngineUnderTest:
    """An engine with live parameters on its own mesh."""

    def __init__(self, config: Config, **options: Any):
        parts = build_engine_inputs(config, make_mesh(config))
        program, rules = parts.program, parts.rules
        self.pipeline = implementation(ENGINES[config.pipeline.engine])(parts, **options)
        self.batch_sharding = rules.sharding(("activation_batch", "activation_length"))
        leading = self.pipeline.layer_index().shape
        shardings = Weights(rules, program.specs, self.pipeline.layer_axes, leading).shardings()
        params = canonical_params(program)
        params["layers"] = jax.tree.map(self.pipeline.from_canonical, params["layers"])
        self.params = jax.device_put(params, shardings)
        self._step: Any = jax.jit(self.pipeline.loss_and_gradients)
        self._evaluate = jax.jit(self.pipeline.evaluate)

    def compile(self, batch: dict[str, np.ndarray]) -> Any:
        """Compile the program that `train` then runs on batches of these shapes."""
        self._step = self._step.lower(self.params, self._place(batch), jax.random.key(0)).compile()
        return self._step

    def train(self, batch: dict[str, np.ndarray], key: int = 0) -> Result:
        """Return the loss and the canonical gradients of a batch."""
        metrics, gradients = self._step(self.params, self._place(batch), jax.random.key(key))
        gradients = jax.tree.map(np.asarray, gradients)
        gradients["layers"] = jax.tree.map(self.pipeline.to_canonical, gradients["layers"])
        return result_of(metrics, gradients)

    def evaluate(self, batch: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the evaluation sums of a batch."""
        return {
            name: float(value)
            for name, value in self._evaluate(self.params, self._place(batch)).items()
        }

    def _place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        rows = len(batch["tokens"])
        axes = ("data", "fsdp", "expert")
        divides = rows % np.prod([self.batch_sharding.mesh.shape[a] for a in axes]) == 0
        target = self.batch_sharding if divides else None
        return {name: jax.device_put(jnp.asarray(x), target) for name, x in batch.items()}


@cache
def reference(model: ModelConfig, rows: int, *, packed: bool = True) -> Result:
    """Return the sequential engine's result on one device, without microbatches."""
    return sequential(model, rows).train(make_batch(rows, packed=packed))


@cache
def sequential(model: ModelConfig, rows: int) -> EngineUnderTest:
    """Return the sequential engine on one device, without microbatches."""
    values = {
        "pipeline.engine": "sequential",
        "pipeline.remat_policy": "none",
        "data.global_batch_size": rows,
    }
    return EngineUnderTest(dataclasses.replace(tiny(**values), model=model))


def assert_same(actual: Result, expected: Result, tolerance: float = TOLERANCE) -> None:
    """Assert that losses and gradients agree; the error of a leaf is max|a - b| / max|b|."""
    assert abs(actual.loss - expected.loss) <= tolerance * abs(expected.loss)
    assert actual.auxiliary.keys() == expected.auxiliary.keys()
    for name, value in expected.auxiliary.items():
        assert abs(actual.auxiliary[name] - value) <= tolerance * abs(value), name
    np.testing.assert_array_equal(actual.load, expected.load)
    np.testing.assert_array_equal(actual.drops, expected.drops)
    actual_leaves = dict(jax.tree_util.tree_leaves_with_path(actual.gradients))
    expected_leaves = dict(jax.tree_util.tree_leaves_with_path(expected.gradients))
    assert actual_leaves.keys() == expected_leaves.keys()
    wrong = {}
    for path, b in expected_leaves.items():
        a = actual_leaves[path]
        assert a.shape == b.shape, path
        if keystr(path).endswith("['moe']['bias']"):  # the load takes the place of its gradient
            assert not a.any(), path
            continue
        scale = np.max(np.abs(b))
        assert scale > 0, f"{path}: the expected gradient is zero everywhere"
        difference = np.max(np.abs(a - b)) / scale
        if not difference <= tolerance:
            wrong[keystr(path)] = float(difference)
    assert not wrong, f"relative differences: {wrong}"

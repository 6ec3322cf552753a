"""Run an engine on a fixed batch, for comparison with the sequential engine on one device.

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
import yaml
from jax.extend.core import ClosedJaxpr
from jax.tree_util import keystr

from maxpipe.builder import build_engine_inputs, build_trainer
from maxpipe.config import MESH_AXES, Config, ModelConfig, replace, resolve
from maxpipe.config.catalog import ENGINES
from maxpipe.config.imports import implementation
from maxpipe.config.options import OPTIONS
from maxpipe.devices.mesh import build_mesh
from maxpipe.model.block import LlamaBlock
from maxpipe.model.layers import EXPERT_DROPS, EXPERT_LOAD, SideInputs
from maxpipe.model.parameters import Params, ParamSpec
from maxpipe.model.program import ModelProgram
from maxpipe.pipeline.engines.base import Batch
from maxpipe.pipeline.engines.mpmd.runner import Observer
from maxpipe.pipeline.weights import Weights
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.mpmd_trainer import MpmdState, MpmdTrainer

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
SECTIONS = ("pipeline", "mesh.ici", "model", "data", "sharding")


def keys(words: str) -> dict[str, Any]:
    """Return full keys and values of words such as "schedule=1f1b fsdp=2 moe.experts=4"."""
    values = {}
    for word in words.split():
        name, _, text = word.partition("=")
        key = next(f"{s}.{name}" for s in SECTIONS if f"{s}.{name}" in OPTIONS)
        values[key] = text if OPTIONS[key].type is str else yaml.safe_load(text)
    return values


LATENT_WORDS = (
    "attention_kind=mla num_kv_heads=4 mla.q_lora_rank=12 mla.kv_lora_rank=8 "
    "mla.qk_nope_head_dim=4 mla.qk_rope_head_dim=2 mla.v_head_dim=6 rope_interleaved=true"
)
LATENT = keys(LATENT_WORDS)


@dataclass(frozen=True)
class Result:
    """Losses of a global batch and NumPy gradients of their sum, layers in model order."""

    loss: float  # of tokens
    gradients: Params
    auxiliary: dict[str, float] = dataclasses.field(default_factory=dict)
    load: np.ndarray | None = None  # assignments of tokens to experts [N, E]
    drops: np.ndarray | None = None  # those of them above the capacity [N]


def result_of(metrics: dict[str, Any], gradients: Params) -> Result:
    metrics = jax.device_get(metrics)
    load, drops = metrics.pop(EXPERT_LOAD, None), metrics.pop(EXPERT_DROPS, None)
    values = {name: float(value) for name, value in metrics.items()}
    return Result(values.pop("loss"), gradients, values, load, drops)


def tiny(words: str = "", /, **values: Any) -> Config:
    """Return a resolved configuration of a very small model, with words as in `keys`."""
    config = replace(Config(), **(TINY | keys(words) | values))
    return resolve(config, math.prod(getattr(config.mesh.ici, axis) for axis in MESH_AXES))


def make_mesh(config: Config) -> jax.sharding.Mesh:
    sizes = [getattr(config.mesh.ici, axis) for axis in MESH_AXES]
    return build_mesh(config, jax.devices()[: math.prod(sizes)])


def make_batch(rows: int, *, packed: bool = True, seed: int = 0) -> dict[str, np.ndarray]:
    """Draw tokens, weights from 0 to 2 (every fifth row 0) and segments of random lengths."""
    rng = np.random.default_rng(seed)
    shape = (rows, SEQUENCE_LENGTH)
    weights = rng.choice([0.0, 1.0, 1.0, 2.0], shape).astype(np.float32)
    weights[::5] = 0
    columns = np.arange(SEQUENCE_LENGTH)
    starts = np.full((rows, 1), SEQUENCE_LENGTH)
    if packed:
        starts = rng.integers(1, SEQUENCE_LENGTH, (rows, 1))
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
        values = rng.standard_normal((*leading, *spec.shape)) * stddev + spec.fill
        return values.astype(np.float32)

    is_spec = lambda x: isinstance(x, ParamSpec)  # noqa: E731
    return jax.tree_util.tree_map_with_path(make, program.specs, is_leaf=is_spec)


class BalancedBlock(LlamaBlock):
    """A block that adds a loss of each sequence, log(1 + mean square of the output)."""

    def __call__(
        self, x_BTD: jax.Array, side: SideInputs, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        y, _ = super().__call__(x_BTD, side, key)
        mean_square = jnp.mean(jnp.square(y.astype(jnp.float32)), axis=(1, 2))  # [B]
        return y, {"size_loss": jnp.sum(jnp.log1p(mean_square))}


class EngineUnderTest:
    def __init__(self, config: Config, **options: Any):
        self.rows = config.data.global_batch_size
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

    def traced(self) -> ClosedJaxpr:
        step = jax.make_jaxpr(self.pipeline.loss_and_gradients)
        return step(self.params, make_batch(self.rows), jax.random.key(0))

    def train(self, batch: dict[str, np.ndarray], key: int = 0) -> Result:
        metrics, gradients = self._step(self.params, self._place(batch), jax.random.key(key))
        gradients = jax.tree.map(np.asarray, gradients)
        gradients["layers"] = jax.tree.map(self.pipeline.to_canonical, gradients["layers"])
        return result_of(metrics, gradients)

    def evaluate(self, batch: dict[str, np.ndarray]) -> dict[str, float]:
        sums = self._evaluate(self.params, self._place(batch))
        return {name: float(value) for name, value in sums.items()}

    def _place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        rows = len(batch["tokens"])
        axes = ("data", "fsdp", "expert")
        divides = rows % np.prod([self.batch_sharding.mesh.shape[a] for a in axes]) == 0
        target = self.batch_sharding if divides else None
        return {name: jax.device_put(jnp.asarray(x), target) for name, x in batch.items()}


def mpmd_state(trainer: MpmdTrainer, config: Config) -> MpmdState:
    """Return a state of canonical parameters, as each process reads them from a checkpoint."""
    shapes = trainer.abstract_canonical()
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    state = dataclasses.replace(state, params=canonical_params(ModelProgram(config.model)))

    def place(x: np.ndarray, to: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(to.shape, to.sharding, lambda index: x[index])

    return trainer.from_canonical(jax.tree.map(place, state, shapes))


class MpmdUnderTest:
    def __init__(self, config: Config):
        self.mesh = make_mesh(config)
        trainer = build_trainer(config, self.mesh)
        assert isinstance(trainer, MpmdTrainer)
        self.trainer, self.engine = trainer, trainer.engine
        self.state = mpmd_state(trainer, config)

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


@cache
def reference(model: ModelConfig, rows: int, *, packed: bool = True) -> Result:
    return sequential(model, rows).train(make_batch(rows, packed=packed))


@cache
def sequential(model: ModelConfig, rows: int) -> EngineUnderTest:
    """Return the sequential engine on one device, without microbatches."""
    config = tiny(f"engine=sequential remat_policy=none global_batch_size={rows}")
    return EngineUnderTest(dataclasses.replace(config, model=model))


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


def under_test(config: Config, **options: Any) -> EngineUnderTest | MpmdUnderTest:
    is_mpmd = config.pipeline.engine == "mpmd"
    return MpmdUnderTest(config) if is_mpmd else EngineUnderTest(config, **options)


def on_one_device(config: Config) -> ModelConfig:
    """Return the model without what only says how several devices compute it."""
    moe = dataclasses.replace(config.model.moe, dispatch="auto")
    return dataclasses.replace(config.model, moe=moe, logit_tiles=1)


def assert_equals_one_device(
    config: Config, *, packed: bool = True, tolerance: float = TOLERANCE, **options: Any
) -> None:
    rows = config.data.global_batch_size
    actual = under_test(config, **options).train(make_batch(rows, packed=packed))
    assert_same(actual, reference(on_one_device(config), rows, packed=packed), tolerance)

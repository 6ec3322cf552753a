import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config import CheckpointConfig


class Samples:
    """Contents that follow from the step, so that what was restored can be checked by itself."""

    def mesh(self, rows, columns):
        return Mesh(np.asarray(jax.devices()[: rows * columns]).reshape(rows, columns), ("a", "b"))

    def state(self, step, rows=2, columns=4):
        """The dtypes, containers and layouts that a training state has."""
        random = np.random.default_rng(step)
        sharding = NamedSharding(self.mesh(rows, columns), PartitionSpec("a", "b"))
        weight = random.standard_normal((128, 64)).astype(np.float32)
        return {
            "params": {
                "weight": jax.device_put(weight, sharding),
                "scale": jnp.asarray(random.standard_normal(33), jnp.bfloat16),
            },
            "moments": (
                jnp.asarray(random.standard_normal((3, 5)), jnp.float32),
                {"empty": {}, "none": None},
            ),
            "key": jax.random.key_data(jax.random.key(step)),
            "host": random.integers(0, 255, (7,), dtype=np.uint8),
            "step": jnp.int32(step),
        }

    def iterator(self, step):
        return np.arange(12, dtype=np.int64).reshape(4, 3) + step * 2**40

    def meta(self, step):
        return {"config": {"model": {"num_layers": step}}, "versions": {"jax": "1.2.3"}}

    def abstract(self, state, sharded=True):
        def leaf(array):
            sharding = array.sharding if sharded and isinstance(array, jax.Array) else None
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        return jax.tree.map(leaf, state)

    def save(self, checkpointer, *steps):
        """Saves and commits steps; the last one is left to run in the background."""
        for step in steps:
            assert checkpointer.save(step, self.state(step), self.iterator(step), self.meta(step))

    def bits(self, array):
        """Dtype, shape and raw bytes."""
        array = np.asarray(array)
        return array.dtype.name, array.shape, array.tobytes()

    def assert_restored(self, restored, step):
        """`restored` is bit for bit what `save` wrote for this step."""
        assert restored.step == step
        expected = self.state(step)
        assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
        for got, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True):
            assert self.bits(got) == self.bits(wanted)
        assert self.bits(restored.iterator) == self.bits(self.iterator(step))
        assert restored.meta == self.meta(step)


@pytest.fixture(scope="session")
def samples():
    return Samples()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def said():
    """Warnings of `checkpointer`."""
    return []


@pytest.fixture
def checkpointer(directory, said):
    made = Checkpointer(directory, CheckpointConfig(every=10, keep=3), say=said.append)
    yield made
    made.close()

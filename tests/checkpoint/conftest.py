import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.config import CheckpointConfig
from maxpipe.storage.object_store import open_store


class Samples:
    """Contents that follow from the step, so that a restored state can be checked on its own."""

    def mesh(self, rows, columns):
        return Mesh(np.asarray(jax.devices()[: rows * columns]).reshape(rows, columns), ("a", "b"))

    def state(self, step, rows=2, columns=4):
        """Return a state with the dtypes, containers and layouts of a training state."""
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
        """Save steps; the last save may still run in the background."""
        for step in steps:
            assert checkpointer.save(step, self.state(step), self.iterator(step), self.meta(step))

    def bits(self, array):
        """Return dtype, shape and raw bytes."""
        array = np.asarray(array)
        return array.dtype.name, array.shape, array.tobytes()

    def assert_restored(self, restored, step):
        """Check that `restored` equals in every bit what `save` wrote for this step."""
        assert restored.step == step
        expected = self.state(step)
        assert jax.tree.structure(restored.state) == jax.tree.structure(expected)
        for actual, wanted in zip(
            jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True
        ):
            assert self.bits(actual) == self.bits(wanted)
        assert self.bits(restored.iterator) == self.bits(self.iterator(step))
        assert restored.meta == self.meta(step)


@pytest.fixture(scope="session")
def samples():
    return Samples()


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def messages():
    return []


@pytest.fixture
def checkpointer(directory, messages):
    made = Checkpointer(directory, CheckpointConfig(every=10, keep=3), log=messages.append)
    yield made
    made.close()


@pytest.fixture
def mirror_url(s3):
    bucket = f"bucket-{len(s3.list_buckets()['Buckets'])}"
    s3.create_bucket(Bucket=bucket)
    return f"s3://{bucket}/runs/base/checkpoints"


@pytest.fixture
def store(s3):
    return _store()


@pytest.fixture
def objects(store, mirror_url):
    def names():
        return sorted(path.partition("/checkpoints/")[2] for path in store.find(mirror_url))

    return names


@functools.cache
def _store():  # it takes longer to make than to use
    return open_store("s3://", "checkpoint.mirror")


@pytest.fixture
def start(directory, mirror_url, store, messages, samples):
    """Return start(*steps, **settings), like a new process: makes a checkpointer with a mirror, and
    saves the steps.
    """
    made = []

    def _start(*steps, **settings):
        settings = CheckpointConfig(**{"every": 10, "keep": 3} | settings)
        mirror = Mirror(mirror_url, store, settings.mirror_deadline_seconds)
        made.append(Checkpointer(directory, settings, mirror=mirror, log=messages.append))
        if steps:
            samples.save(made[-1], *steps)
            made[-1].close()
        return made[-1]

    yield _start
    for checkpointer in made:
        checkpointer.close()

"""Take arrays of the state from the stages to their layout on disk, and back.

On disk a layer parameter is [N, ...] in model order; the stages hold [L, ...] for each chunk. In
one process chunks are joined on the host. Several processes run programs on all devices, which
every process starts in the same order. Letters: N layers, L layers of a chunk, K layers of the
largest stage, S stages.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxpipe.devices.host_memory import to_host
from maxpipe.devices.transfers import absent, is_here
from maxpipe.pipeline.engines.mpmd.engine import MpmdEngine
from maxpipe.pipeline.engines.mpmd.staged import local_view
from maxpipe.sharding.rules import without
from maxpipe.training.state import HostArray, Programs


class HostExchange:
    """Converts one array at a time within one process, on the host."""

    def __init__(self, engine: MpmdEngine):
        self._engine = engine

    def join_layers(self, chunks: Sequence[jax.Array], on_disk: jax.ShapeDtypeStruct) -> HostArray:
        """Return [N, ...] on the host, given [L, ...] of each chunk."""
        return self._engine.to_canonical(tuple(chunks))

    def split_layers(
        self, layers: jax.Array, shardings: Sequence[NamedSharding]
    ) -> list[jax.Array]:
        """Return [L, ...] of each chunk in its layout; inverts `join_layers`."""
        return [
            jax.device_put(self._engine.layers_of(chunk, layers), sharding)
            for chunk, sharding in enumerate(shardings)
        ]

    def join_outer(self, x: jax.Array, on_disk: jax.ShapeDtypeStruct) -> HostArray:
        return to_host(x)

    def place_outer(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Return an array on disk in its layout on one stage; inverts `join_outer`."""
        return jax.device_put(x, sharding)


class DeviceExchange:
    """Does the same between processes, by programs on all devices.

    What the stages hold is, without a copy, an array [S, K, ...] sharded over `stage`. A program
    moves `stage` to the dimension that it splits on disk, and only then orders the layers, so that
    a device never holds more of an array than it will write or has read.
    """

    def __init__(self, engine: MpmdEngine, mesh: Mesh):
        self._mesh, self._stages = mesh, engine.meshes
        stage_of_chunk = engine.table.stage_of_chunk.tolist()
        self._sizes = list(map(len, engine.layer_index()))
        self._chunks = [
            [c for c, s in enumerate(stage_of_chunk) if s == stage]
            for stage in range(len(self._stages))
        ]
        # (stage, first layer there, number of layers) of each chunk.
        self._places = [(0, 0, 0)] * len(self._sizes)
        for stage, chunks in enumerate(self._chunks):
            for i, c in enumerate(chunks):
                first = sum(self._sizes[before] for before in chunks[:i])
                self._places[c] = (stage, first, self._sizes[c])
        self._most = max(first + size for _, first, size in self._places)
        self._program = Programs()

    def join_layers(self, chunks: Sequence[jax.Array], on_disk: jax.ShapeDtypeStruct) -> HostArray:
        tail = _spec(chunks[0])[1:]
        parts = []
        for mesh, numbers in zip(self._stages, self._chunks, strict=True):
            if is_here(mesh):
                target = NamedSharding(mesh, PartitionSpec("stage", None, *tail))
                stack = self._program(_stack, target, self._most)
                parts.append(stack([chunks[c] for c in numbers]))
        stacked = self._whole(parts, PartitionSpec("stage", None, *tail))
        spread = NamedSharding(self._mesh, PartitionSpec(None, None, *_spec(on_disk)[1:]))
        join = self._program(_join, on_disk.sharding, spread, tuple(self._places))
        return to_host(join(stacked))

    def split_layers(
        self, layers: jax.Array, shardings: Sequence[NamedSharding]
    ) -> list[jax.Array]:
        spec = PartitionSpec("stage", None, *without(shardings[0].spec, ("stage",))[1:])
        spread = NamedSharding(self._mesh, PartitionSpec(None, None, *_spec(layers)[1:]))
        whole = NamedSharding(self._mesh, spec)
        by_stage = tuple(
            tuple((sum(self._sizes[:c]), self._sizes[c]) for c in numbers)
            for numbers in self._chunks
        )
        stacked = self._program(_split, whole, spread, by_stage, self._most)(layers)
        chunks: dict[int, jax.Array] = {}
        for mesh, numbers in zip(self._stages, self._chunks, strict=True):
            if is_here(mesh):
                targets = tuple(shardings[c] for c in numbers)
                unstack = self._program(_unstack, targets, tuple(self._sizes[c] for c in numbers))
                chunks |= zip(numbers, unstack(_part(stacked, mesh)), strict=True)
                continue
            for c in numbers:
                shape = self._sizes[c], *layers.shape[1:]
                chunks[c] = absent(jax.ShapeDtypeStruct(shape, layers.dtype, sharding=shardings[c]))
        return [chunks[c] for c in range(len(shardings))]

    def join_outer(self, x: jax.Array, on_disk: jax.ShapeDtypeStruct) -> HostArray:
        assert isinstance(x.sharding, NamedSharding)
        spec, owner = PartitionSpec("stage", *_spec(x)), self._stages.index(x.sharding.mesh)
        parts = []
        for stage, mesh in enumerate(self._stages):
            target = NamedSharding(mesh, spec)
            if is_here(mesh) and stage == owner:
                parts.append(self._program(_stack_one, target)(x))
            elif is_here(mesh):
                # These zeros do not reach the result.
                parts.append(self._program(jnp.zeros, target, (1, *x.shape), x.dtype)())
        spread = NamedSharding(self._mesh, PartitionSpec(None, *_spec(on_disk)))
        pick = self._program(_pick, on_disk.sharding, spread, owner)
        return to_host(pick(self._whole(parts, spec)))

    def place_outer(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        on_all = NamedSharding(self._mesh, without(sharding.spec, ("stage",)))
        x = self._program(_same, on_all)(x)
        mesh = sharding.mesh
        assert isinstance(mesh, Mesh)
        if is_here(mesh):
            return self._program(_same, sharding)(local_view(x, mesh))
        return absent(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding))

    def _whole(self, parts: Sequence[jax.Array], spec: PartitionSpec) -> jax.Array:
        """Return the array [S, ...] whose parts [1, ...] are on the stages; nothing is copied."""
        return jax.make_array_from_single_device_arrays(
            (len(self._stages), *parts[0].shape[1:]),
            NamedSharding(self._mesh, spec),
            [shard.data for part in parts for shard in part.addressable_shards],
        )


def _stack(length: int, chunks: Sequence[jax.Array]) -> jax.Array:
    # [L, ...] of the chunks of a stage -> [1, K, ...]; stages with fewer layers are padded.
    layers = jnp.concatenate(chunks)
    padding = [(0, length - len(layers))] + [(0, 0)] * (layers.ndim - 1)
    return jnp.pad(layers, padding)[None]


def _unstack(sizes: Sequence[int], stacked: jax.Array) -> tuple[jax.Array, ...]:
    # [1, K, ...] -> [L, ...] of the chunks of a stage.
    ends = np.cumsum(sizes).tolist()
    return tuple(stacked[0, end - size : end] for size, end in zip(sizes, ends, strict=True))


def _join(
    spread: NamedSharding, places: Sequence[tuple[int, int, int]], stacked: jax.Array
) -> jax.Array:
    # [S, K, ...] -> [N, ...]
    stacked = jax.lax.with_sharding_constraint(stacked, spread)
    return jnp.concatenate([stacked[s, first : first + size] for s, first, size in places])


def _split(
    spread: NamedSharding,
    by_stage: Sequence[Sequence[tuple[int, int]]],
    length: int,
    layers: jax.Array,
) -> jax.Array:
    # [N, ...] -> [S, K, ...]
    stacks = [
        _stack(length, [layers[first : first + size] for first, size in chunks])
        for chunks in by_stage
    ]
    return jax.lax.with_sharding_constraint(jnp.concatenate(stacks), spread)


def _stack_one(x: jax.Array) -> jax.Array:
    return x[None]


def _pick(spread: NamedSharding, stage: int, stacked: jax.Array) -> jax.Array:
    # [S, ...] -> [...]
    picked: jax.Array = jax.lax.with_sharding_constraint(stacked, spread)[stage]
    return picked


def _same(x: jax.Array) -> jax.Array:
    return x


def _spec(x: jax.Array | jax.ShapeDtypeStruct) -> PartitionSpec:
    assert isinstance(x.sharding, NamedSharding)
    on_stage = x.sharding.mesh.shape["stage"] == 1
    return without(x.sharding.spec, ("stage",)) if on_stage else x.sharding.spec


def _part(stacked: jax.Array, mesh: Mesh) -> jax.Array:
    """Return what one stage holds of an array [S, ...], as [1, ...]; nothing is copied."""
    assert isinstance(stacked.sharding, NamedSharding)
    shards = {shard.device: shard.data for shard in stacked.addressable_shards}
    return jax.make_array_from_single_device_arrays(
        (1, *stacked.shape[1:]),
        NamedSharding(mesh, stacked.sharding.spec),
        [shards[d] for d in mesh.devices.flat if d in shards],
    )

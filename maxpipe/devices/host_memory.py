"""Moving arrays between the memories of devices and of the host."""

import jax


def move(array: jax.Array, memory_kind: str) -> jax.Array:
    """A finished copy in another memory of the same devices, made by each process for itself.

    `jax.device_put` of an array that several processes share would run a program on all devices
    instead. A series of such programs hangs now and then on CPUs, where collectives wait for
    threads that others hold.

    Args:
      array: of any sharding.
      memory_kind: such as `pinned_host`.
    """
    shards = [
        jax.device_put(
            shard.data, jax.sharding.SingleDeviceSharding(shard.device, memory_kind=memory_kind)
        )
        for shard in array.block_until_ready().addressable_shards
    ]
    sharding = array.sharding.with_memory_kind(memory_kind)
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, shards
    ).block_until_ready()

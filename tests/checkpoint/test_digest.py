import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.checkpoint import digest as digest_module
from maxpipe.checkpoint.digest import digests, summaries

DTYPES = [
    np.float32,
    jnp.bfloat16,
    np.float16,
    np.int32,
    np.uint32,
    np.int8,
    np.uint8,
    np.int16,
    np.bool_,
]


def digest(array):
    return digests({"array": array})["array"]


def test_digest_of_known_arrays_never_changes():
    """Checkpoints hold digests, so another definition would need another checkpoint format."""
    assert digest(np.arange(1000, dtype=np.float32).reshape(8, 125)) == 0x92227146


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (7, 11, 13)], ids=str)
def test_digest_host_and_device_agree(dtype, shape):
    array = (np.random.default_rng(0).standard_normal(shape) * 100).astype(dtype)
    assert digest(array) == digest(jnp.asarray(array))


def test_digest_of_large_and_strided_arrays_host_and_device_agree():
    array = np.random.default_rng(0).standard_normal((600, 700)).astype(np.float32)
    assert digest(array) == digest(jnp.asarray(array))
    assert digest(array.T) == digest(jnp.asarray(array).T) != digest(array)


@pytest.mark.parametrize(
    "dtype", [np.int64, np.uint64, np.float64], ids=lambda dtype: np.dtype(dtype).name
)
def test_digest_of_64_bit_arrays_host_and_device_agree(dtype):
    array = (np.random.default_rng(0).standard_normal((5, 3)) * 2**40).astype(dtype)
    with jax.enable_x64(True):
        on_device = jnp.asarray(array)
    assert on_device.dtype == dtype
    assert digest(array) == digest(on_device)


@pytest.mark.parametrize(
    "dtype", [np.float32, jnp.bfloat16, np.int8], ids=lambda dtype: np.dtype(dtype).name
)
def test_digest_does_not_depend_on_mesh(samples, dtype):
    array = (np.random.default_rng(0).standard_normal((16, 24, 8)) * 100).astype(dtype)
    specs = [
        PartitionSpec(),
        PartitionSpec("a"),
        PartitionSpec(None, ("a", "b")),
        PartitionSpec("b", None, "a"),
    ]
    meshes = [samples.mesh(*shape) for shape in [(1, 1), (8, 1), (2, 4), (4, 2)]]
    found = {
        digest(jax.device_put(array, NamedSharding(mesh, spec)))
        for mesh in meshes
        for spec in specs
    }
    assert found == {digest(array)}


def test_digest_changes_with_every_single_bit():
    array = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    before = digest(array)
    words = array.view(np.uint32)
    for bit in range(32):
        for position in range(0, 300, 7):
            words[position] ^= np.uint32(1 << bit)
            assert digest(array) != before
            words[position] ^= np.uint32(1 << bit)
    assert digest(array) == before


@pytest.mark.parametrize(
    "change",
    [
        np.negative,
        np.flip,
        lambda a: np.roll(a, 1),
        lambda a: a[::-1, ::-1],
        lambda a: a * np.float32(2),
        np.zeros_like,
    ],
    ids=["negated", "flipped", "rolled", "reversed", "doubled", "zeroed"],
)
def test_digest_changes_with_permutations_and_sign_pairs(change):
    array = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    assert digest(change(array)) != digest(array)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize(
    "dtype",
    [np.float32, jnp.bfloat16, np.float16, np.float64],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_summaries_one_number_that_is_not_finite_is_found(dtype, value):
    sound = np.zeros(300_000, dtype)
    damaged = sound.copy()
    damaged[-1] = value
    arrays = {"sound": sound, "damaged": damaged, "whole": np.zeros(3, np.int32)}
    with jax.enable_x64(True):
        arrays |= {f"device_{name}": jnp.asarray(array) for name, array in arrays.items()}
    assert arrays["device_damaged"].dtype == dtype
    found = summaries(arrays)
    is_sound = {name: "damaged" not in name for name in arrays}
    assert {name: summary.is_finite for name, summary in found.items()} == is_sound
    assert {name: summary.has_finite_squares for name, summary in found.items()} == is_sound


def test_summaries_number_with_an_infinite_square_is_found():
    array = np.full((3, 5), 1e18, np.float32)
    large = np.where(np.arange(5) == 2, np.float32(1e20), array)
    arrays = {"array": array, "large": large, "device": jnp.asarray(large)}
    found = summaries(arrays)
    assert all(summary.is_finite for summary in found.values())
    assert [name for name in arrays if not found[name].has_finite_squares] == ["large", "device"]


def test_summaries_on_cpus_run_one_program_at_a_time(monkeypatch):
    """Sums over devices of many programs at once starve each other until XLA aborts."""
    unfinished = []
    compute = digest_module._device_summary

    def observed(array):
        assert all(x.is_ready() for x in unfinished)
        unfinished[:] = jax.tree.leaves(compute(array))
        return jax.tree.unflatten(jax.tree.structure(pending), unfinished)

    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    array = jax.device_put(
        np.ones((4096, 1024), np.float32), NamedSharding(mesh, PartitionSpec("x"))
    )
    pending = compute(array)
    monkeypatch.setattr(digest_module, "_device_summary", observed)
    assert len(set(digests({str(i): array for i in range(4)}).values())) == 1

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxpipe.checkpoint import digest as digest_module
from maxpipe.checkpoint.digest import digests, summaries

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "int16", "bool"]
DTYPES += ["int64", "uint64", "float64"]


def digest(array):
    return digests({"array": array})["array"]


def test_digest_of_known_arrays_never_changes():
    """Checkpoints hold digests, so another definition would need another checkpoint format."""
    assert digest(np.arange(1000, dtype=np.float32).reshape(8, 125)) == 0x92227146


def test_digest_host_and_device_agree():
    random = np.random.default_rng(0)
    arrays = {
        f"{dtype}{shape}": (random.standard_normal(shape) * 100).astype(jnp.dtype(dtype))
        for dtype in DTYPES
        for shape in [(), (1,), (0, 3), (7, 11, 13)]
    }
    large = random.standard_normal((600, 700)).astype(np.float32)
    arrays |= {"large": large, "strided": large.T}
    on_host = digests(arrays)
    with jax.enable_x64(True):
        on_devices = {name: jnp.asarray(array) for name, array in arrays.items()}
    assert on_devices["int64(1,)"].dtype == np.int64
    assert on_host == digests(on_devices)
    assert on_host["large"] != on_host["strided"]


def test_digest_does_not_depend_on_mesh(samples):
    for dtype in [np.float32, jnp.bfloat16, np.int8]:
        array = (np.random.default_rng(0).standard_normal((16, 24, 8)) * 100).astype(dtype)
        found = {
            digest(jax.device_put(array, NamedSharding(samples.mesh(*mesh), PartitionSpec(*spec))))
            for mesh in [(1, 1), (8, 1), (2, 4), (4, 2)]
            for spec in [(), ("a",), (None, ("a", "b")), ("b", None, "a")]
        }
        assert found == {digest(array)}


def test_digest_changes_with_single_bits_permutations_and_pairs_of_signs():
    array = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32)
    before = digest(array)
    words = array.view(np.uint32).reshape(-1)
    for bit in range(32):
        for position in range(0, 512, 7):
            words[position] ^= np.uint32(1 << bit)
            assert digest(array) != before
            words[position] ^= np.uint32(1 << bit)
    assert digest(array) == before
    for changed in [-array, np.flip(array), np.roll(array, 1), array[::-1, ::-1], 2 * array]:
        assert digest(changed) != before


def test_summaries_count_numbers_that_are_not_finite_or_have_such_squares():
    arrays = {"whole": np.zeros(3, np.int32)}
    for dtype in (np.float32, jnp.bfloat16, np.float16, np.float64):
        sound = np.zeros(300_000, dtype)
        arrays[f"sound {np.dtype(dtype)}"] = sound
        for value in (np.nan, np.inf, -np.inf, float(jnp.finfo(dtype).max) / 4):
            arrays[f"{value} {np.dtype(dtype)}"] = damaged = sound.copy()
            damaged[-1] = value
    with jax.enable_x64(True):
        arrays |= {f"device {name}": jnp.asarray(array) for name, array in arrays.items()}
    assert arrays["device sound float64"].dtype == np.float64
    for name, (_, nonfinite, nonfinite_squares) in summaries(arrays).items():
        is_sound = "sound" in name or "whole" in name
        assert nonfinite == (0 if is_sound or "e+" in name or "16376" in name else 1), name
        assert nonfinite_squares == (0 if is_sound else 1), name


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

"""Numbers in fp8 with scales of blocks stand for their products."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.hf_folder import importing, write_folder, write_weights

from maxpipe.config import ConfigError
from maxpipe.hf.fp8 import Fp8Tensor, dequantised
from maxpipe.hf.importer import HfWeights
from maxpipe.hf.safetensors import INDEX, SafetensorsError, read_folder, read_header
from maxpipe.storage.model_folders import LocalFile, LocalFolder

BLOCK = (8, 4)


def quantised(rows, columns, seed=0):
    """Return random (e4m3 [rows, columns], scales of their blocks, what they stand for)."""
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    shape = [-(-size // width) for size, width in zip((rows, columns), BLOCK, strict=True)]
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    spread = scales.repeat(BLOCK[0], 0)[:rows].repeat(BLOCK[1], 1)[:, :columns]
    return numbers, scales, numbers.astype(np.float32) * spread


def write_config(path, sizes=BLOCK):
    content = json.loads((path / "config.json").read_text())
    section = {"quant_method": "fp8", "weight_block_size": sizes and [*sizes]}
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": section}))


@pytest.fixture
def matrix(tmp_path):
    """Return (folder with one matrix whose last blocks are incomplete, what it stands for)."""
    numbers, scales, values = quantised(19, 10)
    write_weights(tmp_path / "x.safetensors", {"w": numbers, "w_scale_inv": scales})
    (tmp_path / "config.json").write_text("{}")
    write_config(tmp_path)
    return tmp_path, values


def test_numbers_are_products_with_the_scales_of_their_blocks(matrix):
    folder, expected = matrix
    stored = read_header(LocalFile(folder / "x.safetensors"))
    tensors = dequantised(stored, LocalFolder(folder))
    tensor = tensors["w"]
    assert tensors.keys() == {"w"}
    assert isinstance(tensor, Fp8Tensor)
    assert tensor.shape == (19, 10)
    assert tensor.num_bytes == 19 * 10 + 4 * 3 * 3
    np.testing.assert_array_equal(tensor.read_rows(0, 19), expected)
    np.testing.assert_array_equal(tensor.read_rows(7, 18, slice(1, None, 2)), expected[7:18, 1::2])


def test_other_forms_are_refused(matrix):
    folder, _ = matrix
    numbers, scales, _ = quantised(19, 10)
    for change, message in (
        ({"w_scale_inv": None}, "w is F8_E4M3, which is read as F8_E4M3 with w_scale_inv for"),
        ({"w_scale_inv": np.ones((3, 2), np.float32)}, "blocks of 8 x 4; convert"),
        ({"block": None}, "has weights in fp8, but config.json no quantization_config.weight_bl"),
        ({"block": ("8", 4)}, "config.json no quantization_config.weight_block_size; convert"),
    ):
        write_config(folder, change.pop("block", BLOCK))
        tensors = {"w": numbers, "w_scale_inv": scales} | change
        (folder / "x.safetensors").unlink()
        write_weights(folder / "x.safetensors", {n: x for n, x in tensors.items() if x is not None})
        with pytest.raises(SafetensorsError, match="convert") as caught:
            dequantised(read_folder(LocalFolder(folder)), LocalFolder(folder))
        assert message in str(caught.value)


@pytest.fixture
def model(tmp_path):
    """Return (folder of a DeepSeek-V3 whose matrices of experts are fp8, what these stand for)."""
    path = write_folder(tmp_path / "model", "deepseek_v3")
    tensors = {n: np.array(x.read()) for n, x in read_folder(LocalFolder(path)).items()}
    values = {}
    for seed, name in enumerate([n for n in tensors if ".experts." in n]):
        tensors[name], tensors[f"{name}_scale_inv"], values[name] = quantised(
            *tensors[name].shape, seed
        )
    for file in (INDEX, "0.safetensors", "1.safetensors"):
        (path / file).unlink()
    write_weights(path / "model.safetensors", tensors)
    write_config(path)
    return path, values


def test_folder_is_read_into_parameters_that_are_split_over_devices(model):
    path, values = model
    config = importing(path)
    weights, m = HfWeights(config), config.model
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    like = jax.ShapeDtypeStruct(
        (m.stacked_layers, m.moe.experts, m.embed_dim, m.expert_dim),
        np.dtype("float32"),
        sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "b", None, "a")),
    )
    actual = np.asarray(weights.read(("layers", "moe", "up"), like))
    for layer in range(m.stacked_layers):
        for expert in range(m.moe.experts):
            name = (
                f"model.layers.{layer + m.first_dense_layers}.mlp.experts.{expert}.up_proj.weight"
            )
            np.testing.assert_array_equal(actual[layer, expert], values[name].T)


def test_scales_that_are_missing_end_the_start_with_the_name(model):
    path, values = model
    tensors = {n: np.array(x.read()) for n, x in read_folder(LocalFolder(path)).items()}
    lost = next(iter(values))
    del tensors[f"{lost}_scale_inv"]
    (path / "model.safetensors").unlink()
    write_weights(path / "model.safetensors", tensors)
    with pytest.raises(ConfigError, match=f"{lost} is F8_E4M3, which is read"):
        HfWeights(importing(path))


def test_numbers_equal_those_of_transformers(torch, transformers):
    from transformers.integrations import finegrained_fp8 as fp8

    numbers, scales, expected = quantised(16, 8)
    stored = torch.from_numpy(numbers.view(np.uint8)).view(torch.float8_e4m3fn)
    pair = {"weight": [stored], "weight_scale_inv": [torch.from_numpy(scales)]}
    theirs = fp8.Fp8Dequantize(None).convert(pair)["weight"]
    np.testing.assert_array_equal(theirs.float().numpy(), expected)

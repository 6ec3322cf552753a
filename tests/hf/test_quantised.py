"""Numbers in fp8 and mxfp4 stand for their products with the scales of their blocks."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.hf_folder import importing, write_folder, write_weights
from helpers.hf_models import recorded, weights
from helpers.hf_parameters import family_of

from maxpipe.hf.exporter import config_json
from maxpipe.hf.importer import HfWeights
from maxpipe.hf.quantised import Fp8Tensor, Mxfp4Tensor, dequantised, joined
from maxpipe.hf.safetensors import INDEX, SafetensorsError, read_folder, read_header
from maxpipe.storage.model_folders import LocalFile, LocalFolder

BLOCK = (8, 4)  # of fp8
NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]  # of mxfp4
E, WIDTH, GROUPS = 2, 3, 2  # experts, rows of the packed matrix, blocks of each


def in_fp8(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal((rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    shape = [-(-size // width) for size, width in zip((rows, columns), BLOCK, strict=True)]
    scales = rng.uniform(0.5, 2, shape).astype(np.float32)
    spread = scales.repeat(BLOCK[0], 0)[:rows].repeat(BLOCK[1], 1)[:, :columns]
    return numbers, scales, numbers.astype(np.float32) * spread


def in_mxfp4(experts, width, groups, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (experts, width, groups, 32)).astype(np.uint8)
    scales = rng.integers(118, 128, (experts, width, groups)).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    values = np.asarray(NUMBERS)[codes] * 2.0 ** (scales[..., None].astype(int) - 127)
    return blocks, scales, values.reshape(experts, width, -1).swapaxes(1, 2)


def write_config(path, sizes=BLOCK):
    content = json.loads((path / "config.json").read_text())
    section = {"quant_method": "fp8", "weight_block_size": sizes and [*sizes]}
    (path / "config.json").write_text(json.dumps(content | {"quantization_config": section}))


def test_fp8_numbers_are_products_with_the_scales_of_their_blocks(tmp_path):
    numbers, scales, expected = in_fp8(19, 10)  # the last blocks are incomplete
    write_weights(tmp_path / "x.safetensors", {"w": numbers, "w_scale_inv": scales})
    (tmp_path / "config.json").write_text("{}")
    write_config(tmp_path)
    stored = read_header(LocalFile(tmp_path / "x.safetensors"))
    tensors = dequantised(stored, LocalFolder(tmp_path))
    tensor = tensors["w"]
    assert tensors.keys() == {"w"}
    assert isinstance(tensor, Fp8Tensor)
    assert (tensor.shape, tensor.num_bytes) == ((19, 10), 19 * 10 + 4 * 3 * 3)
    np.testing.assert_array_equal(tensor.read_rows(0, 19), expected)
    np.testing.assert_array_equal(tensor.read_rows(7, 18, slice(1, None, 2)), expected[7:18, 1::2])
    for block, scale, message in (
        (BLOCK, {}, "w is F8_E4M3, which is read as F8_E4M3 with w_scale_inv for .*convert"),
        (BLOCK, {"w_scale_inv": np.ones((3, 2), np.float32)}, "blocks of 8 x 4; convert"),
        (None, {"w_scale_inv": scales}, "no quantization_config.weight_bl.*convert"),
    ):
        write_config(tmp_path, block)
        (tmp_path / "x.safetensors").unlink()
        write_weights(tmp_path / "x.safetensors", {"w": numbers} | scale)
        with pytest.raises(SafetensorsError, match=message):
            dequantised(read_folder(LocalFolder(tmp_path)), LocalFolder(tmp_path))


def test_mxfp4_numbers_are_those_of_the_format(tmp_path):
    blocks, scales, expected = in_mxfp4(E, WIDTH, GROUPS)
    tensors = {"w_blocks": blocks, "w_scales": scales, "x_blocks": blocks}
    write_weights(tmp_path / "x.safetensors", tensors)
    stored = read_header(LocalFile(tmp_path / "x.safetensors"))
    tensors = joined(stored)
    assert tensors.keys() == {"w", "x_blocks"}
    assert tensors["x_blocks"] is stored["x_blocks"]  # without scales
    tensor = tensors["w"]
    assert isinstance(tensor, Mxfp4Tensor)
    assert (tensor.shape, tensor.num_bytes) == ((E, 32 * GROUPS, WIDTH), E * WIDTH * GROUPS * 17)
    actual = tensor.read_rows(0, E)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual.astype(ml_dtypes.bfloat16), expected)
    np.testing.assert_array_equal(tensor.read_rows(1, 2, slice(1, None, 2)), expected[1:, :, 1::2])


def test_numbers_equal_those_of_transformers(torch, transformers):
    from transformers.integrations import finegrained_fp8, mxfp4

    numbers, scales, expected = in_fp8(16, 8)
    stored = torch.from_numpy(numbers.view(np.uint8)).view(torch.float8_e4m3fn)
    pair = {"weight": [stored], "weight_scale_inv": [torch.from_numpy(scales)]}
    theirs = finegrained_fp8.Fp8Dequantize(None).convert(pair)["weight"]
    np.testing.assert_array_equal(theirs.float().numpy(), expected)
    blocks, scales, expected = in_mxfp4(E, WIDTH, GROUPS, seed=1)
    theirs = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.testing.assert_array_equal(theirs.float().numpy(), expected)


def of_deepseek(tmp_path):
    path = write_folder(tmp_path / "model", "deepseek_v3")
    tensors = {n: np.array(x.read()) for n, x in read_folder(LocalFolder(path)).items()}
    values = {}
    for seed, name in enumerate([n for n in tensors if ".experts." in n]):
        numbers, scales, values[name] = in_fp8(*tensors[name].shape, seed)
        tensors |= {name: numbers, f"{name}_scale_inv": scales}
    for file in (INDEX, "0.safetensors", "1.safetensors"):
        (path / file).unlink()
    write_weights(path / "model.safetensors", tensors)
    write_config(path)
    return path, values


def of_gpt_oss(tmp_path):
    """Return (folder of a gpt-oss with experts in mxfp4, what these stand for by name)."""
    c = recorded("gpt_oss")["config"] | {"quantization_config": {"quant_method": "mxfp4"}}
    c |= {"intermediate_size": 64}  # blocks are of 32
    shapes = {
        name: [64 if size == 48 else 128 if size == 96 else size for size in shape]
        for name, shape in recorded("gpt_oss")["shapes"].items()
    }
    tensors, values = weights(shapes, is_gemma=False), {}
    for seed, name in enumerate([n for n in tensors if n.endswith("_proj") and "experts" in n]):
        experts, embed, width = tensors.pop(name).shape
        blocks, scales, values[name] = in_mxfp4(experts, width, embed // 32, seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(c))
    write_weights(path / "model.safetensors", tensors)
    return path, values


def read(config, name, *sizes):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec(None, "b", None, "a")
    shape = (config.model.stacked_layers, config.model.moe.experts, *sizes)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    like = jax.ShapeDtypeStruct(shape, np.dtype("float32"), sharding=sharding)
    return np.asarray(HfWeights(config).read(("layers", "moe", name), like))


def test_folder_in_fp8_is_read_into_parameters_that_are_split_over_devices(tmp_path):
    path, values = of_deepseek(tmp_path)
    config = importing(path)
    m = config.model
    actual = read(config, "up", m.embed_dim, m.expert_dim)
    for layer in range(m.stacked_layers):
        place = f"model.layers.{layer + m.first_dense_layers}.mlp.experts"
        for expert in range(m.moe.experts):
            expected = values[f"{place}.{expert}.up_proj.weight"].T
            np.testing.assert_array_equal(actual[layer, expert], expected)


def test_folder_in_mxfp4_is_read_into_parameters_that_are_split_over_devices(tmp_path):
    path, values = of_gpt_oss(tmp_path)
    config = importing(path)
    for name, sizes in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
        actual = read(config, name, *sizes)
        for layer in range(config.model.num_layers):
            kind = "down_proj" if name == "down" else "gate_up_proj"
            expected = values[f"model.layers.{layer}.mlp.experts.{kind}"]
            if name != "down":
                expected = expected[..., name == "up" :: 2]
            np.testing.assert_array_equal(actual[layer], expected)
    written = config_json(family_of("gpt_oss"), config, path)
    assert "quantization_config" not in written
    assert written["swiglu_limit"] == 0.5

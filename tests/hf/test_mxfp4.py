"""Pairs of blocks and scales stand for the numbers that the format gives them."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from helpers.hf_folder import importing, write_weights
from helpers.hf_models import recorded, weights
from helpers.hf_parameters import family_of

from maxpipe.config import ConfigError
from maxpipe.hf.exporter import config_json
from maxpipe.hf.importer import HfWeights
from maxpipe.hf.mxfp4 import Mxfp4Tensor, joined
from maxpipe.hf.safetensors import read_folder, read_header
from maxpipe.storage.model_folders import LocalFile, LocalFolder

NUMBERS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
E, WIDTH, GROUPS = 2, 3, 2  # experts, rows of the packed matrix, blocks of each


def packed(experts, width, groups, seed=0):
    """Return random (blocks, scales, what they stand for [E, width, 32 groups])."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (experts, width, groups, 32)).astype(np.uint8)
    scales = rng.integers(118, 128, (experts, width, groups)).astype(np.uint8)
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    values = np.asarray(NUMBERS)[codes] * 2.0 ** (scales[..., None].astype(int) - 127)
    return blocks, scales, values.reshape(experts, width, -1)


@pytest.fixture
def stored(tmp_path):
    blocks, scales, values = packed(E, WIDTH, GROUPS)
    tensors = {"w_blocks": blocks, "w_scales": scales, "x_blocks": blocks}
    write_weights(tmp_path / "x.safetensors", tensors)
    return read_header(LocalFile(tmp_path / "x.safetensors")), values


def test_numbers_are_those_of_the_format(stored):
    tensor = joined(stored[0])["w"]
    assert isinstance(tensor, Mxfp4Tensor)
    assert tensor.shape == (E, 32 * GROUPS, WIDTH)
    expected = stored[1].swapaxes(1, 2)
    actual = tensor.read_rows(0, E)
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(actual.astype(ml_dtypes.bfloat16), expected)
    np.testing.assert_array_equal(tensor.read_rows(1, 2, slice(1, None, 2)), expected[1:, :, 1::2])
    assert tensor.num_bytes == E * WIDTH * GROUPS * 17


def test_blocks_without_scales_stay_what_they_are(stored):
    tensors = joined(stored[0])
    assert tensors.keys() == {"w", "x_blocks"}
    assert tensors["x_blocks"] is stored[0]["x_blocks"]


def test_numbers_equal_those_of_transformers(torch, transformers):
    from transformers.integrations import mxfp4

    blocks, scales, values = packed(E, WIDTH, GROUPS, seed=1)
    theirs = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.testing.assert_array_equal(theirs.float().numpy(), values.swapaxes(1, 2))


@pytest.fixture
def folder(tmp_path):
    """Return (folder of a gpt-oss with experts in mxfp4, what these stand for by name)."""
    c = recorded("gpt_oss")["config"] | {"quantization_config": {"quant_method": "mxfp4"}}
    c |= {"intermediate_size": 64}  # blocks are of 32
    shapes = {
        name: [64 if size == 48 else 128 if size == 96 else size for size in shape]
        for name, shape in recorded("gpt_oss")["shapes"].items()
    }
    tensors, dequantised = weights(shapes, is_gemma=False), {}
    for seed, name in enumerate([n for n in tensors if n.endswith("_proj") and "experts" in n]):
        experts, embed, width = tensors.pop(name).shape
        blocks, scales, values = packed(experts, width, embed // 32, seed)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        dequantised[name] = values.swapaxes(1, 2)
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(c))
    write_weights(path / "model.safetensors", tensors)
    return path, dequantised


def test_folder_is_read_into_parameters_that_are_split_over_devices(folder):
    path, dequantised = folder
    config = importing(path)
    model, hf_weights = config.model, HfWeights(config)
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    spec = jax.sharding.PartitionSpec(None, "b", None, "a")
    for name, sizes in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32))):
        like = jax.ShapeDtypeStruct(
            (model.num_layers, model.moe.experts, *sizes),
            np.dtype("float32"),
            sharding=jax.sharding.NamedSharding(mesh, spec),
        )
        actual = np.asarray(hf_weights.read(("layers", "moe", name), like))
        for layer in range(model.num_layers):
            kind = "down_proj" if name == "down" else "gate_up_proj"
            expected = dequantised[f"model.layers.{layer}.mlp.experts.{kind}"]
            if name != "down":
                expected = expected[..., name == "up" :: 2]
            np.testing.assert_array_equal(actual[layer], expected)


def test_scales_that_are_missing_are_named(folder):
    path, _ = folder
    config = importing(path)
    tensors = {n: np.array(x.read()) for n, x in read_folder(LocalFolder(path)).items()}
    lost = "model.layers.1.mlp.experts.down_proj"
    del tensors[f"{lost}_scales"]
    (path / "model.safetensors").unlink()
    write_weights(path / "model.safetensors", tensors)
    with pytest.raises(ConfigError) as caught:
        HfWeights(config)
    lines = [problem.message.removeprefix(f"{path}: ") for problem in caught.value.problems]
    assert lines == [f"{lost} is missing", f"{lost}_blocks is not part of the model"]


def test_config_json_of_an_export_does_not_promise_mxfp4(folder):
    written = config_json(family_of("gpt_oss"), importing(folder[0]), folder[0])
    assert "quantization_config" not in written
    assert written["swiglu_limit"] == 0.5

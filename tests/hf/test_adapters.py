"""Exports of runs with adapters: merged into the base, and alone as PEFT has them."""

import json
import shutil

import jax
import numpy as np
import pytest
from helpers.engines import canonical_params
from helpers.hf_folder import importing, save_run, write_folder

from maxpipe import export
from maxpipe.hf.safetensors import read_folder
from maxpipe.model.program import ModelProgram
from maxpipe.storage.model_folders import LocalFolder
from maxpipe.training import run_directory

LORA = {"model.lora.rank": 3, "model.lora.alpha": 12.0, "model.param_dtype": "float32"}


def tensors_of(folder):
    return {name: tensor.read() for name, tensor in read_folder(LocalFolder(folder)).items()}


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", "qwen3")


def test_merged_weights_are_those_of_the_base_and_the_exported_adapter(folder, tmp_path):
    run, base = save_run(folder, **LORA), tmp_path / "base"
    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert export.main([run, "--hf", str(merged), "--dtype", "float32"]) == 0
    assert export.main([run, "--adapter", str(adapter), "--dtype", "float32"]) == 0
    (folder.parent / "run").rename(tmp_path / "adapted")
    # Parameters of the base have the same values in a run without adapters.
    assert export.main([save_run(folder), "--hf", str(base), "--dtype", "float32"]) == 0

    content = json.loads((adapter / "adapter_config.json").read_text())
    assert (content["r"], content["lora_alpha"], content["bias"]) == (3, 12.0, "none")
    assert content["base_model_name_or_path"] == str(folder)
    projections = [*(f"{n}_proj" for n in ("down", "gate", "k", "o", "q", "up", "v"))]
    assert content["target_modules"] == projections

    factors, before = tensors_of(adapter), tensors_of(base)
    after = tensors_of(merged)
    assert after.keys() == before.keys()
    assert len(factors) == 2 * 4 * len(projections)
    for name, tensor in before.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in factors:
            np.testing.assert_array_equal(after[name], tensor, err_msg=name)
            continue
        a, b = (factors[f"{module}.lora_{factor}.weight"] for factor in "AB")
        assert np.abs(b).max() > 0, name
        expected = tensor + 12 / 3 * (b @ a)
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_base_of_an_adapter_is_named_as_peft_finds_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setattr(run_directory, "read_origin", lambda _: {})  # there is no such base
    for number, (init_from, base, revision) in enumerate(
        (
            ("hf:org/name@v1.0", "org/name", "v1.0"),
            ("hf:~/models/x@1", "/home/u/models/x@1", None),
            ("hf:s3://bucket/model", None, None),
        )
    ):
        run, adapter = save_run(folder, init_from=init_from, **LORA), tmp_path / f"adapter-{number}"
        assert export.main([run, "--adapter", str(adapter)]) == 0
        content = json.loads((adapter / "adapter_config.json").read_text())
        assert (content["base_model_name_or_path"], content["revision"]) == (base, revision)
        shutil.rmtree(run)


def test_file_of_own_names_has_the_merged_model_without_adapters(folder, tmp_path):
    run, file = save_run(folder, **LORA), tmp_path / "own.safetensors"
    assert export.main([run, "--safetensors", str(file), "--dtype", "float32"]) == 0
    (tmp_path / "own").mkdir()
    file.rename(tmp_path / "own" / "model.safetensors")
    tensors = tensors_of(tmp_path / "own")
    config = importing(folder)
    params = canonical_params(ModelProgram(config.model))
    assert len(tensors) == len(jax.tree.leaves(params))
    assert np.abs(tensors["layers.mlp.up"] - params["layers"]["mlp"]["up"]).max() > 0.01
    np.testing.assert_array_equal(tensors["head.norm.scale"], params["head"]["norm"]["scale"])


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("qwen3", {}, "the run has model.lora.rank=0, no adapters"),
        ("phi3", LORA, "phi3 has projections in one tensor"),
        ("glm4_moe", LORA, "the first dense layers have adapters of gate, up, down, which PEFT"),
    ],
)
def test_adapter_that_peft_cannot_load_is_refused(name, values, message, tmp_path, capsys):
    folder = write_folder(tmp_path / "model", name)
    target = tmp_path / "adapter"
    with pytest.raises(SystemExit, match="2"):
        export.main([save_run(folder, **values), "--adapter", str(target)])
    assert message in capsys.readouterr().err
    assert not target.exists()

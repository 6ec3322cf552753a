"""Adapters in PEFT itself, live. Needs the extra `hf-test`."""

import dataclasses
import zlib

import jax
import numpy as np
import pytest
from helpers.hf_models import CASES, LENGTH, keys_of, tokens

import maxpipe
from maxpipe import export
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config import Config, replace, resolve
from maxpipe.config.from_hf import read_shape
from maxpipe.hf.importer import HfWeights
from maxpipe.model.program import ModelProgram

TOLERANCE = 2e-5  # of the largest logit
LORA = {"model.lora.rank": 4, "model.lora.alpha": 6.0}


def save_run(base, directory):
    """Write step 1 of a run with the weights of a folder and adapters that are not zero."""
    values = {"data.sequence_length": LENGTH, "init_from": f"hf:{base}", **LORA}
    config = resolve(replace(Config(), **read_shape(str(base)).values, **values), 1)
    weights = HfWeights(dataclasses.replace(config, model=config.model.base))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def leaf(path, spec):
        names = tuple(key.key for key in path)
        leading = (config.model.stacked_layers,) if names[0] == "layers" else ()
        shape = (*leading, *spec.shape)
        if spec.frozen:
            return weights.read(names, jax.ShapeDtypeStruct(shape, spec.dtype, sharding=device))
        rng = np.random.default_rng(zlib.crc32(".".join(names).encode()))
        return (0.2 * rng.standard_normal(shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(
        leaf, ModelProgram(config.model).specs, is_leaf=dataclasses.is_dataclass
    )
    checkpoints = Checkpointer(directory / "checkpoints", config.checkpoint)
    meta = {"config": dataclasses.asdict(config)}
    checkpoints.save(1, {"params": params}, np.zeros((1, 1), np.int64), meta)
    checkpoints.close()


def logits_of(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens()).long()).logits[0].numpy()


def with_images(base, torch, transformers):
    """Write a tiny Gemma 3 with a vision tower, whose projections have the text part's names."""
    text = {
        **keys_of("llama"),
        "num_hidden_layers": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["full_attention"] * 2,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    transformers.Gemma3ForConditionalGeneration(config).eval().save_pretrained(base)
    return transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")


@pytest.mark.parametrize("name", ["gemma2", "mixtral", "gemma3 with images"])
def test_peft_and_the_merged_model_have_the_logits_of_the_run(
    name, tmp_path, torch, transformers, record_hf
):
    peft = pytest.importorskip("peft", reason="needs the extra `hf-test`")
    base, adapter, merged = (tmp_path / part for part in ("base", "adapter", "merged"))
    if name in CASES:
        model = record_hf.model_of(name)
        model.save_pretrained(base)
    else:
        model = with_images(base, torch, transformers)
    save_run(base, tmp_path)
    expected = np.asarray(maxpipe.load_model(tmp_path).logits(tokens())[0])
    scale = np.abs(expected).max()
    assert np.abs(logits_of(model) - expected).max() > 0.01 * scale  # adapters do something

    assert export.main([str(tmp_path), "--adapter", str(adapter)]) == 0
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    assert np.abs(logits_of(adapted) - expected).max() <= TOLERANCE * scale
    assert export.main([str(tmp_path), "--hf", str(merged)]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
    assert np.abs(logits_of(loaded) - expected).max() <= TOLERANCE * scale

"""Adapters in PEFT itself, live. Needs the extra `hf-test`."""

import numpy as np
import pytest
from helpers.hf_folder import imported_parameters, importing, save_checkpoint
from helpers.hf_models import CASES, LENGTH, keys_of, tokens

import maxpipe
from maxpipe import export

TOLERANCE = 2e-5  # of the largest logit
LORA = {"model.lora.rank": 4, "model.lora.alpha": 6.0}


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
    config = importing(base, **{"data.sequence_length": LENGTH}, **LORA)
    save_checkpoint(config, tmp_path, imported_parameters(config))
    expected = np.asarray(maxpipe.load_model(tmp_path).logits(tokens())[0])
    scale = np.abs(expected).max()
    assert np.abs(logits_of(model) - expected).max() > 0.01 * scale  # adapters do something

    assert export.main([str(tmp_path), "--adapter", str(adapter)]) == 0
    adapted = peft.PeftModel.from_pretrained(model, adapter)
    assert np.abs(logits_of(adapted) - expected).max() <= TOLERANCE * scale
    assert export.main([str(tmp_path), "--hf", str(merged)]) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(merged, attn_implementation="eager")
    assert np.abs(logits_of(loaded) - expected).max() <= TOLERANCE * scale

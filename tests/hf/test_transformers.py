"""The other side: transformers itself, live. Needs the extra `hf-test`."""

import json

import numpy as np
import pytest
import tokenizers
from helpers.hf_folder import imported_parameters, importing, save_checkpoint
from helpers.hf_models import (
    CASES,
    LENGTH,
    NUM_GENERATED,
    POSITIONS,
    TRAINED,
    VOCAB_SIZE,
    batch,
    recorded,
    tokens,
)
from helpers.hf_parameters import config_from, family_of, gradients_of

from maxpipe.checkpoint.reader import ParameterReader
from maxpipe.config import replace
from maxpipe.generate import __main__ as generate
from maxpipe.hf.exporter import export
from maxpipe.hf.family import choose_family

TOLERANCE = 2e-5  # of the largest logit or gradient
SPECIAL = ("<pad>", "<s>", "</s>")
# The case whose text is compared by default; cached decoding of more is in test_parity.
FIRST = "gpt_oss"


def torch_logits(model):
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens()).long()).logits[0].numpy()


def config_of(folder):
    return importing(folder, **{"data.sequence_length": LENGTH + NUM_GENERATED})


def torch_model(record_hf, name, content, tmp_path):
    import transformers

    (tmp_path / "config.json").write_text(json.dumps(content))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    read.pad_token_id = 0
    model = transformers.AutoModelForCausalLM.from_config(read, attn_implementation="eager")
    record_hf.fill(model.eval(), is_gemma=CASES[name][0].startswith("gemma"))
    return model


def save_tokenizer(folder, transformers):
    characters = [chr(ord("0") + i) for i in range(VOCAB_SIZE - len(SPECIAL))]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = tokenizers.decoders.Fuse()
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(
        folder
    )


@pytest.mark.parametrize("name", CASES)
def test_folder_goes_through_a_checkpoint_and_back_to_transformers(
    name, tmp_path, transformers, record_hf
):
    """What is exported loads without a remark; the installed version has the recorded logits."""
    before, after = tmp_path / "before", tmp_path / "after"
    model = record_hf.model_of(name)
    golden, logits = recorded(name), torch_logits(model)
    difference = np.abs(logits[list(POSITIONS)] - np.asarray(golden["logits"])).max()
    assert difference <= TOLERANCE * golden["largest"]
    model.save_pretrained(before)
    config = config_of(before)
    checkpoints = save_checkpoint(config, tmp_path, imported_parameters(config))
    export(
        ParameterReader([tmp_path / "checkpoints" / "1"]),
        checkpoints.record(1),
        config,
        after,
        family=choose_family(config, "", before),
        dtype="float32",
        file_bytes=10_000,
        companions=(),
        origin=before,
        tokenizer=None,
        turn_ends=(set(), ""),
        learning_rate="",
        version="",
    )
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        after, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    np.testing.assert_array_equal(torch_logits(loaded), logits)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == FIRST else [pytest.mark.slow]) for n in CASES]
)
def test_command_writes_what_transformers_writes(name, tmp_path, capsys, transformers, record_hf):
    folder = tmp_path / "model"
    model = record_hf.model_of(name)
    model.save_pretrained(folder)
    save_tokenizer(folder, transformers)
    config = replace(config_of(folder), **{"data.tokenizer": f"hf:{folder}"})
    save_checkpoint(config, tmp_path / "run", imported_parameters(config))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.decode(tokens()[0, 1:])
    inputs = tokenizer(prompt, return_tensors="pt")
    assert inputs["input_ids"][0].tolist() == [1, *tokens()[0, 1:]]
    written = model.generate(
        input_ids=inputs["input_ids"], max_new_tokens=NUM_GENERATED, do_sample=False
    )[0, LENGTH:]
    words = [str(tmp_path / "run"), f"--prompt={prompt}", "--temperature=0"]
    assert generate.main([*words, f"--max-tokens={NUM_GENERATED}"]) == 0
    expected = tokenizer.decode(written, skip_special_tokens=True)
    assert expected
    assert capsys.readouterr().out == f"{prompt}{expected}\n"


def test_recorded_training_is_that_of_the_installed_versions(record_hf):
    losses = np.asarray(record_hf.train())
    assert np.abs(losses - recorded("training")["losses"]).max() <= TOLERANCE


def test_every_gradient_is_that_of_torch(record_hf):
    _, gradients = gradients_of(TRAINED, *batch(0))
    expected = record_hf.gradients_of(record_hf.model_of(TRAINED))
    assert gradients.keys() == expected.keys()
    differences = {
        name: np.abs(gradients[name] - gradient).max() / np.abs(gradient).max()
        for name, gradient in expected.items()
    }
    assert max(differences.values()) <= TOLERANCE, differences


# transformers 5 gives OLMo 3's sliding layers the base 500000 if only the older keys name one.
DIALECTS = {"newer keys": ("rope_theta", "rope_scaling", "rope_local_base_freq")}
DIALECTS["older keys"] = ("rope_parameters",)


@pytest.mark.parametrize("name", CASES)
def test_config_json_that_is_written_is_the_same_model_in_either_dialect(name, tmp_path, record_hf):
    golden = recorded(name)
    model = config_from(name, golden["config"]).model
    written = family_of(name).config(model, LENGTH)
    for dialect, left_out in DIALECTS.items():
        if (name, dialect) == ("olmo3", "older keys"):
            continue
        content = {key: value for key, value in written.items() if key not in left_out}
        model = torch_model(record_hf, name, content, tmp_path)
        difference = torch_logits(model)[list(POSITIONS)] - np.asarray(golden["logits"])
        assert np.abs(difference).max() <= 1e-6 * golden["largest"], dialect

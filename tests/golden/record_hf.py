"""Records logits of transformers for the tiny models of `helpers.hf_models`: needs torch.

python tests/golden/record_hf.py           all cases
python tests/golden/record_hf.py NAME ...  some
"""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import transformers
from helpers.hf_models import CASES, GOLDEN, NUM_GENERATED, POSITIONS, keys_of, tokens, weights


def model_of(name: str) -> transformers.PreTrainedModel:
    """Build a case's model with its weights."""
    model_type = CASES[name][0]
    config = transformers.AutoConfig.for_model(model_type, **keys_of(name))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    fill(model, is_gemma=model_type.startswith("gemma"))
    return model.eval()


def fill(model: transformers.PreTrainedModel, *, is_gemma: bool) -> None:
    """Give a model the weights that its tensors' names stand for."""
    parameters = dict(model.named_parameters())
    drawn = weights({n: tuple(p.shape) for n, p in parameters.items()}, is_gemma=is_gemma)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(drawn[name]))
    model.tie_weights()


def greedy(model: transformers.PreTrainedModel) -> tuple[list[int], list[float]]:
    """Return the tokens after the prompt and their logits."""
    output = model.generate(
        torch.from_numpy(tokens()).long(),
        max_new_tokens=NUM_GENERATED,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    largest = [float(f"{float(logits.max()):.9g}") for logits in output.logits]
    return output.sequences[0, tokens().shape[1] :].tolist(), largest


def record(name: str) -> None:
    """Write a case's config.json, names and shapes of tensors, logits, and greedy tokens."""
    model = model_of(name)
    generated, generated_logits = greedy(model)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens()).long()).logits[0].numpy()
    left_out = ("transformers_version", "id2label", "label2id", "_name_or_path")
    config = {k: v for k, v in model.config.to_dict().items() if k not in left_out}
    content = {
        "transformers": transformers.__version__,
        "config": config,
        "shapes": {n: list(p.shape) for n, p in model.named_parameters()},
        "largest": float(np.abs(logits).max()),
        "logits": [[float(f"{x:.9g}") for x in logits[i]] for i in POSITIONS],
        "generated": generated,
        "generated_logits": generated_logits,
    }
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=None) + "\n")
    print(f"recorded {name}: logits up to {content['largest']:.2f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or CASES:
        record(case)

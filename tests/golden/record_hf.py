"""Records logits of transformers for the tiny models of `helpers.hf_models`: needs torch.

python tests/golden/record_hf.py           all cases, and training
python tests/golden/record_hf.py NAME ...  some
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import transformers
from helpers.hf_models import (
    CASES,
    GOLDEN,
    NUM_GENERATED,
    OPTIMIZER,
    POSITIONS,
    STEPS,
    TRAINED,
    batch,
    keys_of,
    probe,
    tokens,
    weights,
)
from safetensors import safe_open


def model_of(name: str) -> transformers.PreTrainedModel:
    model_type = CASES[name][0]
    config = transformers.AutoConfig.for_model(model_type, **keys_of(name))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    fill(model, is_gemma=model_type.startswith("gemma"))
    return model.eval()


def fill(model: transformers.PreTrainedModel, *, is_gemma: bool) -> None:
    drawn = weights(shapes_of(model), is_gemma=is_gemma)
    # A selection bias of experts is a buffer.
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in drawn]
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *buffers):
            parameter.copy_(torch.from_numpy(_joined(name, drawn)))
    model.tie_weights()


def shapes_of(model: transformers.PreTrainedModel) -> dict[str, tuple[int, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            names = list(file.keys())
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}


def _joined(name: str, drawn: dict[str, np.ndarray]) -> np.ndarray:
    """Return a parameter of the model; those of experts are joined from the tensors of files."""
    if name in drawn:
        return drawn[name]
    before, after = name.rsplit(".mlp.", 1)
    sparse = f"{before}.block_sparse_moe"
    if after == "gate.weight":
        return drawn[f"{sparse}.gate.weight"]
    is_mixtral = f"{sparse}.experts.0.w1.weight" in drawn
    words = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    prefix = f"{sparse}.experts" if is_mixtral else f"{before}.mlp.experts"
    parts = words[:2] if after == "experts.gate_up_proj" else words[2:]
    count = sum(n.startswith(f"{prefix}.") and n.endswith(f".{words[0]}.weight") for n in drawn)
    return np.stack(
        [np.concatenate([drawn[f"{prefix}.{e}.{w}.weight"] for w in parts]) for e in range(count)]
    )


def error_of_bfloat16(model: transformers.PreTrainedModel, text: torch.Tensor) -> float:
    with torch.no_grad():
        exact = model(text).logits
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        difference = model(text).logits.float() - exact
    return float(difference.square().mean().sqrt() / exact.square().mean().sqrt())


def record(name: str) -> None:
    """Write a case's config.json, names and shapes of tensors, logits, and greedy tokens."""
    model, prompt = model_of(name), torch.from_numpy(tokens()).long()
    greedy = {"max_new_tokens": NUM_GENERATED, "do_sample": False, "eos_token_id": None}
    output = model.generate(prompt, **greedy, return_dict_in_generate=True, output_logits=True)
    text = output.sequences  # the prompt, and what is generated
    with torch.no_grad():
        logits = model(prompt).logits[0].numpy()
    left_out = ("transformers_version", "id2label", "label2id", "_name_or_path")
    content = {
        "transformers": transformers.__version__,
        "config": {k: v for k, v in model.config.to_dict().items() if k not in left_out},
        "shapes": {name: list(shape) for name, shape in shapes_of(model).items()},
        "largest": float(np.abs(logits).max()),
        "logits": [[float(f"{x:.9g}") for x in logits[i]] for i in POSITIONS],
        "generated": text[0, prompt.shape[1] :].tolist(),
        "generated_logits": [float(f"{float(step.max()):.9g}") for step in output.logits],
        "bfloat16_error": float(f"{error_of_bfloat16(model, text):.4g}"),
    }
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=None) + "\n")
    print(f"recorded {name}: logits up to {content['largest']:.2f}")


def loss_of(model: transformers.PreTrainedModel, step: int) -> torch.Tensor:
    inputs, targets = (torch.from_numpy(x).long() for x in batch(step))
    logits = model(inputs).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gradients_of(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    model.zero_grad()
    loss_of(model, 0).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters()}


def train() -> list[float]:
    """Return the losses of AdamW; matrices decay, norms do not."""
    model = model_of(TRAINED)
    parameters = [*model.parameters()]
    matrices = {"params": [p for p in parameters if p.ndim > 1]}
    norms = {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [matrices, norms],
        weight_decay=OPTIMIZER["weight_decay"],
        lr=OPTIMIZER["learning_rate"],
        betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]),
        eps=OPTIMIZER["eps"],
    )
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        (loss := loss_of(model, step)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER["grad_clip_norm"])
        optimizer.step()
        losses.append(loss.item())
    return losses


def record_training() -> None:
    gradients = gradients_of(model_of(TRAINED))
    numbers = {
        name: {"norm": np.linalg.norm(g).item(), "product": (g * probe(name, g.shape)).sum().item()}
        for name, g in gradients.items()
    }
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    content = versions | {"losses": train(), "gradients": numbers}
    (GOLDEN / "training.json").write_text(json.dumps(content) + "\n")
    print(f"recorded training: losses {content['losses'][0]:.4f} to {content['losses'][-1]:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or [*CASES, "training"]:
        record_training() if case == "training" else record(case)

"""Write the model card of an export: what the model is, and what the run says about itself."""

from collections.abc import Sequence

from maxpipe.checkpoint.policies import EVAL_LOSS
from maxpipe.checkpoint.record import Record
from maxpipe.config.model_places import run_of
from maxpipe.config.sections import Config
from maxpipe.data.documents import describe_sources

FILE = "README.md"
_TEXT = """---
library_name: transformers
pipeline_tag: text-generation
tags: [maxpipe, {model_type}]
---

# {name}

A decoder of type `{model_type}`, trained with maxpipe{version}.

| | |
|---|---|
{rows}

```python
from transformers import {classes}

model = AutoModelForCausalLM.from_pretrained("DIRECTORY")
{tokenizer}
```
"""


def stop_arguments(end_of_turn: str) -> str:
    """Return with which arguments `generate` of transformers ends at a text."""
    return f"stop_strings=[{end_of_turn!r}], tokenizer=tokenizer"


def model_card(
    config: Config,
    record: Record,
    *,
    steps: Sequence[int],
    model_type: str,
    dtype: str,
    size: int,
    learning_rate: str,
    version: str,
    has_tokenizer: bool,
    end_of_turn: str,
) -> str:
    """Return a card in Markdown; paths of the run stay out of it.

    Args:
      record, steps: of the checkpoint, or of the last of several whose weights were averaged.
      size: number of parameters.
      learning_rate: in words, with earlier ones.
      version: version of maxpipe that wrote the checkpoint; empty if the record does not say.
      has_tokenizer: whether transformers finds a tokenizer next to the card.
      end_of_turn: text that ends a turn of the assistant if no token does.
    """
    m, length = config.model, config.data.sequence_length
    tokens = f"of {config.data.global_batch_size * length:,} tokens"
    if config.data.batch_ramp:
        tokens = f"with {config.data.sequences(record.step) * length:,} tokens in all"
    start = "imported weights" if config.init_from else "random weights"
    start = "the weights of another run" if run_of(config.init_from) else start
    facts: dict[str, object] = {
        "parameters": f"{size:,}, {dtype}",
        "layers, width, vocabulary": f"{m.num_layers}, {m.embed_dim}, {m.num_token_ids}",
        "training": f"{record.step:,} steps {tokens} from {start}, in {m.dtype}",
        "sequence length": config.data.sequence_length,
        "data": describe_sources(config.data),
        "optimizer": f"{config.optimizer.name}, learning rate {learning_rate}",
        "seed": config.seed,
    }
    loss = record.meta.get(EVAL_LOSS)
    if len(steps) > 1:
        facts["weights"] = f"the mean of steps {', '.join(f'{step:,}' for step in steps)}"
    elif isinstance(loss, int | float):
        facts["evaluation loss"] = f"{loss:.4f} nats a token"
    tokenizer = "# The run had no file of a tokenizer."
    if has_tokenizer:
        tokenizer = 'tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")'
        if end_of_turn:
            tokenizer += f"\n# model.generate(..., {stop_arguments(end_of_turn)}) ends with a turn."
    return _TEXT.format(
        classes="AutoModelForCausalLM" + ", AutoTokenizer" * has_tokenizer,
        tokenizer=tokenizer,
        name=config.run_name,
        model_type=model_type,
        version=f" {version}" if version else "",
        rows="\n".join(f"| {name} | {fact} |" for name, fact in facts.items()),
    )

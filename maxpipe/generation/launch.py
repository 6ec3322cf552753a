"""Run `python -m maxpipe.generate`: load a checkpoint, continue a text, print it."""

import argparse
import sys

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.mirror import open_steps
from maxpipe.checkpoint.run_argument import find_step
from maxpipe.data.tokenizers import without_special_tokens
from maxpipe.generation.decoding import Sampling
from maxpipe.generation.model import Model
from maxpipe.generation.text import check_tokens, read_prompt

DONE, NOT_LOADED = 0, 1  # exit codes


def launch(flags: argparse.Namespace) -> int:
    """Print the prompt and what the model writes after it; return the exit code.

    Raises:
      ConfigError: run, step, tokenizer, prompt or stop tokens are not usable.
    """
    store = open_steps(flags.run_dir, "RUN_DIR")
    step = find_step(store, flags.step)
    try:
        model = Model(store, step, flags.tokenizer)
        # What the command line names is looked at before the parameters are read.
        tokenizer = model.find_tokenizer()
        check_tokens(flags.stop_token, model.config.model.num_token_ids)
        prompt = read_prompt(flags.prompt, tokenizer, model.config.data.sequence_length)
        model.load()
    except (CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable) as error:
        print(f"error: {store}/{step}: {error}", file=sys.stderr)
        return NOT_LOADED
    _show(without_special_tokens(tokenizer, flags.prompt))
    for text in model.stream(
        prompt,
        Sampling(flags.temperature, flags.top_k, flags.top_p),
        seed=flags.seed,
        max_tokens=flags.max_tokens,
        stop=flags.stop,
        stop_tokens=flags.stop_token,
    ):
        _show(text)
    _show("\n")
    return DONE


def _show(text: str) -> None:
    print(text, end="", flush=True)

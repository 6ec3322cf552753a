"""Run `python -m maxpipe.generate`: load a checkpoint, continue a text or answer, print it."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.steps import StepStore
from maxpipe.config.errors import ConfigError
from maxpipe.data.chat_template import Message
from maxpipe.data.tokenizers import without_special_tokens
from maxpipe.generate.chat import TooLong
from maxpipe.generate.model import Model
from maxpipe.generate.text import check_tokens, read_prompt

DONE, NOT_LOADED = 0, 1  # exit codes
Draw = Callable[[Sequence[int]], Iterator[str]]  # token ids of a prompt -> what follows


def launch(flags: argparse.Namespace, store: StepStore, steps: list[int]) -> int:
    """Print the prompt and what the model writes after it, or its answers; return the exit code.
    Takes the flags of `maxpipe.generate`, and the checkpoints of `find_checkpoint`.
    """
    system = [_said("system", flags.system)] if flags.system else []
    try:
        model = Model(store, steps, flags.tokenizer)
        # Check the command line's values before reading the parameters.
        tokenizer = model.find_tokenizer()
        check_tokens(flags.options.stop_tokens, model.config.model.num_token_ids)
        if flags.chat:
            prompt = model.read_conversation([*system, _said("user", flags.prompt or "")])
        else:
            prompt = read_prompt(flags.prompt, tokenizer, model.config)
        model.load()
    except (CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_LOADED
    draw: Draw = partial(model.answer if flags.chat else model.stream, options=flags.options)
    if flags.chat and flags.prompt is None:
        _talk(model, draw, system)
        return DONE
    if not flags.chat:
        _show(without_special_tokens(tokenizer, flags.prompt))
    _show_all(draw(prompt))
    return DONE


def _talk(model: Model, draw: Draw, system: Sequence[Message]) -> None:
    """Answer the lines of standard input until it ends, each as a turn of one conversation.

    A line that cannot be answered is left out at a terminal, and a ConfigError elsewhere.
    """
    is_terminal = sys.stdin.isatty()
    turns: list[Message] = []
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
            if line:
                conversation = [*turns, _said("user", line)]
                prompt = _read_newest(model, system, conversation)
                answer = _show_all(draw(prompt)).rstrip()
                turns = [*conversation, _said("assistant", answer)]
        except EOFError:
            return
        except ConfigError as error:
            if not is_terminal:
                raise
            problems = "; ".join(problem.message for problem in error.problems)
            print(f"(this line is left out: {problems})", file=sys.stderr)


def _read_newest(model: Model, system: Sequence[Message], turns: list[Message]) -> list[int]:
    """Return the prompt of a conversation, without its oldest turns if it is too long."""
    num_turns = len(turns)
    while True:
        try:
            prompt = model.read_conversation([*system, *turns])
        except TooLong:
            if len(turns) == 1:
                raise
            del turns[:2]  # a question and its answer
        else:
            if len(turns) < num_turns:
                limit = f"{model.config.data.sequence_length} tokens (data.sequence_length)"
                print(f"(the oldest turns are forgotten: it reads {limit})", file=sys.stderr)
            return prompt


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _show_all(texts: Iterable[str]) -> str:
    """Print texts as they come, and the end of the line; return them."""
    shown = ""
    for text in texts:
        _show(text)
        shown += text
    _show("\n")
    return shown


def _show(text: str) -> None:
    print(text, end="", flush=True)

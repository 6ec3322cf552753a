"""`python -m maxpipe.generate RUN_DIR --prompt TEXT`: a trained model goes on writing where the prompt ends.

Reads a checkpoint of any run, however it was laid out. Exit codes: 0; 1 if the checkpoint cannot be
loaded; 2 if the command line is wrong; 130 after Ctrl-C.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.places import Directory, place_of
from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.cli import exit_on_config_error
from maxpipe.config.load import from_record
from maxpipe.data.tokenizers import Tokenizer, load_tokenizer
from maxpipe.generation.text_stream import TextStream
from maxpipe.supervision.signals import INTERRUPTED

DONE, NOT_LOADED = 0, 1


@exit_on_config_error()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    flags = _parser().parse_args(argv)
    try:
        return _continue(flags)
    except KeyboardInterrupt:
        _show("\n")
        return INTERRUPTED


def _continue(flags: argparse.Namespace) -> int:
    place = place_of(flags.run_dir, "RUN_DIR")
    step = find_step(place, flags.step)
    try:
        config = from_record(place.record(step).meta["config"])
        tokenizer = find_tokenizer(flags.tokenizer, config)
        check_tokens(flags.stop_token, config.model.vocab_size)
        prompt = encode_prompt(flags.prompt, tokenizer, config.data.sequence_length)
        # A wrong command line must not wait for these imports.
        from maxpipe.generation.generate import generate, load_parameters
        from maxpipe.generation.sampling import Sampling

        with place.local_copy(step) as directory:
            params = load_parameters(directory, config)
    except (CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable) as error:
        print(f"error: {place}/{step}: {error}", file=sys.stderr)
        return NOT_LOADED
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p)
    ends = {tokenizer.eos_id, *flags.stop_token}
    stream, written = TextStream(tokenizer, prompt), ""
    _show(flags.prompt)
    for token in generate(
        config, params, prompt, sampling, seed=flags.seed, max_tokens=flags.max_tokens
    ):
        if token in ends:
            break
        written += _show(stream.add(token))
        if any(text in written for text in flags.stop):
            break
    _show(stream.rest() + "\n")
    return DONE


def find_step(place: Directory | Mirror, step: int | None) -> int:
    """The number of a committed step, the newest if `step` is None.

    Raises:
      ConfigError: there is none.
    """
    steps = place.steps()
    if not steps:
        raise ConfigError(
            Problem("RUN_DIR", f"{place} holds no checkpoint; train with checkpoint.every above 0")
        )
    if step is not None and step not in steps:
        raise ConfigError(Problem("--step", f"{step} is not saved in {place}; there are {steps}"))
    return steps[-1] if step is None else step


def find_tokenizer(given: str | None, config: Config) -> Tokenizer:
    """The tokenizer that --tokenizer names, that of the run if `given` is None.

    Raises:
      ConfigError: it is not there, or not any more, or has ids that the model does not know.
    """
    name_or_path = config.data.tokenizer if given is None else given
    try:
        tokenizer = load_tokenizer(name_or_path)
    except ConfigError as error:
        if given is not None:
            raise ConfigError(
                *(Problem("--tokenizer", problem.message) for problem in error.problems)
            ) from error
        moved = Problem("--tokenizer", "names the tokenizer of the run if it lies elsewhere by now")
        raise ConfigError(*error.problems, moved) from error
    known = config.model.vocab_size
    if tokenizer.vocab_size > known:
        message = f"{name_or_path} has {tokenizer.vocab_size} ids, the model {known}: it was trained with another"
        raise ConfigError(Problem("--tokenizer", message))
    return tokenizer


def check_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError for ids of --stop-token that the model cannot draw."""
    if outside := [str(token) for token in ids if token >= vocab_size]:
        message = f"the model has no token {', '.join(outside)}; its ids are below {vocab_size}"
        raise ConfigError(Problem("--stop-token", message))


def encode_prompt(prompt: str, tokenizer: Tokenizer, limit: int) -> list[int]:
    """Token ids of a prompt, after the begin of document if the tokenizer has one.

    Raises:
      ConfigError: it is empty, or has more than `limit` tokens.
    """
    ids = tokenizer.encode(prompt).tolist()
    if not ids:
        raise ConfigError(Problem("--prompt", "is empty; give the text to go on from"))
    if tokenizer.bos_id is not None and ids[0] != tokenizer.bos_id:
        ids = [tokenizer.bos_id, *ids]
    if len(ids) > limit:
        message = f"has {len(ids)} tokens, and the model has learned {limit} positions (data.sequence_length)"
        raise ConfigError(Problem("--prompt", f"{message}; shorten it"))
    return ids


def _show(text: str) -> str:
    print(text, end="", flush=True)
    return text


def _parser() -> argparse.ArgumentParser:
    description = "Continue a text with a trained model."
    parser = argparse.ArgumentParser(
        prog="python -m maxpipe.generate", description=description, allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "run_dir",
        metavar="RUN_DIR",
        help="run directory, or its checkpoints; s3:// and gs:// as well",
    )
    add("--prompt", required=True, metavar="TEXT", help="the text to go on from")
    add(
        "--max-tokens",
        type=_number(int, 1),
        default=200,
        metavar="N",
        help="tokens at most; default %(default)s",
    )
    add("--step", type=int, metavar="N", help="the checkpoint to read; default: the newest")
    add("--tokenizer", metavar="PATH", help="default: data.tokenizer of the run")
    add(
        "--temperature",
        type=_number(float, 0),
        default=0.8,
        metavar="X",
        help="below 1 keeps to likely tokens, 0 takes the likeliest; default %(default)s",
    )
    add(
        "--top-k",
        type=_number(int, 0),
        default=0,
        metavar="N",
        help="draw from so many likeliest tokens; 0 = all, the default",
    )
    add(
        "--top-p",
        type=_number(float, 1e-6, 1),
        default=1.0,
        metavar="P",
        help="draw from the likeliest tokens that have this probability together; 1 = all, the default",
    )
    add(
        "--seed",
        type=_number(int, 0),
        default=0,
        metavar="N",
        help="of the draws; default %(default)s",
    )
    add(
        "--stop",
        type=_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end after this text; may be repeated",
    )
    add(
        "--stop-token",
        type=_number(int, 0),
        action="append",
        default=[],
        metavar="ID",
        help="end before this token, as before the end of document; may be repeated",
    )
    return parser


def _text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("is empty, which every text contains")
    return text


def _number(kind: type, least: float, most: float = float("inf")) -> Callable[[str], float]:
    """An argparse type: a finite number within bounds."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value <= most or value == float("inf"):
            bounds = f"at least {least:g}" + (
                f" and at most {most:g}" if most < float("inf") else ""
            )
            bounds += " and finite" if value == float("inf") else ""
            raise argparse.ArgumentTypeError(f"must be {bounds}; got {text}")
        return value

    parse.__name__ = {int: "whole number", float: "number"}[kind]
    return parse


if __name__ == "__main__":
    sys.exit(main())

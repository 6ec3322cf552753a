"""Read the values of flags: `key=a,b`, shares, and tokens of a step."""

import argparse
import math
from collections.abc import Sequence

from maxpipe.config.errors import Problem
from maxpipe.config.options import OPTIONS, unknown_key
from maxpipe.config.sections import Config
from maxpipe.config.values import Scalar, check_bounds, convert

TOKENS = "--tokens-per-step"


def values_of(flag: str, words: Sequence[str]) -> tuple[dict[str, list[object]], list[Problem]]:
    """Return the values of `key=a,b` words, and what is wrong with them."""
    values: dict[str, list[object]] = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        if key not in OPTIONS or not equals:
            message = unknown_key(key) if equals else f"expected {flag} key=value"
            problems.append(Problem("", f"{flag} {word}: {message}"))
            continue
        parts = text.split(",") if flag == "--try" else [text]
        try:
            values[key] = [convert(OPTIONS[key], Scalar(part)) for part in parts]
            for value in values[key]:
                check_bounds(OPTIONS[key], value)
        except ValueError as error:
            problems.append(Problem("", f"{flag} {key}: {error}"))
    return values, problems


def share_of(text: str) -> float:
    number = text.removesuffix("%")
    try:
        share = float(number) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < 1:
        raise ValueError(f"--memory-margin: expected a share such as 10% or 0.1; got {text!r}")
    return share


def batches_of(
    config: Config, flags: argparse.Namespace, choices: dict[str, list[object]]
) -> tuple[int, ...]:
    """Return the global batches to try, in sequences."""
    if chosen := choices.get("data.global_batch_size"):
        if flags.tokens_per_step:
            raise ValueError(f"{TOKENS}: data.global_batch_size is given already")
        return tuple(int(str(batch)) for batch in chosen)
    length, first = config.data.sequence_length, config.data.global_batch_size
    if flags.tokens_per_step:
        tokens = convert(OPTIONS["data.global_batch_size"], Scalar(flags.tokens_per_step))
        first, left = divmod(int(str(tokens)), length)
        if left or first < 1:
            nearest = max(round(int(str(tokens)) / length), 1) * length
            raise ValueError(
                f"{TOKENS} {flags.tokens_per_step}: give a multiple of "
                f"data.sequence_length={length}; nearest: {nearest}"
            )
    most = flags.max_global_batch or first
    if most < first:
        raise ValueError(f"--max-global-batch {most}: is less than the {first} sequences of a step")
    return tuple(first * 2**n for n in range((most // first).bit_length()))

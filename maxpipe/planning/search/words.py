"""Read the values of flags: `key=a,b`, shares, and tokens of a step."""

import argparse
import math
from collections.abc import Sequence

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.errors import Problem
from maxpipe.config.options import OPTIONS, unknown_key
from maxpipe.config.sections import Config
from maxpipe.config.values import Scalar, check_bounds, convert, nearest
from maxpipe.planning.search.space import DERIVED, GATHERS, MESH_KEYS, SEARCHED

TOKENS, BATCH = "--tokens-per-step", "data.global_batch_size"
_COUNTS = (*MESH_KEYS, "pipeline.num_microbatches", "pipeline.num_repeats", BATCH)
_FOLLOWING = (
    *DERIVED,
    "pipeline.outside_layers",
    "compile.save",
    "compile.load",
    "compile.topology",
    "mesh.simulated_devices",
)


def values_of(flag: str, words: Sequence[str]) -> tuple[dict[str, list[object]], list[Problem]]:
    """Return the values of `key=a,b` words, and what is wrong with them."""
    values: dict[str, list[object]] = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        if key in values:
            problems.append(Problem("", f"{flag} {key}: is given twice"))
            continue
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


def problems_of(fixed: dict[str, list[object]], tried: dict[str, list[object]]) -> list[Problem]:
    """Return what is wrong with values of --fix and --try that a configuration may have."""
    problems = [
        Problem(
            "",
            f"--fix {key}: follows from what the plan decides, or from --topology; leave it out",
        )
        for key in fixed
        if key in _FOLLOWING
    ]
    problems += [
        Problem("", f"--fix {key}: leaves it no choice, and --try {key} does; give one of them")
        for key in fixed
        if key in tried
    ]
    problems += [
        Problem(
            "", f"--try {key}: the plan searches {', '.join(SEARCHED)}; --fix {key}=VALUE sets it"
        )
        for key in tried
        if key not in SEARCHED
    ]
    if len(modes := tried.get(GATHERS, [])) > 1 and "auto" in modes:
        message = f"--try {GATHERS}: auto stands for every mode; leave it or the others out"
        problems.append(Problem("", message))
    for flag, values in (("--fix", fixed), ("--try", tried)):
        messages = {_refusal(key, v): key for key, chosen in values.items() for v in chosen}
        problems += [Problem("", f"{flag} {key}: {text}") for text, key in messages.items() if text]
    return problems


def _refusal(key: str, value: object) -> str:
    """Return why the plan cannot search with a value; "" if it can."""
    if key in _COUNTS and int(str(value)) < 1:
        return f"the plan derives nothing from {value}; give a number of at least 1"
    if key == "pipeline.engine" and value not in ENGINES:
        return f"the plan tries engines by name: {', '.join(ENGINES)}; got {value}"
    if key == "pipeline.schedule" and value not in SCHEDULES:
        if str(value).endswith(".csv"):
            return "a schedule from a file has no closed form"
        names = [*SCHEDULES]
        return f"{value!r} is not one of {', '.join(names)}{nearest(str(value), names)}"
    return ""


def share_of(text: str) -> float:
    """Return a share that is written as "10%" or "0.1".

    Raises:
      ValueError: it is none from 0 to below 1.
    """
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
    if chosen := choices.get(BATCH):
        if flags.tokens_per_step:
            raise ValueError(f"{TOKENS}: {BATCH} is given already")
        if flags.max_global_batch is not None:
            raise ValueError(f"--max-global-batch: {BATCH} is given already")
        return tuple(int(str(batch)) for batch in chosen)
    length, first = config.data.sequence_length, config.data.global_batch_size
    if flags.tokens_per_step:
        tokens = convert(OPTIONS[BATCH], Scalar(flags.tokens_per_step))
        first, left = divmod(int(str(tokens)), length)
        if left or first < 1:
            near = max(round(int(str(tokens)) / length), 1) * length
            raise ValueError(
                f"{TOKENS} {flags.tokens_per_step}: give a multiple of "
                f"data.sequence_length={length}; nearest: {near}"
            )
    most = first if flags.max_global_batch is None else flags.max_global_batch
    if most < first:
        raise ValueError(f"--max-global-batch {most}: is less than the {first} sequences of a step")
    return tuple(first * 2**n for n in range((most // first).bit_length()))

"""Read --fix key=value and --try key=a,b."""

from collections.abc import Sequence

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.errors import Problem
from maxpipe.config.options import OPTIONS, unknown_key
from maxpipe.config.values import Scalar, check_bounds, convert, nearest
from maxpipe.planning.search.space import BATCH, FOLLOWING, GATHERS, MESH_KEYS, REPEATS, SEARCHED

_COUNTS = (*MESH_KEYS, "pipeline.num_microbatches", REPEATS, BATCH)


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
            converted: list[object] = []
            for value in (convert(OPTIONS[key], Scalar(part)) for part in parts):
                check_bounds(OPTIONS[key], value)
                if value not in converted:
                    converted.append(value)
            values[key] = converted
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
        if key in FOLLOWING
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

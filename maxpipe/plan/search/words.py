"""Read --fix key=value and --try key=a,b."""

from collections.abc import Sequence

from maxpipe.config.catalog import ENGINES, SCHEDULES
from maxpipe.config.errors import Problem
from maxpipe.config.files import Setting, read_overrides, split_values
from maxpipe.config.options import OPTIONS, unknown_key
from maxpipe.config.rules.layout import is_csv
from maxpipe.config.values import check_bounds, convert, nearest
from maxpipe.plan.search.space import BATCH, FOLLOWING, GATHERS, MESH_KEYS, REPEATS, SEARCHED

_COUNTS = (*MESH_KEYS, "pipeline.num_microbatches", REPEATS, BATCH)


def values_of(flag: str, words: Sequence[str]) -> tuple[dict[str, list[object]], list[Problem]]:
    """Return the values of `key=a,b` words, and what is wrong with them."""
    values: dict[str, list[object]] = {}
    problems = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            problems.append(Problem("", f"{flag} {word}: expected {flag} key=value"))
            continue
        given: dict[str, list[object]] = {}
        for part in split_values(text) if flag == "--try" else [text]:
            settings, wrong = read_overrides([f"{key}={part}"])
            problems += [Problem("", f"{flag} {word}: {problem.message}") for problem in wrong]
            for setting in settings:
                try:
                    value = _value(setting)
                except ValueError as error:
                    problems.append(Problem("", f"{flag} {setting.key}: {error}"))
                    continue
                some = given.setdefault(setting.key, [])
                some += [value] * (value not in some)
        twice = given.keys() & values.keys()
        problems += [Problem("", f"{flag} {name}: is given twice") for name in sorted(twice)]
        values |= given
    return values, problems


def _value(setting: Setting) -> object:
    """Return the value of a setting.

    Raises:
      ValueError: there is no such key, or the value is not legal.
    """
    if setting.key not in OPTIONS:
        raise ValueError(unknown_key(setting.key))
    option = OPTIONS[setting.key]
    value = convert(option, setting.raw)
    check_bounds(option, value)
    return value


def problems_of(fixed: dict[str, list[object]], tried: dict[str, list[object]]) -> list[Problem]:
    """Return what is wrong with values of --fix and --try, each legal in a configuration."""
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
        if is_csv(str(value)):
            return "a schedule from a file has no closed form"
        names = [*SCHEDULES]
        return f"{value!r} is not one of {', '.join(names)}{nearest(str(value), names)}"
    return ""

"""Explain keys and sections: what a key does, its type, default, legal values and engines."""

from collections.abc import Iterator

from maxpipe.config.catalog import ENGINES, SCHEDULES, RematPolicy, Schedule
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import OWN_VARIANTS
from maxpipe.config.options import OPTIONS, SECTIONS, Option, unknown_key
from maxpipe.config.rules.engines import conditions_of, refusals_of
from maxpipe.config.rules.layout import schedules_of
from maxpipe.config.values import as_written, example

_LONGEST_DEFAULT = 40  # characters of a default in the list of a section


def describe(key: str) -> str:
    """Return help on a key, or on all keys of a section; the last word of either is enough.

    Raises:
      ConfigError: there is no such key.
    """
    names = [*OPTIONS, *SECTIONS]
    if key not in names:
        matches = [name for name in names if name.rpartition(".")[2] == key]
        if not matches:
            raise ConfigError(Problem(key, unknown_key(key)))
        return "\n".join(describe(match) for match in matches)
    if key in SECTIONS:
        inside = [option for option in OPTIONS.values() if option.key.startswith(f"{key}.")]
        return "".join(
            f"{option.key:<40} {_facts(option)}\n    {option.bounds.help}\n" for option in inside
        )
    option = OPTIONS[key]
    titled = [*_value_lines(option), *_variant_lines(option), *_engine_lines(key)]
    titled += [("no effect", condition) for condition in conditions_of(key)]
    lines = [f"  {title:<11} {text}" for title, text in titled]
    return "\n".join([f"{key}: {option.bounds.help}", *lines]) + "\n"


def _facts(option: Option) -> str:
    facts = dict(_value_lines(option))
    if len(facts["default"]) > _LONGEST_DEFAULT:
        facts["default"] = "see --print-config"
    kind = facts["type"]
    if "choices" in facts:
        kind = f"{'list' if isinstance(option.default, list) else 'one'} of {facts['choices']}"
    legal = f", {facts['legal']}" if "legal" in facts else ""
    return f"{kind}; default {facts['default']}{legal}"


def _value_lines(option: Option) -> Iterator[tuple[str, str]]:
    """Yield titles and texts on the type, default and legal values of a key."""
    bounds, kind = option.bounds, option.type
    yield "type", kind.__name__ if isinstance(kind, type) else f"list such as {example(option)}"
    yield "default", repr(option.default)
    if option.choices:
        yield "choices", ", ".join(option.choices)
    signs = [(">=", bounds.minimum), (">", bounds.above), ("<=", bounds.maximum)]
    limits = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
    if limits:
        yield "legal", " and ".join(limits) + (", or -1 = derived" if bounds.derived else "")


def _variant_lines(option: Option) -> Iterator[tuple[str, str]]:
    table = SCHEDULES if option.key == "pipeline.schedule" else option.bounds.variants or {}
    width = max((len(name) for name in table), default=0)
    for name, variant in table.items():
        summary = getattr(variant, "summary", "")
        if isinstance(variant, RematPolicy):
            places = {"on the device": variant.device, "in the host's memory": variant.host}
            saved = [f"{', '.join(names)} {place}" for place, names in places.items() if names]
            summary = summary or f"saves {' and '.join(saved)}"
        if isinstance(variant, Schedule):
            summary = f"{summary} ({', '.join(variant.engines)})"
        yield "", f"{name:<{width}}  {summary}"
    if option.key == "pipeline.schedule":
        yield "", f"{'FILE.csv':<{width}}  a table of your own"
    if table and table is not ENGINES:
        yield "", OWN_VARIANTS


def _engine_lines(key: str) -> Iterator[tuple[str, str]]:
    if key == "pipeline.schedule":
        for name in ENGINES:
            if schedules := schedules_of(name):
                yield name, f"runs {', '.join(schedules)}"
    elif key.startswith("pipeline.") and key != "pipeline.engine":
        yield "engines", ", ".join(name for name, engine in ENGINES.items() if engine.takes(key))
        for name in ENGINES:
            values_by_reason: dict[str, list[str]] = {}
            for refusal in refusals_of(name, key):
                values = map(as_written, refusal.values)
                values_by_reason.setdefault(refusal.reason, []).extend(values)
            for reason, refused in values_by_reason.items():
                yield "", f"{name} refuses {', '.join(refused)}: {reason}"

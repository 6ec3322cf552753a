"""Parse what every command takes: `CONFIG.yml key=value ...`, --print-config and --help [KEY]."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import nearest_files
from maxpipe.config.load import Loaded, load
from maxpipe.config.options import OPTIONS, SECTIONS, Option, unknown_key
from maxpipe.config.printing import print_config, unused_keys
from maxpipe.config.rules.engines import refusals_of
from maxpipe.config.rules.stages import schedules_of
from maxpipe.config.terminal import no_tracebacks
from maxpipe.config.values import example, nearest

CONFIG_ERROR = 2

AddFlags = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
      path: the YAML file.
      loaded: its config with overrides.
      flags: values of the command's own flags.
    """

    path: str
    loaded: Loaded
    flags: argparse.Namespace


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turn a ConfigError into one line per problem on stderr and exit code 2, without a traceback.

    A context manager and a decorator for `main`, so that problems before and after JAX's start look
    the same. A closed pipe and Ctrl-C leave no traceback either, see `no_tracebacks`.
    """
    try:
        with no_tracebacks():
            yield
    except ConfigError as error:
        print_problems(error)
        raise SystemExit(CONFIG_ERROR) from None


def print_problems(error: ConfigError) -> None:
    """Print one line per problem to stderr, and their number."""
    count = len(error.problems)
    lines = [f"config error: {problem}" for problem in error.problems]
    lines.append(f"{count} problem{'s' if count > 1 else ''} found")
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    add_flags: AddFlags | None = None,
) -> Arguments:
    """Parse a command line and load its config; --help and --print-config print and exit with 0.

    Args:
      argv: words after the program's name; None = `sys.argv`.
      prog: the command as users type it, such as `python -m maxpipe.train`.
      description: what the command does, one line.
      add_flags: adds the command's own flags to the parser.

    Raises:
      ConfigError: the command line or the config is wrong.
    """
    parser = _Parser(prog=prog, description=description, add_help=False, allow_abbrev=False)
    parser.add_argument("config", nargs="?", metavar="CONFIG.yml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument(
        "--print-config", action="store_true", help="print every value with its source, and exit"
    )
    parser.add_argument(
        "--help",
        "-h",
        nargs="?",
        const="",
        metavar="KEY",
        help="print this, or help on a key or section",
    )
    if add_flags:
        add_flags(parser)
    flags, unknown = parser.parse_known_intermixed_args(argv)
    if flags.help is not None:
        print(_help(parser, flags.help), end="")
        raise SystemExit(0)
    problems = [Problem("", message) for message in _unknown_flags(unknown, flags, parser)]
    path = flags.config
    if path is None or ("=" in path and not path.endswith((".yml", ".yaml"))):
        near = nearest_files("configs/base.yml")
        hint = f"; there are {', '.join(near)}" if near else ""
        raise ConfigError(
            *problems, Problem("", f"no config file: {prog} CONFIG.yml key=value ...{hint}")
        )
    try:
        loaded = load(path, flags.overrides)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    if flags.print_config:
        print(print_config(loaded), end="")
        raise SystemExit(0)
    return Arguments(path, loaded, flags)


def describe(key: str) -> str:
    """Return help on a key, or on all keys of a section.

    Help on a key says what it does, its type, legal values, default and engines, and where it has
    no effect.

    Raises:
      ConfigError: there is no such key.
    """
    if key in SECTIONS:
        inside = [option for option in OPTIONS.values() if option.key.startswith(f"{key}.")]
        return "".join(f"{option.key:<40} {option.bounds.help}\n" for option in inside)
    if key not in OPTIONS:
        raise ConfigError(Problem(key, unknown_key(key)))
    lines = [f"{key}: {OPTIONS[key].bounds.help}"]
    for title, text in [*_value_lines(OPTIONS[key]), *_engine_lines(key), *_unused_lines(key)]:
        lines.append(f"  {title:<11} {text}")
    return "\n".join(lines) + "\n"


def _value_lines(option: Option) -> Iterator[tuple[str, str]]:
    """Yield titles and texts on the type, default and legal values of a key."""
    bounds = option.bounds
    kind = (
        option.type.__name__ if isinstance(option.type, type) else f"list such as {example(option)}"
    )
    yield "type", kind
    yield "default", repr(option.default)
    if option.choices:
        yield "choices", ", ".join(option.choices)
    signs = [(">=", bounds.minimum), (">", bounds.above), ("<=", bounds.maximum)]
    limits = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
    if limits:
        yield "legal", " and ".join(limits) + (", or -1 = derived" if bounds.derived else "")


def _engine_lines(key: str) -> Iterator[tuple[str, str]]:
    """Yield titles and texts on the engines that take a key, and why others do not."""
    if key == "pipeline.engine":
        for name, engine in ENGINES.items():
            yield name, engine.summary
    elif key == "pipeline.schedule":
        for name in ENGINES:
            if schedules := schedules_of(name):
                yield name, f"runs {', '.join(schedules)}"
    elif key.startswith("pipeline."):
        yield "engines", ", ".join(name for name, engine in ENGINES.items() if engine.takes(key))
        for name in ENGINES:
            for sentence in _reasons(name, key):
                yield "", sentence


def _reasons(engine: str, key: str) -> list[str]:
    """Return which values of a key an engine refuses, or that it ignores the key, and why."""
    values_by_reason: dict[str, list[str]] = {}
    for refusal in refusals_of(engine, key):
        values = [
            str(value).lower() if isinstance(value, bool) else str(value)
            for value in refusal.values
        ]
        values_by_reason.setdefault(refusal.reason, []).extend(values)
    if values_by_reason or ENGINES[engine].takes(key):
        return [
            f"{engine} refuses {', '.join(values)}: {reason}"
            for reason, values in values_by_reason.items()
        ]
    if not ENGINES[engine].has_stages:
        return [f"{engine} ignores it: it has no stages"]
    if key in ("pipeline.parallel_layers", "pipeline.outside_layers"):
        return [f"{engine} has no layers outside the pipeline"]
    return [f"{engine} ignores it"]


def _unused_lines(key: str) -> Iterator[tuple[str, str]]:
    """Yield a title and text on the values of other keys with which a key has no effect."""
    switches = [
        f"{switch}={value}" for (switch, value), keys in unused_keys().items() if key in keys
    ]
    if switches:
        yield "unused", f"with {', '.join(switches)}"


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line like a bad config."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(Problem("", f"{message}; see {self.prog} --help"))


def _help(parser: argparse.ArgumentParser, key: str) -> str:
    if key and not key.endswith((".yml", ".yaml")):
        return describe(key)
    top = "".join(
        f"  {option.key:<16} {option.bounds.help}\n"
        for option in OPTIONS.values()
        if "." not in option.key
    )
    sections = ", ".join(section for section in SECTIONS if "." not in section)
    usage = parser.format_help()
    return (
        f"{usage}\nkeys:\n{top}sections (--help SECTION or --help KEY prints more):\n  {sections}\n"
    )


def _unknown_flags(
    words: Sequence[str], flags: argparse.Namespace, parser: argparse.ArgumentParser
) -> Iterator[str]:
    """Yield a message for each unknown flag; a word after it, as in `--steps 5`, is its value."""
    rest = [*words]
    while rest:
        word = rest.pop(0)
        value = ""
        if word.startswith("-") and "=" not in word:
            if rest and not rest[0].startswith("-"):
                value = rest.pop(0)
            elif flags.overrides and "=" not in flags.overrides[-1]:
                value = flags.overrides.pop()
        yield _unknown_flag(word, value, parser)


def _unknown_flag(word: str, value: str, parser: argparse.ArgumentParser) -> str:
    name, _, inner = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if name in OPTIONS:
        right = f"{name}={inner or value or 'VALUE'}"
        return f"{word}: keys are written without dashes: {right}"
    flags = [
        flag
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]
    return f"there is no flag {word}; the flags are {', '.join(flags)}{nearest(word, flags)}"

"""The front of every command: `CONFIG.yml key=value ...`, --print-config, --help [KEY]."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.files import nearest_files
from maxpipe.config.load import Loaded, load
from maxpipe.config.nearest import unknown_key
from maxpipe.config.options import OPTIONS, SECTIONS
from maxpipe.config.printing import print_config
from maxpipe.config.values import nearest

CONFIG_ERROR = 2

AddFlags = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Arguments:
    """A parsed command line: the YAML file, its loaded config, and the values of the command's own flags."""

    path: str
    loaded: Loaded
    flags: argparse.Namespace


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turns a ConfigError into one line per problem on stderr and exit code 2, without a traceback.

    A context manager and a decorator, for the whole of a `main`: checks made after JAX's start look
    alike.
    """
    try:
        yield
    except ConfigError as error:
        print_problems(error)
        raise SystemExit(CONFIG_ERROR) from None


def print_problems(error: ConfigError) -> None:
    """One line per problem on stderr, and how many there are."""
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
    """Parses a command line and loads the config it names; --help and --print-config print and exit with 0.

    Args:
      argv: words after the program's name; None = those of this process.
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
        help="print this, or about a key or section",
    )
    if add_flags:
        add_flags(parser)
    flags, unknown = parser.parse_known_intermixed_args(argv)
    if flags.help is not None:
        print(_help(parser, flags.help), end="")
        raise SystemExit(0)
    problems = [Problem("", _unknown_flag(word, parser)) for word in unknown]
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
    """Help on a key (what it does, type, legal values, default) or on all keys of a section.

    Raises:
      ConfigError: there is no such key.
    """
    if key in SECTIONS:
        inside = [option for option in OPTIONS.values() if option.key.startswith(f"{key}.")]
        return "".join(f"{option.key:<40} {option.bounds.help}\n" for option in inside)
    if key not in OPTIONS:
        raise ConfigError(Problem(key, unknown_key(key)))
    option = OPTIONS[key]
    bounds = option.bounds
    kind = (
        option.type.__name__
        if isinstance(option.type, type) and option.type is not list
        else str(option.type)
    )
    lines = [f"{key}: {bounds.help}", f"  type     {kind}", f"  default  {option.default!r}"]
    if option.choices:
        lines.append(f"  choices  {', '.join(option.choices)}")
    signs = [(">=", bounds.minimum), (">", bounds.above), ("<=", bounds.maximum)]
    limits = [f"{sign} {bound}" for sign, bound in signs if bound is not None]
    if limits:
        lines.append(
            f"  legal    {' and '.join(limits)}{', or -1 = derived' if bounds.derived else ''}"
        )
    return "\n".join(lines) + "\n"


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
        f"{usage}\nkeys:\n{top}sections (--help SECTION or --help KEY tells more):\n  {sections}\n"
    )


def _unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    name = word.lstrip("-").partition("=")[0].replace("-", "_")
    if name in OPTIONS:
        return f"{word}: keys are written without dashes: {name}=VALUE"
    flags = [
        flag
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--")
    ]
    return f"there is no flag {word}; the flags are {', '.join(flags)}{nearest(word, flags)}"

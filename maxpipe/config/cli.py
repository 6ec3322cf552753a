"""Parse what every command takes: `CONFIG.yml key=value ...`, --print-config and --help [KEY]."""

import argparse
import math
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from maxpipe.config.errors import ConfigError, Problem, redacted
from maxpipe.config.files import repeated_words
from maxpipe.config.imports import add_import_flag, import_variants
from maxpipe.config.load import Loaded, load
from maxpipe.config.options import OPTIONS, SECTIONS
from maxpipe.config.printing import describe, print_config
from maxpipe.config.shipped import locate_config, names_config, shipped_configs
from maxpipe.config.terminal import no_tracebacks
from maxpipe.config.values import nearest

FAILED = 1
CONFIG_ERROR = 2

AddFlags = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Arguments:
    """A parsed command line; `flags` has the values of the command's own flags."""

    path: str
    loaded: Loaded
    flags: argparse.Namespace

    @property
    def files(self) -> set[str]:
        """Return the configuration's file and the files that its values come from."""
        places = {source.rpartition(":")[0] for source in self.loaded.sources.values()}
        return {locate_config(self.path), *places} - {""}


@contextmanager
def exit_on_config_error() -> Iterator[None]:
    """Turn a ConfigError into one line per problem on stderr and exit code 2, without a traceback.

    A file or directory without permission leaves one line and exit code 1. A context manager and a
    decorator for `main`, so that problems before and after JAX's start look the same.
    """
    try:
        with no_tracebacks():
            yield
    except ConfigError as error:
        print_problems(error)
        raise SystemExit(CONFIG_ERROR) from None
    except PermissionError as error:
        if not error.filename:
            raise
        remedy = "give this user access, or name another place"
        print(f"error: {error.filename}: {error.strerror}; {remedy}", file=sys.stderr, flush=True)
        raise SystemExit(FAILED) from None


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
    undecided: Collection[str] = (),
) -> Arguments:
    """Parse a command line and load its config; --help and --print-config print and exit with 0.

    Args:
      prog: the command as users type it, such as `python -m maxpipe.train`.
      add_flags: adds the command's own flags.
      undecided: keys whose values the command chooses itself, see `load`.

    Raises:
      ConfigError: the command line or the config is wrong.
    """
    parser = _Parser(prog=prog, description=description, add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG.yml", help="a YAML file, or the name of a preset")
    add("overrides", nargs="*", metavar="key=value")
    add("--print-config", action="store_true", help="print every value with its source, and exit")
    about = "print this, or help on a key or section"
    add("--help", "-h", nargs="?", const="", metavar="KEY", help=about)
    add_import_flag(parser)
    if add_flags:
        add_flags(parser)
    flags, unknown = parser.parse_known_intermixed_args(argv)
    import_variants(flags.imports)
    if flags.help is not None:
        print(_help(parser, flags.help), end="")
        raise SystemExit(0)
    problems = [
        Problem("", _unknown_flag(word, parser)) for word in unknown if word.startswith("-")
    ]
    if problems:  # what follows such a flag is its value
        flags.overrides = [word for word in flags.overrides if "=" in word]
    problems += _empty_flags(flags, *(name for name in vars(flags) if name != "config"))
    problems += repeated_words(flags.overrides)
    path = flags.config
    if path is None or ("=" in path and not path.endswith((".yml", ".yaml"))):
        names = ", ".join(shipped_configs())
        message = f"no config file: {prog} CONFIG.yml key=value ...; presets that ship: {names}"
        raise ConfigError(*problems, Problem("", message))
    try:
        loaded = load(path, flags.overrides, undecided)
    except ConfigError as error:
        raise ConfigError(*problems, *error.problems) from None
    if problems:
        raise ConfigError(*problems)
    if flags.print_config:
        print(redacted(print_config(loaded)), end="")
        raise SystemExit(0)
    return Arguments(path, loaded, flags)


def _empty_flags(flags: argparse.Namespace, *names: str) -> Iterator[Problem]:
    for name in names:
        value = getattr(flags, name)
        if isinstance(value, str) and not value.strip():
            flag = f"--{name.replace('_', '-')}"
            yield Problem(flag, "is empty; give a value, or leave it out")


def check_flags(flags: argparse.Namespace, *names: str) -> None:
    """Raise ConfigError if one of these flags is given an empty text, as in `--json ""`."""
    if problems := [*_empty_flags(flags, *names)]:
        raise ConfigError(*problems)


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line like a bad config."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise ConfigError(Problem("", f"{message}; see {self.prog} --help"))


def number_flag(kind: type, least: float) -> Callable[[str], float]:
    """Return the type of a flag for argparse: a finite number of at least `least`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {least:g}; got {text}")
        return value

    parse.__name__ = {int: "whole number", float: "number"}[kind]
    return parse


def _help(parser: argparse.ArgumentParser, key: str) -> str:
    if key and not names_config(key):
        return describe(key)
    top = "".join(
        f"  {option.key:<16} {option.bounds.help}\n"
        for option in OPTIONS.values()
        if "." not in option.key
    )
    sections = ", ".join(section for section in SECTIONS if "." not in section)
    usage = parser.format_help()
    presets = textwrap.fill(", ".join(shipped_configs()), 98, break_on_hyphens=False)
    return (
        f"{usage}\npresets (in place of CONFIG.yml):\n{textwrap.indent(presets, '  ')}\n"
        f"keys:\n{top}sections (--help SECTION or --help KEY prints more):\n  {sections}\n"
    )


def _unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    name, _, value = word.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if keys := [key for key in OPTIONS if key == name or key.endswith(f".{name}")]:
        right = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
        return f"{word}: keys are written without dashes: {right}"
    flags = [
        flag
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--") and action.help != argparse.SUPPRESS
    ]
    return f"there is no flag {word}; the flags are {', '.join(flags)}{nearest(word, flags)}"

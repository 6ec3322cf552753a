"""Write the generated tables of docs/: every configuration key, and MaxText's keys with ours.

    python scripts/generate_docs.py            write them
    python scripts/generate_docs.py --check    exit with 1 if a page is not up to date

A table stands between two marks in its page; everything around them is written by hand.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from maxpipe.config.catalog import ENGINES
from maxpipe.config.maxtext import KEYS, LIMITS
from maxpipe.config.options import OPTIONS, SECTIONS, Option
from maxpipe.config.rules.engines import conditions_of, refusals_of
from maxpipe.config.sections import Config

DOCS = Path(__file__).resolve().parents[1] / "docs"
LONGEST_DEFAULT = 40  # characters of a default that fit a table


def engines_of(key: str) -> str:
    """Return the engines that take a key, as the table shows them; empty outside `pipeline.*`.

    An engine that refuses some of the key's choices is named again with these.
    """
    if not key.startswith("pipeline."):
        return ""
    engines = [name for name, engine in ENGINES.items() if engine.takes(key)]
    cell = "all" if len(engines) == len(ENGINES) else ", ".join(engines)
    for name in engines:
        values = [str(value) for refusal in refusals_of(name, key) for value in refusal.values]
        if refused := [f"`{value}`" for value in values if value in OPTIONS[key].choices]:
            cell += f"; {name} without {', '.join(refused)}"
    return cell


def default_of(option: Option) -> str:
    text = str(option.default).lower() if option.type is bool else str(option.default)
    if not text:
        return "empty"
    return f"`{text}`" if len(text) <= LONGEST_DEFAULT else "see `--print-config`"


def legal_values(option: Option) -> str:
    """Return the type, or the closed list of choices, with bounds."""
    bounds = option.bounds
    if option.choices:
        listed = "list of " if isinstance(option.default, list) else ""
        return listed + ", ".join(f"`{choice}`" for choice in option.choices)
    kinds = {int: "integer", float: "number", bool: "`true`, `false`", str: "text"}
    limits = [("≥", bounds.minimum), (">", bounds.above), ("≤", bounds.maximum)]
    ranges = " and ".join(f"{sign} {value}" for sign, value in limits if value is not None)
    is_list = option.type not in kinds
    kind = "list" if is_list else kinds[option.type]
    derived = ", or `auto`" if is_list else ", or -1"
    return f"{kind} {ranges}".strip() + (derived if bounds.derived else "")


def rows_of(options: Sequence[Option]) -> Iterator[str]:
    """Yield a Markdown table of keys; keys of pipelines have a column for the engines."""
    has_engines = options[0].key.startswith("pipeline.")
    titles = ["key", "default", "legal values", "meaning", *["engines"] * has_engines]
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for option in options:
        cells = [f"`{option.key}`", default_of(option), legal_values(option)]
        needs = [f"no effect {condition}" for condition in conditions_of(option.key)]
        meaning = "; ".join([option.bounds.help, *needs])
        cells.append(meaning.replace("<", "&lt;").replace("*", "\\*"))
        if has_engines:
            cells.append(engines_of(option.key))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def option_tables() -> str:
    """Return a heading and a table for each top-level section, in the order of the YAML file."""
    sections = [field.name for field in fields(Config) if field.name in SECTIONS]
    top_level = [option for key, option in OPTIONS.items() if "." not in key]
    parts = ["### Run", "", *rows_of(top_level)]
    for section in sections:
        options = [option for key, option in OPTIONS.items() if key.startswith(f"{section}.")]
        parts += ["", f"### {section}", "", *rows_of(options)]
    return "\n".join(parts)


def maxtext_tables() -> str:
    """Return MaxText's keys: those with a counterpart, and those with one legal value."""
    translated = [
        f"| `{key}` | {f'`{ours}`' if ours else '-'} | {differs} |"
        for key, (ours, differs, _) in KEYS.items()
    ]
    limited = [
        f"| {', '.join(f'`{key}`' for key in limit.keys)} | {limit.advice} | "
        f"{'refused' if limit.blocks else 'noted'} |"
        for limit in LIMITS
    ]
    return "\n".join(
        [
            "| MaxText | maxpipe | what differs |",
            "|---|---|---|",
            *translated,
            "",
            "These have no key here. maxpipe does what their default does; `maxpipe.from_maxtext`",
            "refuses or notes another value. All others are not translated.",
            "",
            "| MaxText | here | another value |",
            "|---|---|---|",
            *limited,
        ]
    )


TABLES: dict[str, tuple[str, str, Callable[[], str]]] = {
    "configuration.md": (
        "<!-- generated keys: start -->",
        "<!-- generated keys: end -->",
        option_tables,
    ),
    "maxtext.md": (
        "<!-- MaxText keys: start -->",
        "<!-- MaxText keys: end -->",
        maxtext_tables,
    ),
}


def page(name: str) -> str:
    """Return the text of a page with its table made afresh.

    Raises:
      ValueError: the page lacks the marks.
    """
    start, end, table = TABLES[name]
    before, found_start, rest = (DOCS / name).read_text(encoding="utf-8").partition(start)
    _, found_end, after = rest.partition(end)
    if not found_start or not found_end:
        raise ValueError(f"docs/{name} lacks the marks {start} and {end}")
    return f"{before}{start}\n{table()}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the generated tables of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args(argv)
    stale = [name for name in TABLES if page(name) != (DOCS / name).read_text(encoding="utf-8")]
    for name in stale:
        if not options.check:
            (DOCS / name).write_text(page(name), encoding="utf-8")
        print(f"docs/{name} {'is not up to date' if options.check else 'written'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())

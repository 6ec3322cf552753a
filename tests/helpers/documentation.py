"""The pages of the documentation, and the commands in them."""

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from helpers.hf_folder import write_folder
from maxpipe.config import catalog

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
}
TEXT = "\n".join(PAGES.values())


def fences(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


# What begins a command in inline code, before at least one word more.
PROGRAM = re.compile(
    r"(python|maxpipe|pip|pytest|mkdocs|docker|sbatch|(scripts|examples)/[\w/.]+)\s"
)
# The name of a command, without what it works on.
NAME = re.compile(r"(python -m [\w.]+|(maxpipe|pip|scripts/launch/tpu_vm\.sh) \w+)$")
# Words of the reader's, such as DIR or "CONFIG key=value", and what is left out.
PLACEHOLDER = re.compile(r"\.\.\.|…|(?<![\w.=/-])[A-Z]{2,}\b")


def commands(text: str) -> list[str]:
    """Return all lines of shell fences, and inline code that is a command, without comments.

    Of a pipe the first program counts. `maxpipe X` is returned as the `python -m maxpipe.X` that
    it is.
    """
    joined = [fence.replace("\\\n", " ") for fence in fences("bash", text)]
    lines = [line for fence in joined for line in fence.splitlines()]
    lines += [code.partition(" | ")[0] for code in inline_commands(text)]
    words = (shlex.join(_as_module(shlex.split(line, comments=True))) for line in lines)
    return [*dict.fromkeys(command for command in words if command)]


def inline_commands(text: str) -> list[str]:
    """Return inline code that is a command: it begins with a program, and has something to work on.

    What has a placeholder in it is a fragment, and left out.
    """
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    codes = re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)
    left_out = (NAME.fullmatch, PLACEHOLDER.search)
    return [c for c in codes if PROGRAM.match(c) and not any(rule(c) for rule in left_out)]


def _as_module(words: list[str]) -> list[str]:
    """Return the words of `maxpipe X ...` as those of `python -m maxpipe.X ...`."""
    if words[:1] == ["maxpipe"] and len(words) > 1:
        return ["python", "-m", f"maxpipe.{words[1]}", *words[2:]]
    return words


# The first page that has a command is the one to run it.
COMMANDS = {
    command: page for page, text in reversed(PAGES.items()) for command in reversed(commands(text))
}


def titled_files(page: str) -> dict[str, str]:
    """Return {name: text} of a page's Python blocks with a title, those of one title together."""
    files: dict[str, str] = {}
    blocks = re.findall(
        r'^```python title="([\w.]+)"\n(.*?)^```', PAGES[page], re.MULTILINE | re.DOTALL
    )
    for name, text in blocks:
        files[name] = files.get(name, "") + text + "\n\n"
    return files


# What commands name, beside what they write, in a directory where they run.
FILES = (
    "configs",
    "scripts",
    "examples",
    "README.md",
    "pyproject.toml",
    "docs",
    "maxpipe",
    "tests",
)
FOLDERS = {"models/Qwen3-8B": "qwen3", "models/Qwen2.5-7B": "qwen2"}


def lay_out(directory: Path) -> None:
    """Put the repository's files, those of pages, and tiny models to import in a directory."""
    for name in FILES:
        (directory / name).symlink_to(REPOSITORY / name)
    for page in ("docs/extending.md", "docs/own_models.md", "docs/python.md"):
        for name, text in titled_files(page).items():
            (directory / name).write_text(text, encoding="utf-8")
    (directory / "models").mkdir()
    for folder, name in FOLDERS.items():
        write_folder(directory / folder, name)


@contextlib.contextmanager
def own_variants_forgotten() -> Iterator[None]:
    """Forget at the end which variants and modules of a user were imported within."""
    tables = {n: t for n, t in vars(catalog).items() if isinstance(t, dict) and n.isupper()}
    before = {name: dict(table) for name, table in tables.items()}
    path = [*sys.path]
    try:
        yield
    finally:
        for name, table in tables.items():
            table.clear()
            table.update(before[name])
        for name in ("my_catalog", "my_variants", "broken", "mine"):
            sys.modules.pop(name, None)
        sys.path[:] = path

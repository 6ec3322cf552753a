"""The pages of the documentation, and the commands in them."""

import re
import shlex
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
}
TEXT = "\n".join(PAGES.values())


def fences(language: str, text: str = TEXT) -> list[str]:
    """Return the contents of all fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """Return all lines of shell fences, and inline code that is a command, without comments."""
    joined = [fence.replace("\\\n", " ") for fence in fences("bash", text)]
    lines = [line for fence in joined for line in fence.splitlines()]
    lines += re.findall(r"`(python (?:-m [\w.]+ |scripts/)[^`]*)`", text)
    words = (shlex.join(shlex.split(line, comments=True)) for line in lines)
    return [*dict.fromkeys(command for command in words if command)]


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

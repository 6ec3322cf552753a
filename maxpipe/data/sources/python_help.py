"""Make conversations about Python's standard library, which every machine has.

Each is about one public function of a module: what it does, answered by its docstring, and what its
arguments are.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.chat_template import ChatTemplate, Message
from maxpipe.data.documents import MarkedText, read_text
from maxpipe.data.sources.chat import template_of
from maxpipe.data.sources.text import stdlib_modules


class Questions:
    """Conversations of two questions and answers each, laid out on access."""

    def __init__(self, template: ChatTemplate):
        self._template = template

    def __len__(self) -> int:
        return len(_conversations())

    def __getitem__(self, index: int) -> MarkedText:
        return self._template.render(_conversations()[index], None)


@lru_cache(maxsize=1)
def _conversations() -> list[list[Message]]:
    """Return the messages of each conversation, in order of module and line."""
    return [
        messages
        for path in stdlib_modules()
        if not path.stem.startswith("_")
        for messages in _of_module(path.stem, read_text(str(path)))
    ]


def _of_module(module: str, source: str) -> Iterator[list[Message]]:
    """Yield a conversation for each public function that a module documents."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        documentation = ast.get_docstring(node)
        if not documentation:
            continue
        arguments = ast.unparse(node.args) or "It takes none."
        yield [
            {"role": "user", "content": f"What does {module}.{node.name} do?"},
            {"role": "assistant", "content": documentation.partition("\n\n")[0]},
            {"role": "user", "content": "What are its arguments?"},
            {"role": "assistant", "content": arguments},
        ]


def python_help(config: DataConfig) -> Questions:
    """Return conversations about the running Python's standard library, unless Python comes without
    its source; errors are those of `template_of`.
    """
    questions = Questions(template_of(config))
    if not len(questions):
        message = "this Python has no source of its library; choose another source"
        raise ConfigError(Problem("data.source", message))
    return questions

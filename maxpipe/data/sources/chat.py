"""Read conversations: JSON lines, or rows of parquet files, with `messages` and maybe `tools`.

A message has a role and content, and whatever else the chat template knows, as in chat interfaces
and in the data sets of Hugging Face. Parquet files are rewritten once as JSON lines, see
`data.cache_dir`; nulls are left out, since parquet has them for fields that only other rows have.

`python_help` makes conversations about Python's standard library, which every machine has: what a
public function of a module does, answered by its docstring, and what its arguments are.
"""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, BinaryIO

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import DataConfig
from maxpipe.data.chat_template import RESERVED, ChatTemplate, Message, load_chat_template
from maxpipe.data.documents import (
    Concatenation,
    MarkedText,
    bad_document,
    read_text,
    require_offsets,
)
from maxpipe.data.files import files_of, path_error, require_content, reworded
from maxpipe.data.sources.parquet import Rows, lacks_column, read_batches, schema_of
from maxpipe.data.sources.text import JsonLines, lines_of, stdlib_modules
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.storage.local_files import local_copy, version_of


class Conversations:
    """Conversations in lines of JSON or rows of a table, laid out on access by a template."""

    def __init__(self, records: JsonLines | Rows, template: ChatTemplate):
        self._records = records
        self._template = template

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> MarkedText:
        """Return a conversation as text in which the assistant's turns are targets; errors are
        those of `parse` and `ChatTemplate.render`, and name the place.
        """
        record = self._records.read(index)  # its errors name the place
        try:
            return self._template.render(*parse(record))
        except ConfigError as error:
            place = self._records.place(index)
            raise reworded(error, lambda p: replace(p, message=f"{place}: {p.message}")) from error


def parse(record: bytes | Mapping[str, Any]) -> tuple[Sequence[Message], list[Any] | None]:
    """Return the messages of a conversation, and descriptions of the tools it may call, from a line
    of JSON, or from a row of a table, where nulls stand for what only other rows have; raises
    BadDocument if it is something else.
    """
    try:
        value = json.loads(record) if isinstance(record, bytes) else _filled(record)
        messages, tools = value["messages"], value.get("tools")
        if not isinstance(messages, list) or not messages:
            raise TypeError("messages is no list of them")
        if not all(isinstance(message["role"], str) for message in messages):
            raise TypeError("a message has no role")
        if not isinstance(tools, list | None):
            raise TypeError("tools is no list")
        text = json.dumps(value, ensure_ascii=False)  # a table may have a picture, for example
        text.encode("utf-8")  # an escaped lone surrogate is legal JSON that nothing can encode
        if any(character in text for character in RESERVED):
            raise ValueError("it has U+FDD0 or U+FDD1, which are no characters of a text")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise bad_document(
            'not a JSON object with a list of {"role": ..., "content": ...} under "messages" '
            f"({type(error).__name__}: {error})"
        ) from error
    # As apply_chat_template does: `"tool_calls": null` is a message without calls.
    given = [{key: item for key, item in m.items() if item is not None} for m in messages]
    return given, tools


def _filled(value: Any) -> Any:
    """Return a value without the nulls of objects, at any depth."""
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def chat(config: DataConfig) -> Concatenation:
    """Return the conversations in the files of `data.path`, files in sorted order.

    In a directory these are *.jsonl and *.ndjson, also packed, packed *.json, and *.parquet. Raises
    ConfigError if there is none, or one is empty or damaged; see also `template_of`.
    """
    template = template_of(config)
    records = [_records(file, config) for file in files_of(config, "chat")]
    return Concatenation([Conversations(each, template) for each in records])


class _RowLines(JsonLines):
    """The rows of a parquet file, of which the lines are a copy."""

    def place(self, index: int) -> str:
        return f"{self._original}: row {index}"


def _records(file: str, config: DataConfig) -> JsonLines:
    """Return the lines of a file; those of a parquet file are made if need be."""
    if not file.lower().endswith(".parquet"):
        return lines_of(file, config)
    names = schema_of(file).names
    if "messages" not in names:
        raise lacks_column(file, names, ["messages"])

    def write(out: BinaryIO) -> None:
        for batch in read_batches(file, [name for name in ("messages", "tools") if name in names]):
            try:
                lines = [json.dumps(_filled(row), ensure_ascii=False) for row in batch.to_pylist()]
                out.writelines(line.encode() + b"\n" for line in lines)
            except (TypeError, ValueError) as error:  # a picture, for example, or not UTF-8
                raise path_error(f"{file}: conversations cannot be JSON: {error}") from error

    cache_dir, limit = config.cache_dir, config.cache_limit
    lines = local_copy(file, version_of(file), ".messages.jsonl", cache_dir, write, limit)
    (copy,) = require_content([lines])
    return _RowLines(copy, original=file)


def template_of(data: DataConfig) -> ChatTemplate:
    """Return the template that lays out conversations; raises ConfigError if there is none, or the
    tokenizer cannot encode conversations.
    """
    require_offsets(load_tokenizer(data.tokenizer, data.cache_dir))
    return load_chat_template(data.chat_template, data.tokenizer, data.cache_dir, data.chat_date)


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

"""Read conversations: JSON lines, or rows of parquet files, with `messages` and maybe `tools`.

A message has a role and content, and whatever else the chat template knows, as in chat interfaces
and in the data sets of Hugging Face. Parquet files are rewritten once as JSON lines, see
`data.cache_dir`; nulls are left out, since parquet has them for fields that only other rows have.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import BinaryIO, NamedTuple, Protocol

from maxpipe.config.errors import ConfigError
from maxpipe.config.sections import DataConfig
from maxpipe.data.chat_template import RESERVED, ChatTemplate, Message, load_chat_template
from maxpipe.data.documents import MarkedText, bad_document, require_offsets
from maxpipe.data.files import files_of, path_error, require_content
from maxpipe.data.sources.parquet import read_rows
from maxpipe.data.sources.text import JsonLines
from maxpipe.data.tokenizers import load_tokenizer
from maxpipe.storage.local_files import local_copy, unpacked, version_of

_PARQUET = ".parquet"
_COPY = ".messages.jsonl"  # ending of JSON lines made from a parquet file


class Conversation(NamedTuple):
    """The messages of a conversation, and descriptions of the tools it may call."""

    messages: Sequence[Message]
    tools: Sequence[object] | None


class Lines(Protocol):
    """Conversations as lines of JSON."""

    def __len__(self) -> int: ...

    def line(self, index: int) -> bytes:
        """Return an object with `messages`, and maybe `tools`."""
        ...

    def place(self, index: int) -> str:
        """Return where a line is, for messages."""
        ...


class FileLines(JsonLines):
    """The lines of files; parquet files have been converted to lines."""

    def place(self, index: int) -> str:
        """Return the file and the line, from 1, or the row, from 0."""
        path, line = self.position(index)
        return f"{path}: row {line - 1}" if path.lower().endswith(_PARQUET) else f"{path}:{line}"


class Conversations:
    """Conversations, laid out on access by a template."""

    def __init__(self, lines: Lines, template: ChatTemplate):
        self._lines = lines
        self._template = template

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> MarkedText:
        """Return a conversation as text in which the assistant's turns are targets; errors are
        those of `parse` and `ChatTemplate.render`, and name the place.
        """
        line = self._lines.line(index)  # its errors name the place
        try:
            return self._template.render(*parse(line))
        except ConfigError as error:
            place = self._lines.place(index)
            raise type(error)(
                *(
                    replace(problem, message=f"{place}: {problem.message}")
                    for problem in error.problems
                )
            ) from error


def parse(line: bytes) -> Conversation:
    """Return the conversation in a line of JSON; raises BadDocument if it is something else."""
    try:
        value = json.loads(line)
        messages, tools = value["messages"], value.get("tools")
        if not isinstance(messages, list) or not messages:
            raise TypeError("messages is no list of them")
        if not all(isinstance(message["role"], str) for message in messages):
            raise TypeError("a message has no role")
        if not isinstance(tools, list | None):
            raise TypeError("tools is no list")
        text = json.dumps(value, ensure_ascii=False)
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
    return Conversation(given, tools)


def _as_lines(path: str, config: DataConfig) -> str:
    """Return the path of a file's JSON lines: made from parquet, or unpacked if need be."""
    cache_dir, limit = config.cache_dir, config.cache_limit
    if not path.lower().endswith(_PARQUET):
        return unpacked(path, cache_dir, limit)

    def write(out: BinaryIO) -> None:
        rows = read_rows(path, ("messages", "tools"), needed="messages")
        out.writelines(line_of(path, row) for row in rows)

    return local_copy(path, version_of(path), _COPY, cache_dir, write, limit)


def line_of(place: str, row: Mapping[str, object]) -> bytes:
    """Return a row of a table as a line of JSON, without the nulls of objects; raises ConfigError
    if it has a value of a type that JSON lacks.
    """
    try:
        return json.dumps(_filled(row), ensure_ascii=False).encode() + b"\n"
    except (TypeError, ValueError) as error:  # a picture, or another type that JSON lacks
        raise path_error(f"{place}: a conversation cannot be written as JSON: {error}") from error


def _filled(value: object) -> object:
    """Return a value without the nulls of objects, at any depth."""
    if isinstance(value, Mapping):
        return {key: _filled(item) for key, item in value.items() if item is not None}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def chat(config: DataConfig) -> Conversations:
    """Return the conversations in the files of `data.path`, files in sorted order.

    In a directory these are *.jsonl and *.ndjson, also packed, packed *.json, and *.parquet. Raises
    ConfigError if there is none, or one is empty or damaged; see also `template_of`.
    """
    template = template_of(config)
    files = require_content(files_of(config, "chat"))
    lines = require_content([_as_lines(path, config) for path in files])
    return Conversations(FileLines(lines, originals=files), template)


def template_of(data: DataConfig) -> ChatTemplate:
    """Return the template that lays out conversations; raises ConfigError if there is none, or the
    tokenizer cannot encode conversations.
    """
    require_offsets(load_tokenizer(data.tokenizer, data.cache_dir))
    return load_chat_template(data.chat_template, data.tokenizer, data.cache_dir, data.chat_date)

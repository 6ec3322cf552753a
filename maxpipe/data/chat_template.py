"""Render conversations with a chat template, and find the characters that the assistant writes.

A chat template is Jinja text, as in Hugging Face tokenizers. What the assistant writes is found by
marks in the template, `{% generation %}` ... `{% endgeneration %}`, or, without them, by rendering
the conversation up to each of the assistant's turns.

Templates are programs of strangers. They run in Jinja's sandbox and see nothing but the
conversation, names of special tokens and a date, in a process of their own
(`maxpipe.data.template_renderer`), where they can neither run without end nor take all memory.
Every process of a run that reads conversations, such as a worker of the loader, has one. It ends
with its parent, however that ends, because its standard input does.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.config.model_places import CHATML
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import BadDocument, MarkedText
from maxpipe.data.tokenizer_json import (
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    named_tokens,
    read_object,
)
from maxpipe.data.tokenizers import CHAT_TEMPLATE, template_files

Message = Mapping[str, object]  # "role", "content", and whatever else the template knows

_KEY = "data.chat_template"
_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
RESERVED = "\ufdd0\ufdd1"  # mark the assistant's turns in `maxpipe.data.template_renderer`
SECONDS = 10.0  # of processor time for a conversation
_RENDERER = Path(__file__).with_name("template_renderer.py")


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template: Jinja text, the special tokens that it may write (name and text), its name
    in messages, and the date that `strftime_now` writes, in ISO format; "" is today.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...]
    name: str
    date: str = ""

    @property
    def writes_date(self) -> bool:
        return "strftime_now" in self.source

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None) -> MarkedText:
        """Return a conversation as text in which the assistant's turns are targets, except those
        whose `weight` is 0.

        Raises:
          BadDocument: the template refuses the conversation, or nothing in it is learned.
          ConfigError: the template does not show which text is the assistant's.
        """
        answer = self._ask("conversation", messages, tools)
        return MarkedText(answer["text"], tuple((start, end) for start, end in answer["spans"]))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[object] | None) -> str:
        """Return a conversation as text that ends where the assistant's answer begins; raises
        BadDocument if the template refuses it.
        """
        text: str = self._ask("prompt", messages, tools)["text"]
        return text

    def end_of_turn(self) -> str:
        """Return what the template writes after an answer; raises BadDocument if it refuses a
        conversation of a question and an answer.
        """
        text: str = self._ask("end_of_turn")["text"]
        return text

    def check(self) -> None:
        """Raise ConfigError if the template cannot be compiled."""
        self._ask("compiled", key=_KEY)

    def _ask(
        self,
        wanted: str,
        messages: Sequence[Message] = (),
        tools: Sequence[object] | None = None,
        key: str = "data.path",
    ) -> dict[str, Any]:
        """Return what the process that renders templates answers; `key` is to blame otherwise."""
        request = {
            "wanted": wanted,
            "source": self.source,
            "special_tokens": self.special_tokens,
            "name": self.name,
            "date": self.date or datetime.now().date().isoformat(),
            "messages": messages,
            "tools": tools,
        }
        try:
            answer = _ask_renderer(request)
        except _Ended as error:
            answer = {"document": f"{self.name} cannot lay it out: {error}"}
        if problem := answer.get("template"):
            raise ConfigError(Problem(_KEY, problem))
        if problem := answer.get("document"):
            kind = ConfigError if key == _KEY else BadDocument
            raise kind(Problem(key, problem))
        return answer


class _Ended(Exception):
    """The process that renders ended instead of answering; the message says why."""


_lock = threading.Lock()
_renderers: dict[int, "subprocess.Popen[bytes]"] = {}  # of this process; of its parent, if forked


def _ask_renderer(request: Mapping[str, object]) -> dict[str, Any]:
    """Return the answer of `maxpipe.data.template_renderer` to a request: a text and the start and
    end of its `spans`, or what is wrong under `template` or `document`.
    """
    line = json.dumps({**request, "seconds": SECONDS}).encode() + b"\n"
    with _lock:
        for _ in range(2):  # something else may have ended it
            process = _renderers.get(os.getpid()) or _start_renderer()
            assert process.stdin is not None
            assert process.stdout is not None
            content = b""
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(line)
                    process.stdin.flush()
                    content = process.stdout.readline()
                if content.endswith(b"\n"):
                    answer: dict[str, Any] = json.loads(content)
                    return answer
                content = b""
                process.wait()
            finally:
                if not content:  # also after Ctrl-C: a late answer would be another's
                    _stop_renderer()
            if process.returncode == -signal.SIGPROF:
                raise _Ended(f"more than {SECONDS:g} s of processor time")
    with optional("jinja2", "chat", "data.source"):
        import jinja2  # noqa: F401
    raise _Ended(f"its process ends with code {process.returncode}")


def _start_renderer() -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(
        [sys.executable, "-P", str(_RENDERER)],
        bufsize=1 << 16,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    _renderers[os.getpid()] = process
    return process


@atexit.register
def _stop_renderer() -> None:
    if process := _renderers.pop(os.getpid(), None):
        process.kill()
        process.communicate()


def load_chat_template(
    value: str, tokenizer: str, cache_dir: str = "", date: str = ""
) -> ChatTemplate:
    """Return the chat template of a run, from `data.chat_template`, `data.tokenizer`,
    `data.cache_dir` and `data.chat_date`.

    Raises:
      ConfigError: there is no template, it is invalid, or it does not write the given date.
    """
    files = template_files(tokenizer, cache_dir)
    if value == CHATML:
        template = _with_tokens(_CHATML, f"{_KEY}={CHATML}", files)
    elif value:
        template = _with_tokens(_read(Path(value)), value, files)
    elif own := _template_of(files):
        template = own
    else:
        message = (
            f"data.tokenizer={tokenizer} has no chat template of its own: {_KEY}={CHATML} takes a "
            "common one, or give a file with a Jinja template"
        )
        raise ConfigError(Problem(_KEY, message))
    if date:
        try:
            datetime.fromisoformat(date)
        except ValueError:
            message = f"{date!r} is no date such as 2024-07-26"
            raise ConfigError(Problem("data.chat_date", message)) from None
        if not template.writes_date:
            message = f"{template.name} writes no date with strftime_now; leave it out"
            raise ConfigError(Problem("data.chat_date", message))
    template = replace(template, date=date)
    template.check()
    return template


def is_chat(data: DataConfig) -> bool:
    return any(SOURCES[source].is_chat for source in data.sources)


def trained_template(data: DataConfig) -> ChatTemplate | None:
    """Return the template of a run's conversations, None if it reads none; errors are those of
    `load_chat_template`.
    """
    if not is_chat(data):
        return None
    return load_chat_template(data.chat_template, data.tokenizer, data.cache_dir, data.chat_date)


def chat_template_among(files: Sequence[Path]) -> ChatTemplate | None:
    """Return the chat template in the files of a tokenizer or a model, None if there is none;
    raises ConfigError if it cannot be read, or is invalid.
    """
    template = _template_of(files)
    if template is not None:
        template.check()
    return template


def put_chat_template(source: str, folder: Path) -> None:
    """Write a template into a model's folder, for transformers, unless the folder has it already.

    Other templates in the folder are removed: programs disagree on which of several counts. Raises
    ConfigError if a file cannot be read, OSError if the folder cannot be written to.
    """
    present = _template_of([*folder.iterdir()])
    if present is not None and present.source == source:
        return
    file = folder / TOKENIZER_CONFIG
    config = dict(read_object(file) or {})
    if config.pop("chat_template", None) is not None:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        file.write_text(text, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    (folder / CHAT_TEMPLATE).write_text(source, encoding="utf-8")


def _template_of(files: Sequence[Path]) -> ChatTemplate | None:
    """Return the template of a tokenizer's or model's files: chat_template.jinja takes precedence
    over tokenizer_config.json.
    """
    by_name = {file.name: file for file in files}
    if template := by_name.get(CHAT_TEMPLATE):
        source, name = _read(template), str(template)
    else:
        config = by_name.get(TOKENIZER_CONFIG)
        source, name = _own_template(read_object(config) or {}), f"the template of {config}"
    return _with_tokens(source, name, files) if source else None


def _with_tokens(source: str, name: str, files: Sequence[Path]) -> ChatTemplate:
    """Return a template that may write the tokens which the files of a tokenizer name."""
    by_name = {file.name: file for file in files}
    config = read_object(by_name.get(TOKENIZER_CONFIG))
    mapped = read_object(by_name.get(SPECIAL_TOKENS_MAP)) or {}
    # A run's fingerprint has these tokens. Earlier versions did not read this file, and their runs
    # go on if the template does not write them.
    names = {key: item for key, item in mapped.items() if key in source}
    texts = {
        key: token.get("content") if isinstance(token, dict) else token
        for key, token in (named_tokens(config, names) or {}).items()
        if key.endswith("_token")
    }
    tokens = tuple((key, text) for key, text in texts.items() if isinstance(text, str))
    return ChatTemplate(source, tokens, name)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{file} is not UTF-8 text: byte {error.start}"
        raise ConfigError(Problem(_KEY, message)) from error
    except OSError as error:
        raise ConfigError(Problem(_KEY, f"{file} cannot be read: {error.strerror}")) from error


def _own_template(config: Mapping[str, object]) -> str:
    """Return the template in a tokenizer_config.json, "" if there is none."""
    own = config.get("chat_template")
    if not isinstance(own, list):
        return own if isinstance(own, str) else ""
    # Several named templates: default, joined with tool_use for conversations with tools.
    entries = [entry for entry in own if isinstance(entry, dict)]
    named = {entry.get("name"): entry.get("template") for entry in entries}
    default, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        return ""
    if not isinstance(tool_use, str):
        return default
    # Jinja drops a template's final newline, so each loses its own; `+` keeps space next to a tag.
    with_tools, without = (text.removesuffix("\n") for text in (tool_use, default))
    return f"{{% if tools is not none +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"

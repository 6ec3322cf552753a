"""Render conversations with a chat template, and find the characters that the assistant writes.

A chat template is Jinja text, as in Hugging Face tokenizers. What the assistant writes is found by
marks in the template, `{% generation %}` ... `{% endgeneration %}`, or, without them, by rendering
the conversation up to each of the assistant's turns. Templates are untrusted; they run in Jinja's
sandbox, in a process of their own (`maxpipe.data.template_renderer`), and see nothing but the
conversation, names of special tokens and a date.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.model_places import CHATML
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import BadDocument, MarkedText
from maxpipe.data.template_process import Answer, ProcessEnded, ask
from maxpipe.data.tokenizer_json import named_tokens
from maxpipe.data.tokenizers import (
    CHAT_TEMPLATE,
    TemplateFiles,
    pick_template_files,
    template_files,
)

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
_RESERVED = "\ufdd0\ufdd1"  # mark the assistant's turns in `maxpipe.data.template_renderer`


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template; picklable, compiled once by each process that renders.

    Attributes:
      source: the template's Jinja text.
      special_tokens: name and text of the tokens that it may write, such as `bos_token`.
      name: the template's name in messages.
      date: the date that `strftime_now` writes, in ISO format; "" is today.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...]
    name: str
    date: str = ""

    @property
    def writes_date(self) -> bool:
        """Return whether the template can write a date."""
        return "strftime_now" in self.source

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None) -> MarkedText:
        """Return a conversation as text in which the assistant's turns are targets, except those
        whose `weight` is 0.

        Raises:
          BadDocument: the template refuses the conversation or does not end, or nothing in it is
            learned.
          ConfigError: the template does not show which text is the assistant's.
        """
        answer = self._ask("conversation", messages, tools)
        return MarkedText(answer.text, tuple((start, end) for start, end in answer.spans))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[object] | None) -> str:
        """Return a conversation as text that ends where the assistant's answer begins; raises
        BadDocument if the template refuses it.
        """
        return self._ask("prompt", messages, tools).text

    def end_of_turn(self) -> str:
        """Return what the template writes after an answer; "" if it writes nothing.

        Raises:
          BadDocument: the template refuses a conversation of a question and an answer.
        """
        return self._ask("end_of_turn").text

    def check(self) -> None:
        """Raise ConfigError if the template cannot be compiled."""
        self._ask("compiled", key=_KEY)

    def _ask(
        self,
        wanted: str,
        messages: Sequence[Message] = (),
        tools: Sequence[object] | None = None,
        key: str = "data.path",
    ) -> Answer:
        """Return what the process that renders templates answers; `key` names what is to blame if
        it does not.
        """
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
            answer = ask(request)
        except ProcessEnded as error:
            answer = Answer(document=f"{self.name} cannot lay it out: {error}")
        if answer.template:
            raise ConfigError(Problem(_KEY, answer.template))
        if answer.document:
            kind = ConfigError if key == _KEY else BadDocument
            raise kind(Problem(key, answer.document))
        return answer


def load_chat_template(
    value: str, tokenizer: str, cache_dir: str = "", date: str = ""
) -> ChatTemplate:
    """Return the chat template of a run.

    Args:
      value: `data.chat_template`: "chatml", a file, or "" for the tokenizer's own.
      tokenizer: `data.tokenizer`.
      cache_dir: `data.cache_dir`.
      date: `data.chat_date`.

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
        _check_date(date, template)
    template = replace(template, date=date)
    template.check()
    return template


def _check_date(date: str, template: ChatTemplate) -> None:
    """Raise ConfigError if `data.chat_date` is no date, or the template writes none."""
    try:
        datetime.fromisoformat(date)
    except ValueError:
        message = f"{date!r} is no date such as 2024-07-26"
        raise ConfigError(Problem("data.chat_date", message)) from None
    if not template.writes_date:
        message = f"{template.name} writes no date with strftime_now; leave it out"
        raise ConfigError(Problem("data.chat_date", message))


def is_chat(data: DataConfig) -> bool:
    """Return whether a run reads conversations."""
    read = [entry["source"] for entry in data.mixture] or [data.source]
    return any(SOURCES[source].is_chat for source in read)


def trained_template(data: DataConfig) -> ChatTemplate | None:
    """Return the template of a run's conversations, None if it reads none; errors are those of
    `load_chat_template`.
    """
    if not is_chat(data):
        return None
    return load_chat_template(data.chat_template, data.tokenizer, data.cache_dir, data.chat_date)


def chat_template_among(files: Sequence[Path]) -> ChatTemplate | None:
    """Return the chat template in the files of a tokenizer or a model, None if there is none.

    Raises:
      ConfigError: it cannot be read, or is invalid.
    """
    template = _template_of(pick_template_files(files))
    if template is not None:
        template.check()
    return template


def put_chat_template(source: str, folder: Path) -> None:
    """Write a template into a model's folder, for transformers, unless the folder has it already.

    Other templates in the folder are removed: programs disagree on which of several counts.

    Raises:
      ConfigError: a file in the folder cannot be read.
      OSError: the folder cannot be written to.
    """
    files = pick_template_files(sorted(folder.iterdir()))
    present = _template_of(files)
    if present is not None and present.source == source:
        return
    config = dict(_read_config(files.config))
    if files.config is not None and config.pop("chat_template", None) is not None:
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        files.config.write_text(text, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    (folder / CHAT_TEMPLATE).write_text(source, encoding="utf-8")


def _template_of(files: TemplateFiles) -> ChatTemplate | None:
    if files.template is not None:
        source, name = _read(files.template), str(files.template)
    else:
        source = _own_template(_read_config(files.config))
        name = f"the template of {files.config}"
    return _with_tokens(source, name, files) if source else None


def _with_tokens(source: str, name: str, files: TemplateFiles) -> ChatTemplate:
    """Return a template that may write the tokens which the files of a tokenizer name."""
    config = _read_config(files.config)
    # A run's fingerprint has these tokens. Earlier versions did not read this file, and their runs
    # go on if the template does not write them.
    names = {key: item for key, item in _read_config(files.names).items() if key in source}
    return ChatTemplate(source, _special_tokens(named_tokens(config, names) or {}), name)


def has_reserved_characters(text: str) -> bool:
    """Return whether a text has one of the characters that mark the assistant's turns."""
    return any(character in text for character in _RESERVED)


def _read(file: Path) -> str:
    try:
        if file.exists() and not file.is_file():  # a pipe or a device may never end
            raise ConfigError(Problem(_KEY, f"{file} is not a regular file"))
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{file} is not UTF-8 text: byte {error.start}"
        raise ConfigError(Problem(_KEY, message)) from error
    except OSError as error:
        raise ConfigError(Problem(_KEY, f"{file} cannot be read: {error.strerror}")) from error


def _read_config(file: Path | None) -> Mapping[str, object]:
    """Return the content of a JSON file of a tokenizer; empty without one."""
    if file is None:
        return {}
    try:
        config = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem("data.tokenizer", f"{file} is not JSON: {error}")) from error
    return config if isinstance(config, dict) else {}


def _own_template(config: Mapping[str, object]) -> str:
    """Return the template in a tokenizer_config.json, "" if there is none."""
    own = config.get("chat_template")
    if isinstance(own, list):  # several named templates
        entries = [entry for entry in own if isinstance(entry, dict)]
        return _one_of({entry.get("name"): entry.get("template") for entry in entries})
    return own if isinstance(own, str) else ""


def _one_of(named: Mapping[object, object]) -> str:
    """Return the template called default, joined with tool_use for conversations with tools."""
    default, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        return ""
    if not isinstance(tool_use, str):
        return default
    # Jinja drops a template's final newline, so each loses its own; `+` keeps space next to a tag.
    with_tools, without = (text.removesuffix("\n") for text in (tool_use, default))
    return f"{{% if tools is not none +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"


def _special_tokens(config: Mapping[str, object]) -> tuple[tuple[str, str], ...]:
    """Return name and text of the tokens that a tokenizer_config.json names."""
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token")
    }
    return tuple((name, text) for name, text in texts.items() if isinstance(text, str))

"""Render conversations with a chat template, and find the characters that the assistant writes.

A chat template is Jinja text, as in Hugging Face tokenizers. It runs in Jinja's sandbox, where it
sees the conversation, names of special tokens and a date, and runs no other code. What the
assistant writes is found by marks in the template, `{% generation %}` ... `{% endgeneration %}`,
or, without them, by rendering the conversation up to each of the assistant's turns.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.config.model_places import CHATML
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import MarkedText, bad_document
from maxpipe.data.tokenizers import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
    HuggingFaceTokenizer,
    Tokenizer,
    named_tokens,
    read_object,
    template_files,
)

if TYPE_CHECKING:
    import jinja2

Message = Mapping[str, Any]  # "role", "content", and whatever else the template knows
Spans = list[tuple[int, int]]  # start and end of stretches of a text

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
_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
# Unicode reserves these noncharacters for use inside a program: no text may have them.
RESERVED = _OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MOST_OF_AN_ERROR = 500  # characters
_PROBE = "An answer."  # no template changes it
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, best first


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

    def check(self) -> None:
        """Raise ConfigError if the template cannot be compiled."""
        _compile(self.source, self.name)

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None) -> MarkedText:
        """Return a conversation as text in which the assistant's turns are targets, except those
        whose `weight` is 0.

        Raises BadDocument if the template refuses the conversation, or nothing in it is learned,
        and ConfigError if the template does not show which text is the assistant's.
        """
        text = self._text(messages, tools)
        if _TAG.search(_COMMENT.sub("", self.source)):
            text, spans = _without_marks(text)
        else:
            spans = list(self._turns(messages, tools, text))
        spans = self._learned(messages, spans)
        if not any(end > start for start, end in spans):
            raise bad_document(f"the assistant says nothing in it, laid out by {self.name}")
        return MarkedText(text, tuple(spans))

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[object] | None) -> str:
        """Return a conversation as text that ends where the assistant's answer begins; raises
        BadDocument if the template refuses it.
        """
        return _without_marks(self._text(messages, tools, add_generation_prompt=True))[0]

    def end_of_turn(self, tokenizer: Tokenizer) -> tuple[set[int], str]:
        """Return what the template writes after an answer: special tokens, any of which ends it,
        or, without these, a text, maybe empty. Raises BadDocument if it refuses a conversation of a
        question and an answer.
        """
        talk = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": _PROBE}]
        text = _without_marks(self._text(talk, None))[0].rpartition(_PROBE)[2]
        special: Sequence[str] = ()
        if isinstance(tokenizer, HuggingFaceTokenizer):
            special = [token for token in tokenizer.special_tokens if token in text]
        tokens = {int(tokenizer.encode(token)[0]) for token in special}
        return tokens, "" if tokens else text.strip() or text

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        template = _compile(self.source, self.name)
        date = datetime.fromisoformat(self.date or f"{datetime.now():%Y-%m-%d}")
        try:
            return template.render(
                messages=[*map(_with_reasoning, messages)],
                tools=tools,
                documents=None,  # transformers defines this name, too
                add_generation_prompt=add_generation_prompt,
                strftime_now=date.strftime,
                **dict(self.special_tokens),
            )
        except Exception as error:  # a template is a program, which may fail with any error
            reason = f"{type(error).__name__}: {error}"[:_MOST_OF_AN_ERROR]
            raise bad_document(f"{self.name} cannot lay it out: {reason}") from error

    def _turns(
        self, messages: Sequence[Message], tools: Sequence[object] | None, text: str
    ) -> Iterator[tuple[int, int]]:
        """Yield start and end of each turn of the assistant in the whole `text`."""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._before(messages[:index], tools)
            after = self._text(messages[: index + 1], tools)
            if not (after.startswith(before) and text.startswith(after)):
                problem = (
                    f"{self.name} lays out message {index + 1}, a turn of the assistant, "
                    "differently when others follow, so what is to be learned cannot be told: give "
                    "a copy of the template with {% generation %} before and {% endgeneration %} "
                    "after what the assistant writes"
                )
                raise ConfigError(Problem(_KEY, problem))
            yield len(before), len(after)

    def _before(self, messages: Sequence[Message], tools: Sequence[object] | None) -> str:
        """Return the text of `messages` up to where the assistant's answer begins."""
        try:
            return self._text(messages, tools, add_generation_prompt=True)
        except ConfigError:
            if messages:
                raise
            # Many templates refuse a conversation without messages.
            answer = [{"role": "assistant", "content": _PROBE}]
            return self._text(answer, tools).rpartition(_PROBE)[0]

    def _learned(self, messages: Sequence[Message], spans: Spans) -> Spans:
        """Return the stretches without those of turns whose `weight` is 0."""
        turns = [message for message in messages if message["role"] == "assistant"]
        is_learned = [turn.get("weight", 1) != 0 for turn in turns]
        if all(is_learned):
            return spans
        if not any(is_learned):
            raise bad_document("nothing in it is learned: every turn has weight 0")
        if len(spans) != len(turns):
            raise bad_document(
                f"a message has weight 0, but {self.name} marks {len(spans)} stretches for "
                f"{len(turns)} turns of the assistant, so which is not learned cannot be told"
            )
        return [span for span, learned in zip(spans, is_learned, strict=True) if learned]


def _with_reasoning(message: Message) -> Message:
    """Return a message whose reasoning has the names that templates read, as in transformers."""
    for name in _REASONING:
        if (given := message.get(name)) is not None:
            return {"thinking": given} | {**message} | {"reasoning_content": given}
    return message


def _without_marks(text: str) -> tuple[str, Spans]:
    """Return a rendered text without marks, and start and end of what was between them."""
    pieces = re.split(f"([{_OPEN}{_CLOSE}])", text)
    spans = []
    length = depth = start = 0
    for piece in pieces:
        if piece == _OPEN:
            start = start if depth else length
            depth += 1
        elif piece == _CLOSE:
            depth -= 1
            if depth == 0:
                spans.append((start, length))
        else:
            length += len(piece)
    return "".join(pieces[::2]), spans


@lru_cache(maxsize=16)
def _compile(source: str, name: str) -> "jinja2.Template":
    """Compile a template in a sandbox, in which `generation` puts its block between marks; raises
    ConfigError if it is none.
    """
    with optional("jinja2", "chat", "data.source"):
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Jinja's own filter escapes HTML, and json.dumps the letters outside ASCII.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["_mark"] = lambda caller: f"{_OPEN}{caller()}{_CLOSE}"
    blocks = _TAG.sub(lambda m: f"{m[1]}{'endcall' if m[2] else 'call _mark()'}{m[3]}", source)
    try:
        return environment.from_string(blocks)
    except Exception as error:  # of Jinja, or of Python, to which it translates
        reason = str(error).replace("endcall", "endgeneration").replace("'call'", "'generation'")
        where = f"line {getattr(error, 'lineno', '?')}: {reason[:_MOST_OF_AN_ERROR]}"
        problem = Problem(_KEY, f"{name} is no chat template: {where}")
        raise ConfigError(problem) from error


def load_chat_template(
    value: str, tokenizer: str, cache_dir: str = "", date: str = ""
) -> ChatTemplate:
    """Return the chat template of a run, from `data.chat_template`, `data.tokenizer`,
    `data.cache_dir` and `data.chat_date`; raises ConfigError if there is none, it is invalid, or it
    does not write the given date.
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
    try:
        datetime.fromisoformat(date or "2000-01-01")
    except ValueError:
        message = f"{date!r} is no date such as 2024-07-26"
        raise ConfigError(Problem("data.chat_date", message)) from None
    if date and not template.writes_date:
        message = f"{template.name} writes no date with strftime_now; leave it out"
        raise ConfigError(Problem("data.chat_date", message))
    template = replace(template, date=date)
    template.check()
    return template


def without_token(end: str) -> str:
    """Say that a text ends turns where a token would be better."""
    return f"{end!r} ends a turn, but is no special token of the tokenizer"


def is_chat(data: DataConfig) -> bool:
    return any(SOURCES[source].is_chat for source in data.sources)


def trained_template(data: DataConfig) -> ChatTemplate | None:
    """Return the template of a run's conversations, None if it reads none."""
    if not is_chat(data):
        return None
    return load_chat_template(data.chat_template, data.tokenizer, data.cache_dir, data.chat_date)


def chat_template_among(files: Sequence[Path]) -> ChatTemplate | None:
    """Return the chat template in the files of a tokenizer or a model, None if there is none."""
    template = _template_of(files)
    if template is not None:
        template.check()
    return template


def put_chat_template(source: str, folder: Path) -> None:
    """Write a template into a model's folder, for transformers, unless the folder has it already;
    others are removed, since programs disagree on which of several counts.
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
        own = (read_object(config) or {}).get("chat_template")
        source, name = _joined(own), f"the template of {config}"
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
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(_KEY, f"{file} cannot be read: {error}")) from error


def _joined(own: object) -> str:
    """Return the template that a tokenizer_config.json has, "" if there is none."""
    if not isinstance(own, list):
        return own if isinstance(own, str) else ""
    # Several named templates: default, joined with tool_use for conversations with tools.
    named = {entry.get("name"): entry.get("template") for entry in own if isinstance(entry, dict)}
    default, tool_use = named.get("default") or "", named.get("tool_use")
    if not (default and tool_use):
        return default
    # Jinja drops a template's final newline, so each loses its own; `+` keeps space next to a tag.
    with_tools, without = (text.removesuffix("\n") for text in (tool_use, default))
    return f"{{% if tools is not none +%}}{with_tools}{{%+ else +%}}{without}{{%+ endif %}}"

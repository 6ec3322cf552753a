"""Render conversations with a chat template, and find the characters that the assistant writes.

A chat template is Jinja text, as in Hugging Face tokenizers. What the assistant writes is found by
marks in the template, `{% generation %}` ... `{% endgeneration %}`, or, without them, by rendering
the conversation up to each of the assistant's turns. Templates are untrusted; they run in Jinja's
sandbox and see nothing but the conversation and names of special tokens.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from maxpipe.config.catalog import SOURCES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional
from maxpipe.config.model_places import CHATML
from maxpipe.config.sections import DataConfig
from maxpipe.data.documents import BadDocument, MarkedText
from maxpipe.data.tokenizers import (
    CHAT_TEMPLATE,
    TemplateFiles,
    pick_template_files,
    template_files,
)

if TYPE_CHECKING:
    import jinja2

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
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
# Unicode reserves these noncharacters for use inside a program: no text may have them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_PROBE = "An answer."  # no template changes it


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template; picklable, compiled once in each process.

    Attributes:
      source: the template's Jinja text.
      special_tokens: name and text of the tokens that it may write, such as `bos_token`.
      name: the template's name in messages.
    """

    source: str
    special_tokens: tuple[tuple[str, str], ...]
    name: str

    def render(self, messages: Sequence[Message], tools: Sequence[object] | None) -> MarkedText:
        """Return a conversation as text in which the assistant's turns are targets.

        Raises:
          BadDocument: the template refuses the conversation, or the assistant says nothing in it.
          ConfigError: the template does not show which text is the assistant's.
        """
        if _GENERATION_TAG.search(_COMMENT.sub("", self.source)):
            text, spans = _without_marks(self._text(messages, tools))
        else:
            text = self._text(messages, tools)
            spans = tuple(self._turns(text, messages, tools))
        if not any(end > start for start, end in spans):
            message = f"the assistant says nothing in it, laid out by {self.name}"
            raise BadDocument(Problem("data.path", message))
        return MarkedText(text, spans)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[object] | None) -> str:
        """Return a conversation as text that ends where the assistant's answer begins; raises
        BadDocument if the template refuses it.
        """
        return _without_marks(self._text(messages, tools, add_generation_prompt=True))[0]

    def end_of_turn(self) -> str:
        """Return what the template writes after an answer; "" if it writes nothing.

        Raises:
          BadDocument: the template refuses a conversation of a question and an answer.
        """
        talk = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": _PROBE}]
        return _without_marks(self._text(talk, None))[0].rpartition(_PROBE)[2]

    def _text(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        template = _compile(self.source, self.name)
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,  # transformers defines this name, too
                add_generation_prompt=add_generation_prompt,
                **dict(self.special_tokens),
            )
        # A template is a program, which may fail with any error.
        except Exception as error:
            message = f"{self.name} cannot lay it out: {type(error).__name__}: {error}"
            raise BadDocument(Problem("data.path", message)) from error

    def _turns(
        self, text: str, messages: Sequence[Message], tools: Sequence[object] | None
    ) -> Iterator[tuple[int, int]]:
        """Yield start and end of each turn of the assistant in the whole `text`."""
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._before(index, messages, tools)
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

    def _before(
        self, index: int, messages: Sequence[Message], tools: Sequence[object] | None
    ) -> str:
        """Return the text before turn `index`, which is the assistant's."""
        try:
            return self._text(messages[:index], tools, add_generation_prompt=True)
        except BadDocument:
            if index:
                raise
            # Many templates refuse a conversation without messages.
            talk = [{"role": "assistant", "content": _PROBE}]
            return self._text(talk, tools).rpartition(_PROBE)[0]


def load_chat_template(value: str, tokenizer: str, cache_dir: str = "") -> ChatTemplate:
    """Return the chat template of a run.

    Args:
      value: `data.chat_template`: "chatml", a file, or "" for the tokenizer's own.
      tokenizer: `data.tokenizer`.
      cache_dir: `data.cache_dir`.

    Raises:
      ConfigError: there is no template, or it is invalid.
    """
    files = template_files(tokenizer, cache_dir)
    special_tokens = _special_tokens(_read_config(files.config))
    if value == CHATML:
        template = ChatTemplate(_CHATML, special_tokens, f"{_KEY}={CHATML}")
    elif value:
        template = ChatTemplate(_read(Path(value)), special_tokens, value)
    elif own := _template_of(files):
        template = own
    else:
        message = (
            f"data.tokenizer={tokenizer} has no chat template of its own: {_KEY}={CHATML} takes a "
            "common one, or give a file with a Jinja template"
        )
        raise ConfigError(Problem(_KEY, message))
    _compile(template.source, template.name)
    return template


def trained_template(data: DataConfig) -> ChatTemplate | None:
    """Return the template of a run's conversations, None if it reads none; errors are those of
    `load_chat_template`.
    """
    read = [entry["source"] for entry in data.mixture] or [data.source]
    if not any(SOURCES[source].is_chat for source in read):
        return None
    return load_chat_template(data.chat_template, data.tokenizer, data.cache_dir)


def chat_template_among(files: Sequence[Path]) -> ChatTemplate | None:
    """Return the chat template in the files of a tokenizer or a model, None if there is none.

    Raises:
      ConfigError: it cannot be read, or is invalid.
    """
    template = _template_of(pick_template_files(files))
    if template is not None:
        _compile(template.source, template.name)
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
    config = _read_config(files.config)
    if files.template is not None:
        source, name = _read(files.template), str(files.template)
    else:
        source, name = _own_template(config), f"the template of {files.config}"
    return ChatTemplate(source, _special_tokens(config), name) if source else None


def _without_marks(text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
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
    return "".join(pieces[::2]), tuple(spans)


def has_reserved_characters(text: str) -> bool:
    """Return whether a text has one of the characters that mark the assistant's turns."""
    return _OPEN in text or _CLOSE in text


@lru_cache(maxsize=16)
def _compile(source: str, name: str) -> "jinja2.Template":
    """Compile a template in a sandbox, where it sees nothing but its arguments.

    Raises:
      ConfigError: it cannot be compiled, or jinja2 is not installed.
    """
    with optional("jinja2", "chat", "data.source"):
        import jinja2
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block `{% generation %}`, whose content is put between marks."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_mark")
            return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _mark(self, caller: "jinja2.runtime.Macro") -> str:
            return f"{_OPEN}{caller()}{_CLOSE}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json  # jinja2's own filter escapes HTML
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        message = f"{name} is not a Jinja template: line {error.lineno}: {error.message}"
        raise ConfigError(Problem(_KEY, message)) from error
    # Jinja translates to Python, which has bounds of its own, and `break` for loops only.
    except (SyntaxError, ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error  # lines are those of Python
        message = f"{name} cannot be compiled: {type(error).__name__}: {reason}"
        raise ConfigError(Problem(_KEY, message)) from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


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
    """Return the content of a tokenizer_config.json; empty without one."""
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

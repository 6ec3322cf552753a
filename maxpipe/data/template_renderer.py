"""Render chat templates in a process of their own, with a limit on time, memory and output.

`maxpipe.data.chat_template` runs this file as a script: it reads requests, lines of JSON, from
standard input, and writes a line for each. It imports nothing of the package, so that it starts in
tens of milliseconds. Python cannot interrupt a power or a format in the middle, but a signal ends
the process.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

MOST_BYTES = 1 << 30  # of this process; systems without this limit, such as macOS, do without
MOST_CHARACTERS = 1 << 26  # of a rendered text
_MOST_OF_AN_ERROR = 500  # characters
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
# Unicode reserves these noncharacters for use inside a program: no text may have them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_PROBE = "An answer."  # no template changes it
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing, best first


class TemplateProblemError(Exception):
    """A template that cannot be used."""


class DocumentProblemError(Exception):
    """A conversation that a template does not lay out."""


Spans = list[tuple[int, int]]  # start and end of stretches of a text


class Rendering:
    """One request: the `source`, `name`, `special_tokens` and `date` of a `ChatTemplate`, and the
    `messages` and `tools` of a conversation.
    """

    def __init__(self, request: Mapping[str, Any]):
        self._name = request["name"]
        self._source = request["source"]
        self._template = _compile(self._source, self._name)
        self._messages = [_with_reasoning(message) for message in request["messages"]]
        self._values = {
            "tools": request["tools"],
            "documents": None,  # transformers defines this name, too
            "strftime_now": datetime.fromisoformat(request["date"]).strftime,
            **dict(request["special_tokens"]),
        }

    def conversation(self) -> tuple[str, Spans]:
        """Return the text, and each stretch that the assistant writes and training learns."""
        if _GENERATION_TAG.search(_COMMENT.sub("", self._source)):
            text, spans = _without_marks(self._text(self._messages))
        else:
            text = self._text(self._messages)
            spans = list(self._turns(text))
        spans = self._learned(spans)
        if not any(end > start for start, end in spans):
            raise DocumentProblemError(
                f"the assistant says nothing in it, laid out by {self._name}"
            )
        return text, spans

    def compiled(self) -> tuple[str, Spans]:
        """Return nothing: the template can be compiled."""
        return "", []

    def prompt(self) -> tuple[str, Spans]:
        """Return the text up to where the assistant's answer begins."""
        return _without_marks(self._text(self._messages, add_generation_prompt=True))[0], []

    def end_of_turn(self) -> tuple[str, Spans]:
        """Return the text after an answer."""
        talk = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": _PROBE}]
        return _without_marks(self._text(talk))[0].rpartition(_PROBE)[2], []

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        pieces, length = [], 0
        try:
            for piece in self._template.generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._values
            ):
                pieces.append(piece)
                length += len(piece)
                if length > MOST_CHARACTERS:
                    raise OverflowError(f"more than {MOST_CHARACTERS:,} characters")
            return "".join(pieces)
        # A template is a program, which may fail with any error.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:_MOST_OF_AN_ERROR]
            raise DocumentProblemError(f"{self._name} cannot lay it out: {reason}") from error

    def _turns(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield start and end of each turn of the assistant in the whole `text`."""
        for index, message in enumerate(self._messages):
            if message["role"] != "assistant":
                continue
            before = self._before(index)
            after = self._text(self._messages[: index + 1])
            if not (after.startswith(before) and text.startswith(after)):
                raise TemplateProblemError(
                    f"{self._name} lays out message {index + 1}, a turn of the assistant, "
                    "differently when others follow, so what is to be learned cannot be told: give "
                    "a copy of the template with {% generation %} before and {% endgeneration %} "
                    "after what the assistant writes"
                )
            yield len(before), len(after)

    def _before(self, index: int) -> str:
        """Return the text before turn `index`, which is the assistant's."""
        try:
            return self._text(self._messages[:index], add_generation_prompt=True)
        except DocumentProblemError:
            if index:
                raise
            # Many templates refuse a conversation without messages.
            return self._text([{"role": "assistant", "content": _PROBE}]).rpartition(_PROBE)[0]

    def _learned(self, spans: Spans) -> Spans:
        """Return the stretches without those of turns whose `weight` is 0."""
        turns = [message for message in self._messages if message["role"] == "assistant"]
        is_learned = [turn.get("weight", 1) != 0 for turn in turns]
        if all(is_learned):
            return spans
        if not any(is_learned):
            raise DocumentProblemError("nothing in it is learned: every turn has weight 0")
        if len(spans) != len(turns):
            raise DocumentProblemError(
                f"a message has weight 0, but {self._name} marks {len(spans)} stretches for "
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


class _Generation(Extension):
    """The block `{% generation %}`, whose content is put between marks."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node":
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller: "jinja2.runtime.Macro") -> str:
        return f"{_OPEN}{caller()}{_CLOSE}"


@lru_cache(maxsize=16)
def _compile(source: str, name: str) -> jinja2.Template:
    """Compile a template in a sandbox, where it sees nothing but its arguments."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    # Jinja's own filter escapes HTML, and json.dumps the letters outside ASCII.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        message = f"{name} is not a Jinja template: line {error.lineno}: {error.message}"
        raise TemplateProblemError(message) from error
    except Exception as error:  # of Python, to which Jinja translates
        reason = error.msg if isinstance(error, SyntaxError) else error  # lines are those of Python
        message = f"{name} cannot be compiled: {type(error).__name__}: {reason}"
        raise TemplateProblemError(message) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a text and its spans, or the problem under the name of its kind."""
    try:
        text, spans = getattr(Rendering(request), request["wanted"])()
    except TemplateProblemError as problem:
        return {"template": str(problem)}
    except DocumentProblemError as problem:
        return {"document": str(problem)}
    return {"text": text, "spans": spans}


def main() -> None:
    """Answer requests until standard input ends, as it does when the other process does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to the group of the process that asks
    with suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = MOST_BYTES if most == resource.RLIM_INFINITY else min(MOST_BYTES, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
    answers = sys.stdout.buffer
    for line in os.fdopen(0, "rb", buffering=1 << 16):  # whole conversations at once
        request = json.loads(line)
        # The default action of this signal ends the process.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        content = json.dumps(_answer(request)).encode() + b"\n"
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(content)
        answers.flush()


if __name__ == "__main__":
    main()

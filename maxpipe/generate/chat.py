"""Talk to a model: its run's chat template, the prompt of a conversation, and where answers end."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from maxpipe.checkpoint.steps import StepStore
from maxpipe.config import Config, ConfigError, Problem
from maxpipe.data.chat_template import (
    ChatTemplate,
    Message,
    chat_template_among,
    load_chat_template,
)
from maxpipe.data.documents import BadDocument
from maxpipe.data.tokenizers import TOKENIZER, Tokenizer

_KEY = "--chat"


class TooLong(ConfigError):
    """A conversation with more tokens than the model has learned positions."""


def find_chat_template(config: Config, store: StepStore) -> ChatTemplate:
    """Return the chat template that a run was trained with, with its date, or its tokenizer's own;
    raises ConfigError if there is none.
    """
    data = config.data
    with store.local_files(TOKENIZER) as files:
        own = chat_template_among(files)
    if own is not None:
        return replace(own, date=data.chat_date)
    try:
        return load_chat_template(
            data.chat_template, data.tokenizer, data.cache_dir, data.chat_date
        )
    except ConfigError as error:
        message = "the run has no chat template: it was not trained on conversations, as with "
        raise ConfigError(Problem(_KEY, f"{message}data.source=chat")) from error


def read_conversation(
    messages: Sequence[Message],
    tools: Sequence[object] | None,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    limit: int,
) -> list[int]:
    """Return the token ids after which the assistant's answer begins, the same as in training."""
    try:
        text = template.render_prompt(messages, tools)
    except BadDocument as error:
        raise ConfigError(Problem(_KEY, error.problems[0].message)) from error
    ids = tokenizer.encode(text).tolist()
    if len(ids) > limit:
        message = (
            f"the conversation has {len(ids)} tokens, and the model has learned {limit} positions "
            "(data.sequence_length)"
        )
        raise TooLong(Problem(_KEY, message))
    return ids


def end_of_turn(template: ChatTemplate, tokenizer: Tokenizer) -> tuple[set[int], str]:
    """Return `ChatTemplate.end_of_turn`; raises ConfigError if the template refuses an answer."""
    try:
        return template.end_of_turn(tokenizer)
    except BadDocument as error:
        raise ConfigError(Problem(_KEY, error.problems[0].message)) from error


def before(end: str, pieces: Iterable[str]) -> Iterator[str]:
    """Yield the text of `pieces` before `end`, if any, each part as soon as it is sure not to be
    part of that. Leading whitespace is left out.
    """
    waiting = ""
    has_begun = False
    for piece in pieces:
        waiting += piece
        if not has_begun:
            # A template may end turns with a newline; then it is not whitespace before the answer.
            waiting = waiting if end.isspace() else waiting.lstrip()
            has_begun = bool(waiting)
        if end and end in waiting:
            yield waiting.partition(end)[0]
            return
        unsure = next((n for n in range(len(end) - 1, 0, -1) if waiting.endswith(end[:n])), 0)
        yield waiting[: len(waiting) - unsure]
        waiting = waiting[len(waiting) - unsure :]
    yield waiting

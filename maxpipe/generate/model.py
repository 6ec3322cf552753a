"""Use a trained model from Python: logits of tokens, text after a prompt, answers in chats."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from os import PathLike, fspath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.run_argument import check_variants, find_steps, open_steps
from maxpipe.checkpoint.steps import StepStore
from maxpipe.config.errors import ConfigError
from maxpipe.config.load import from_record
from maxpipe.data.chat_template import ChatTemplate, Message
from maxpipe.data.tokenizers import Tokenizer
from maxpipe.generate.chat import before, end_of_turn, find_chat_template, read_conversation
from maxpipe.generate.decoding import Decoder, Sampling, generate, load_parameters
from maxpipe.generate.text import (
    Options,
    TextStream,
    check_known,
    check_tokens,
    find_tokenizer,
    imported_ends,
    read_prompt,
)
from maxpipe.model.parameters import Params


class Model:
    """A trained model, whatever the layout of its run; `maxpipe.load_model` returns one.

    Parameters are the mean over `steps`, ascending, in `model.dtype`, sharded over the devices of
    this process. Experts take every token, whatever `model.moe.capacity_factor` was in training.
    `tokenizer` is a value of `data.tokenizer`, None for the run's own.

    Raises:
      ConfigError: this installation does not know the run's model.
      CheckpointDamaged, CheckpointUnreadable: the record of the step cannot be read.

    Attributes:
      config: the resolved configuration of the run.
      step: number of finished training steps, at the last of `steps`.
    """

    def __init__(self, store: StepStore, steps: Sequence[int], tokenizer: str | None = None):
        self._store = store
        self._steps = steps
        self.step = steps[-1]
        self._meta = store.record(self.step).meta
        self._named_tokenizer = tokenizer
        self.config = from_record(self._meta.get("config", {}))
        check_variants(self.config)

    def __repr__(self) -> str:
        return f"<maxpipe model of {self._store}, step {self.step}>"

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the run, or the one given; raises ConfigError if it is gone, or
        has ids that the model does not know.
        """
        with _naming_arguments():
            return self.find_tokenizer()

    def find_tokenizer(self) -> Tokenizer:
        """Return `tokenizer`; errors name it as a command line does, --tokenizer."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return find_tokenizer(self._named_tokenizer, self.config, self._meta, self._store)

    @cached_property
    def params(self) -> Params:
        """Return {"embed", "layers" [N, ...], "head"}, layers in model order."""
        with ExitStack() as copies:
            directories = [
                copies.enter_context(self._store.local_copy(step)) for step in self._steps
            ]
            return load_parameters(directories, self.config)

    def load(self) -> None:
        """Read what `stream` needs now, rather than at its first use; errors are the same."""
        _ = (self.tokenizer, self._ends, self.params)

    def logits(self, tokens: np.ndarray | jax.Array | Sequence[Sequence[int]]) -> jax.Array:
        """Return the logits of the token after each, float32 [B, T, V].

        `tokens` are ids, integers [B, T]; each row begins a text, and T is at most
        `data.sequence_length`. V is `model.vocab_size`; logits of padding in the vocabulary are
        -inf. Raises ValueError for anything else.
        """
        ids = np.asarray(tokens)
        if ids.ndim != 2 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            shape = f"{ids.dtype} {list(ids.shape)}"
            raise ValueError(f"tokens: expected integers [B, T], such as [[1, 2, 3]]; got {shape}")
        limit, num_ids = self.config.data.sequence_length, self.config.model.num_token_ids
        if ids.shape[1] > limit:
            message = f"expected at most {limit} in a row (data.sequence_length)"
            raise ValueError(f"tokens: {message}; got {ids.shape[1]}")
        if ids.min() < 0 or ids.max() >= num_ids:
            spread = f"from {ids.min()} to {ids.max()}"
            raise ValueError(f"tokens: the model's ids are 0 to {num_ids - 1}; got {spread}")
        return self._logits(self.params, jnp.asarray(ids, jnp.int32))

    def generate(
        self,
        prompt: str,
        *,
        max_tokens: int = Options.max_tokens,
        temperature: float = Options.temperature,
        top_k: int = Options.top_k,
        top_p: float = Options.top_p,
        seed: int = Options.seed,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
    ) -> str:
        """Return what the model writes after a prompt, as `python -m maxpipe.generate` prints it.

        Args:
          prompt: the text to continue.
          max_tokens: the largest number of tokens.
          temperature: below 1 favours likely tokens, 0 takes the most likely one.
          top_k: draw from this many most likely tokens; 0 = all.
          top_p: draw from the most likely tokens that together have this probability; 1 = all.
          seed: seed of the draws.
          stop: end after one of these texts.
          stop_tokens: end before one of these ids, as before the end of a document.

        Raises:
          ValueError: an argument is out of range, or the prompt empty or too long.
        """
        options = Options(max_tokens, temperature, top_k, top_p, seed, stop, stop_tokens)
        with _naming_arguments():
            check_tokens(stop_tokens, self.config.model.num_token_ids)
            ids = read_prompt(prompt, self.tokenizer, self.config)
        return "".join(self.stream(ids, options))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[object] | None = None,
        **options: Any,
    ) -> str:
        """Return the assistant's answer to a conversation, as `maxpipe.generate --chat` prints it.

        Messages are dicts {"role": ..., "content": ...}, with further keys of the chat template,
        and `tools` describe the tools that may be called. Options are those of `generate`. Raises
        ValueError if one is out of range, there is no chat template, or it refuses the
        conversation, or this is too long.
        """
        chosen = Options(**options)
        if not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
            example = '[{"role": "user", "content": "Hi"}]'
            raise ValueError(f"messages: expected a list of them, such as {example}")
        with _naming_arguments():
            check_tokens(chosen.stop_tokens, self.config.model.num_token_ids)
            prompt = self.read_conversation(messages, tools)
            return "".join(self.answer(prompt, chosen)).rstrip()

    def read_conversation(
        self, messages: Sequence[Message], tools: Sequence[object] | None = None
    ) -> list[int]:
        """Return the token ids after which the answer to a conversation begins.

        Raises ConfigError if there is no chat template, or it refuses the messages, or they are too
        long or have tokens that the model does not have.
        """
        limit = self.config.data.sequence_length
        ids = read_conversation(messages, tools, self._chat_template, self.tokenizer, limit)
        check_known(ids, self.tokenizer, self.config.model.num_token_ids, "--chat")
        return ids

    def answer(self, prompt: Sequence[int], options: Options) -> Iterator[str]:
        """Yield the answer up to the end of the assistant's turn; arguments as for `stream`."""
        tokens, text = end_of_turn(self._chat_template, self.tokenizer)
        options = replace(options, stop_tokens=[*options.stop_tokens, *tokens])
        return before(text, self.stream(prompt, options))

    def stream(self, prompt: Sequence[int], options: Options) -> Iterator[str]:
        """Yield the text of each token after a prompt of `read_prompt`, once it is complete."""
        text_stream = TextStream(self.tokenizer, prompt)
        ends = {self.tokenizer.eos_id, *options.stop_tokens, *self._ends}
        sampling = Sampling(options.temperature, options.top_k, options.top_p)
        length = {"seed": options.seed, "max_tokens": options.max_tokens}
        written = ""
        for token in generate(self.config, self.params, prompt, sampling, **length):
            if token in ends:
                break
            text = text_stream.add(token)
            earlier, written = len(written), written + text
            # A token may continue after the stop text that ends in it.
            stops = [end for end in options.stop_texts if end in written]
            if reached := [written.index(end) + len(end) for end in stops]:
                yield text[: min(reached) - earlier]
                return
            yield text
        yield text_stream.finish()

    @cached_property
    def _ends(self) -> set[int]:
        """Return the ids that end a text in the model that the run was imported from."""
        return set() if self._named_tokenizer else imported_ends(self.config, self._store)

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return find_chat_template(self.config, self._store)

    @cached_property
    def _logits(self) -> jax.stages.Wrapped:
        return jax.jit(Decoder(self.config.model, self.config.data.sequence_length).logits)


def load_model(
    run_dir: str | PathLike[str],
    *,
    step: int | None = None,
    average: int = 1,
    tokenizer: str | None = None,
) -> Model:
    """Load the model of a run, whatever its stages and devices were.

    Args:
      run_dir: the run's directory, or an s3:// or gs:// URL.
      step: the checkpoint to read; None = the newest.
      average: number of checkpoints to read the mean of, the last ones up to `step`.
      tokenizer: a value of `data.tokenizer`; None for the run's own.

    Raises:
      ConfigError: a ValueError: there is no such run or step, or its model is unknown here.
      CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable: the checkpoint cannot be read.
    """
    with _naming_arguments():
        store = open_steps(fspath(run_dir), "RUN_DIR")
        model = Model(store, find_steps(store, step, average), tokenizer)
    _ = model.params  # errors in them should not come up later
    return model


@contextmanager
def _naming_arguments() -> Iterator[None]:
    """Rename command-line flags that a ConfigError names, --step, to arguments in Python."""
    try:
        yield
    except ConfigError as error:
        names = {"RUN_DIR": "run_dir", "--stop-token": "stop_tokens", "--chat": "messages"}
        problems = [
            replace(problem, key=names.get(problem.key, problem.key.removeprefix("--")))
            for problem in error.problems
        ]
        raise ConfigError(*problems) from error

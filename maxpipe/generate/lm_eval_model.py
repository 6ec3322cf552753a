"""Let lm-eval score and generate texts with a run: `maxpipe.evaluate`, and the model `maxpipe` of
its registry.

Imports lm-eval, an extra. In your own script: `import maxpipe.generate.lm_eval_model`, then
`lm_eval.simple_evaluate("maxpipe", "run_dir=runs/base", tasks=[...])`.

Shapes: B texts, T tokens.
"""

import argparse
import fnmatch
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import lm_eval
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import (
    get_rolling_token_windows,
    handle_non_serializable,
    make_disjoint_window,
    make_table,
)
from tqdm import tqdm

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable
from maxpipe.checkpoint.steps import StepStore
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.outputs import write_file
from maxpipe.data.tokenizers import encode_prompt, frame_of
from maxpipe.generate.decoding import Decoder
from maxpipe.generate.model import Model, load_model
from maxpipe.generate.text import Options, check_known
from maxpipe.model.parameters import Params

DONE, NOT_LOADED = 0, 1  # exit codes
_DEFAULT_TOKENS = 256  # length of an answer, as in lm-eval's own models
_KNOWN = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks"}
_NEUTRAL = {"num_beams": 1}  # options of tasks that change nothing

# What lm-eval asks for: the texts, tokens of the context, and tokens that are scored.
TokenRequest = tuple[tuple[str, str], list[int], list[int]]


@register_model("maxpipe")
class ModelOfRun(TemplateLM):
    """A loaded model as lm-eval takes it; `batch_size` texts are scored at once, and the other
    arguments are those of `maxpipe.load_model`.

    Texts begin like documents in training. A context too long for `data.sequence_length` loses its
    beginning, and one of more than half of that leaves room for the answer. Samples of a text
    differ from each other.
    """

    def __init__(self, run_dir: str | Model, batch_size: int = 8, **arguments: Any):
        super().__init__()
        self.model = run_dir if isinstance(run_dir, Model) else load_model(run_dir, **arguments)
        self.batch_size = max(1, int(batch_size))
        self.max_length = self.model.config.data.sequence_length
        self._num_written = 0  # number of texts; each is drawn with a seed of its own

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text without context."""
        frame = frame_of(self.model.tokenizer)
        return [frame.end, *frame.begin][-1]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the tokens of a text, after the begin of document unless the flag is False."""
        tokenizer = self.model.tokenizer
        ids: list[int] = tokenizer.encode(string).tolist()
        check_known(ids, tokenizer, self.model.config.model.num_token_ids, "text")
        return ids if add_special_tokens is False else encode_prompt(tokenizer, string)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, every token of which is scored once."""
        scores = []
        for request in tqdm(requests, "texts scored", disable=disable_tqdm):
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False),
                self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            parts = self._loglikelihood_tokens(
                [(("", ""), *pair) for pair in pairs], disable_tqdm=True
            )
            scores.append(sum(score for score, _ in parts))
        return scores

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenRequest], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Return each log-likelihood, and whether the scored tokens are the most likely ones."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # Long texts first, so that too large a batch fails at once; similar lengths share a shape.
        order = sorted(range(len(requests)), key=lambda i: -sum(map(len, requests[i][1:])))
        starts = range(0, len(order), self.batch_size)
        for start in tqdm(starts, "texts scored, in batches", disable=disable_tqdm):
            numbers = order[start : start + self.batch_size]
            for i, answer in zip(numbers, self._score([requests[i] for i in numbers]), strict=True):
                answers[i] = answer
        return answers

    def _score(self, requests: Sequence[TokenRequest]) -> list[tuple[float, bool]]:
        texts = []
        for (_, continuation), context, scored in requests:
            if len(scored) > self.max_length:
                raise ValueError(
                    f"{continuation[:40]!r}... has {len(scored)} tokens to score, and the model "
                    f"reads {self.max_length} (data.sequence_length)"
                )
            texts.append([*context, *scored][-self.max_length - 1 :])
        longest = max(max(len(text) for text in texts) - 1, 1)
        length = min(1 << (longest - 1).bit_length(), self.max_length)
        # No token sees later ones, so padding changes nothing.
        ids = np.zeros((self.batch_size, length + 1), np.int32)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        scores, is_best = map(np.asarray, self._scores(self.model.params, ids[:, :-1], ids[:, 1:]))
        answers = []
        for row, (text, (_, _, scored)) in enumerate(zip(texts, requests, strict=True)):
            where = slice(len(text) - 1 - len(scored), len(text) - 1)
            answers.append((float(scores[row, where].sum()), bool(is_best[row, where].all())))
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each text, up to one of the texts that end it."""
        progress = tqdm(requests, "texts continued", disable=disable_tqdm)
        return [self._generate(*request.args) for request in progress]

    def _generate(self, context: str, options: Mapping[str, object]) -> str:
        # This takes other names of max_gen_toks, and samples if only a temperature is given.
        wishes: dict[str, Any] = dict(normalize_gen_kwargs(dict(options), _DEFAULT_TOKENS))
        unknown = {n for n, value in wishes.items() if n not in _KNOWN and _NEUTRAL.get(n) != value}
        if unknown:
            message = f"{', '.join(sorted(unknown))}: known are {', '.join(sorted(_KNOWN))}"
            raise ValueError(f"generation_kwargs: {message}")
        ends = [end for end in wishes["until"] if end]
        max_tokens, seed = wishes["max_gen_toks"], self._num_written
        drawn: dict[str, Any] = {"temperature": 0.0}
        if wishes["do_sample"]:
            top_k = int(wishes.get("top_k", 0))
            drawn = {
                "temperature": float(wishes.get("temperature", 1.0)),
                "top_k": 0 if top_k == -1 else top_k,  # vLLM's -1 means all
                "top_p": float(wishes.get("top_p", 1.0)),
            }
        try:
            chosen = Options(max_tokens, seed=seed, stop=ends, **drawn)
        except ValueError as error:
            raise ValueError(f"generation_kwargs: {error}") from None
        # An answer may be longer than the model's window; half of that is kept for the context.
        room = max(self.max_length - max_tokens, self.max_length // 2, 1)
        prompt = self.tok_encode(context)[-room:] or [self.prefix_token_id]
        self._num_written += 1
        text = "".join(self.model.stream(prompt, chosen))
        return text[: min([text.find(end) for end in ends if end in text], default=len(text))]

    @cached_property
    def _scores(self) -> jax.stages.Wrapped:
        """Return (params, tokens, targets, int32 [B,T]) -> log-likelihood of each target, float32
        [B,T], and whether it is the most likely token, bool [B,T].
        """
        decoder = Decoder(self.model.config.model, self.max_length)

        def scores(
            params: Params, tokens: jax.Array, targets: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            logits = decoder.logits(params, tokens)  # [B,T,V]
            chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
            likelihood = chosen - jax.nn.logsumexp(logits, axis=-1)
            return likelihood, jnp.argmax(logits, axis=-1) == targets

        return jax.jit(scores)


def launch(flags: argparse.Namespace, store: StepStore, steps: list[int]) -> int:
    """Print lm-eval's table of a run, and return the exit code; takes the flags of
    `maxpipe.evaluate`, and the checkpoints of `find_checkpoint`.
    """
    manager = TaskManager(include_path=flags.include)
    tasks = matching_tasks(flags.tasks, manager.all_tasks)
    try:
        model = Model(store, steps, flags.tokenizer)
        model.find_tokenizer()
        model.load()
    except (CheckpointDamaged, CheckpointMismatch, CheckpointUnreadable) as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_LOADED
    try:
        results = lm_eval.simple_evaluate(
            ModelOfRun(model, flags.batch_size),
            tasks=tasks,
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
            task_manager=manager,
            log_samples=False,
        )
    except ConfigError:
        raise
    except Exception as error:  # of lm-eval or a task: data, packages, templates, the hub
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(Problem("--tasks", f"cannot be evaluated: {reason}")) from error
    assert results is not None  # this is the only process
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    if flags.json:
        kept = ("results", "groups", "n-samples", "versions")
        record = {name: results[name] for name in kept if name in results}
        record = {"run": str(store), "step": model.step, **record}
        text = json.dumps(record, indent=2, default=handle_non_serializable)
        write_file("--json", flags.json, text + "\n")
    return DONE


def matching_tasks(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the tasks that match names or patterns; raise ConfigError if one matches none."""
    tasks = dict[str, None]()
    for name in names:
        matches = fnmatch.filter(known, name)
        tasks.update(dict.fromkeys(matches))
        if not matches:
            raise ConfigError(Problem("--tasks", f"lm-eval has no task {name!r}"))
    return [*tasks]

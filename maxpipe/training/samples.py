"""Show at each evaluation how the model continues the texts of `eval.prompts`.

The CPU does it, with a copy of the parameters in the host's memory: devices may have no room for
one, and what they compute in training stays as it is. The copy takes less than a save does.
"""

from collections.abc import Callable
from itertools import takewhile

import jax

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.data.loader import open_tokenizer
from maxpipe.generate.decoding import Sampling, generate
from maxpipe.generate.text import TextStream, read_prompt
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram

KEY = "eval.prompts"
MAX_TOKENS = 40


def check_samples(config: Config) -> None:
    """Raise ConfigError if the prompts of a run cannot be continued, once JAX has started."""
    remedy = "leave it out; python -m maxpipe.generate continues texts from the checkpoints"
    if jax.process_count() > 1:
        message = f"no process has all parameters, of which there are {jax.process_count()}"
        raise ConfigError(Problem(KEY, f"{message}: {remedy}"))
    try:
        _cpu()
    except RuntimeError:
        message = f"needs the CPU, which JAX_PLATFORMS leaves out: add it, or {remedy}"
        raise ConfigError(Problem(KEY, message)) from None
    _read_prompts(config)


def samples(
    config: Config, params: Params, progress: Callable[[str], None]
) -> list[tuple[str, str]]:
    """Return each text of `eval.prompts` with how it continues, by the most likely tokens."""
    tokenizer, pairs = open_tokenizer(config), []
    with jax.default_device(_cpu()), jax.transfer_guard("allow"):
        params = ModelProgram(config.model).cast(jax.device_put(params, _cpu()))
        for prompt, ids in zip(config.eval.prompts, _read_prompts(config), strict=True):
            progress(f"{KEY}: {prompt}")
            text = TextStream(tokenizer, ids)
            tokens = generate(
                config, params, ids, Sampling(temperature=0), seed=0, max_tokens=MAX_TOKENS
            )
            of_text = takewhile(lambda token: token != tokenizer.eos_id, tokens)
            pairs.append((prompt, "".join(map(text.add, of_text)) + text.finish()))
    return pairs


def _read_prompts(config: Config) -> list[list[int]]:
    tokenizer = open_tokenizer(config)
    return [read_prompt(text, tokenizer, config, KEY) for text in config.eval.prompts]


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]

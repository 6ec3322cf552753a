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
from maxpipe.generate.text import TextStream
from maxpipe.model.parameters import Params
from maxpipe.model.program import ModelProgram
from maxpipe.training.inputs import read_prompts

MAX_TOKENS = 40


def check_samples(config: Config) -> None:
    """Check, once JAX has started, that the prompts of a run can be continued.

    Raises:
      ConfigError: there are several processes, or JAX may not use the CPU.
    """
    if not config.eval.prompts:
        return
    remedy = "leave it out; python -m maxpipe.generate continues texts from the checkpoints"
    if jax.process_count() > 1:
        message = f"no process has all parameters, of which there are {jax.process_count()}"
        raise ConfigError(Problem("eval.prompts", f"{message}: {remedy}"))
    try:
        _cpu()
    except RuntimeError:
        message = f"needs the CPU, which JAX_PLATFORMS leaves out: add it, or {remedy}"
        raise ConfigError(Problem("eval.prompts", message)) from None


def samples(
    config: Config, params: Params, progress: Callable[[str], None]
) -> list[tuple[str, str]]:
    """Return each text of `eval.prompts` with how it continues, by the most likely tokens.

    Args:
      config: the resolved configuration.
      params: parameters on the host, layers in model order.
      progress: called before each text.
    """
    from maxpipe.generate.decoding import Sampling, generate  # which few runs need

    tokenizer, pairs = open_tokenizer(config), []
    with jax.default_device(_cpu()), jax.transfer_guard("allow"):
        params = ModelProgram(config.model).cast(jax.device_put(params, _cpu()))
        for prompt, ids in zip(config.eval.prompts, read_prompts(config), strict=True):
            progress(f"eval.prompts: {prompt}")
            text = TextStream(tokenizer, ids)
            tokens = generate(
                config, params, ids, Sampling(temperature=0), seed=0, max_tokens=MAX_TOKENS
            )
            of_text = takewhile(lambda token: token != tokenizer.eos_id, tokens)
            pairs.append((prompt, "".join(map(text.add, of_text)) + text.finish()))
    return pairs


def _cpu() -> jax.Device:
    return jax.local_devices(backend="cpu")[0]

"""Write the parameters of a checkpoint into one safetensors file, under maxpipe's own names.

Any model can be written this way, and read without maxpipe or transformers.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp

from maxpipe.checkpoint.reader import PARAMS
from maxpipe.checkpoint.record import Record
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.hf.adapters import MergedParameters, is_of_adapter
from maxpipe.hf.safetensors import header
from maxpipe.storage.local_files import write_atomically

FLAG = "--safetensors"


def export_file(directory: Path, record: Record, config: Config, target: Path, dtype: str) -> int:
    """Write all parameters, one leaf in memory at a time, adapters merged into the base.

    Layer parameters are [num_layers, ...], in model order. The file's metadata has the step and
    the model's configuration as JSON.

    Args:
      directory, record: of a committed step.
      config: of the run, resolved.
      target: the file; it appears under this name when it is complete.
      dtype: of the tensors.

    Returns:
      The number of tensors.

    Raises:
      ConfigError: the target exists.
      OSError: the file cannot be written.
      CheckpointDamaged, CheckpointUnreadable: see `maxpipe.checkpoint.reader`.
    """
    if target.exists():
        raise ConfigError(Problem(FLAG, f"{target} exists; name a new file"))
    kind, prefix = jnp.dtype(dtype), f"{PARAMS}."
    leaves = {
        name.removeprefix(prefix): leaf
        for name, leaf in record.leaves.items()
        if name.startswith(prefix) and not is_of_adapter(name)
    }
    entries = [(name, kind, leaf.shape) for name, leaf in leaves.items()]
    model = {"step": record.step, "model": asdict(config.model.base)}
    parameters = MergedParameters(directory, record, config.model.lora)

    def pieces() -> Iterator[bytes]:
        yield header(entries, {"maxpipe": json.dumps(model)})[0]
        for name in leaves:
            yield parameters.read(tuple(name.split("."))).astype(kind).tobytes()

    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, pieces())
    return len(leaves)

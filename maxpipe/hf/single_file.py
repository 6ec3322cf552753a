"""Write the parameters of a checkpoint into one safetensors file, under maxpipe's own names.

Any model can be written this way, and read without maxpipe or transformers.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.reader import PARAMS, read_arrays
from maxpipe.checkpoint.record import Record
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.hf.safetensors import header
from maxpipe.storage.local_files import write_atomically

FLAG = "--safetensors"


def export_file(directory: Path, record: Record, config: Config, target: Path, dtype: str) -> int:
    """Write all parameters, one leaf in memory at a time.

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
    leaves = {name: leaf for name, leaf in record.leaves.items() if name.startswith(prefix)}
    entries = [(name.removeprefix(prefix), kind, leaf.shape) for name, leaf in leaves.items()]
    model = {"step": record.step, "model": asdict(config.model)}

    def pieces() -> Iterator[bytes]:
        yield header(entries, {"maxpipe": json.dumps(model)})[0]
        for name in leaves:
            leaf = np.asarray(read_arrays(directory, record.leaves, {name: None})[name])
            yield leaf.astype(kind).tobytes()

    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, pieces())
    return len(leaves)

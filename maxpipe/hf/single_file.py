"""Write the parameters of a checkpoint into one safetensors file, under maxpipe's own names.

Any model can be written this way, and read without maxpipe or transformers.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp

from maxpipe.checkpoint.average import ParameterReader
from maxpipe.checkpoint.record import PARAMS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.sections import Config
from maxpipe.hf.adapters import MergedParameters, is_of_adapter
from maxpipe.hf.safetensors import header
from maxpipe.hf.tensors import is_selection_bias, spec_leaves
from maxpipe.model.program import ModelProgram
from maxpipe.storage.local_files import write_atomically

FLAG = "--safetensors"


def export_file(reader: ParameterReader, config: Config, target: Path, dtype: str) -> int:
    """Write all parameters, one leaf in memory at a time, adapters merged into the base, and return
    the number of tensors.

    Layer parameters are [num_layers, ...], in model order. The file's metadata has the step, the
    steps of a mean, and the model's configuration as JSON. The file appears under its name when it
    is complete; expert selection biases are float32 in any `dtype`.

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
        for name, leaf in reader.leaves.items()
        if not is_of_adapter(name)
    }
    specs = spec_leaves(ModelProgram(config.model.base).specs)
    own = {".".join(path): spec.dtype for path, spec in specs if is_selection_bias(spec)}
    dtypes = {name: own.get(name, kind) for name in leaves}
    entries = [(name, dtypes[name], leaf.shape) for name, leaf in leaves.items()]
    model = {"step": reader.steps[-1], "model": asdict(config.model.base)}
    if len(reader.steps) > 1:
        model["mean_of_steps"] = reader.steps
    parameters = MergedParameters(reader, config.model.lora)

    def pieces() -> Iterator[bytes]:
        yield header(entries, {"maxpipe": json.dumps(model)})[0]
        for name in leaves:
            yield parameters.read(tuple(name.split("."))).astype(dtypes[name]).tobytes()

    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, pieces())
    return len(leaves)

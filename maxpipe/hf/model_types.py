"""Choose the type of model that a run is exported as."""

from pathlib import Path

from maxpipe.config.catalog import BLOCKS, MODEL_TYPES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import read_config_json
from maxpipe.config.imports import implementation
from maxpipe.config.sections import Config
from maxpipe.hf.family import Family


def choose_family(config: Config, model_type: str, origin: Path | None) -> Family:
    """Return the type of an export: the requested one, else the imported one, else one that fits.

    Args:
      config: the run's resolved configuration.
      model_type: name of the requested type, or empty.
      origin: imported folder, from `maxpipe.hf.origin.origin_of`.

    Raises:
      ConfigError: that type, or every type, lacks an option of the model, or its block.
    """
    if model_type and model_type not in MODEL_TYPES:
        message = f"{model_type!r} is not one of {', '.join(MODEL_TYPES)}"
        raise ConfigError(Problem("--type", message))
    of_block = BLOCKS[config.model.block].model_types
    of_block = tuple(MODEL_TYPES) if of_block is None else of_block
    imported = str(read_config_json(str(origin)).get("model_type")) if origin else ""
    only = model_type or (imported if imported in MODEL_TYPES else "")
    names = [only] if only else sorted(of_block, key=lambda name: name != "llama")
    if not names or names[0] not in of_block:
        message = (
            f"{config.model.block} is no block of {only or 'transformers'}: its entry in the "
            "catalogue has other model_types or none; --safetensors writes its weights as they are"
        )
        raise ConfigError(Problem("model.block", message))
    refusals = []
    for name in names:
        family = implementation(MODEL_TYPES[name])()
        assert isinstance(family, Family)
        try:
            family.config(config.model, config.data.sequence_length)
        except ValueError as error:
            refusals.append(str(error))
        else:
            return family
    raise ConfigError(Problem("--type", f"no type of model fits: {'; '.join(refusals)}"))

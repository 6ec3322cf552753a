"""Write a run's adapters into files: merged into the weights they belong to, or in PEFT's format.

PEFT (`peft` of Hugging Face) loads an adapter onto its base, which it reads separately.
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from maxpipe.checkpoint.reader import ParameterReader
from maxpipe.checkpoint.record import PARAMS
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.from_hf import FILE, is_text_a_part
from maxpipe.config.model_places import SCHEME, folder_of, is_directory, is_url
from maxpipe.config.sections import Config
from maxpipe.config.sections.model_parts import LoRAConfig
from maxpipe.hf.family import Family
from maxpipe.hf.origin import read_kept
from maxpipe.hf.safetensors import write_file
from maxpipe.hf.tensor_table import Path as ParameterPath
from maxpipe.hf.tensors import Rule, tensor_rules
from maxpipe.hf.weight_files import new_folder, write_json
from maxpipe.model.program import ModelProgram

FLAG = "--adapter"
_SUFFIX = "_adapter"  # ends a projection's name, see `maxpipe.model.layers.add_adapters`
_PART = "model.language_model."  # before the layers of a model with images, of any type
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


class MergedParameters:
    """The parameters of a step, or the mean of several, with adapters merged into the base.

    The factors A and B of several steps are averaged separately.
    """

    def __init__(self, reader: ParameterReader, lora: LoRAConfig):
        self._reader, self._lora = reader, lora

    def read(self, path: ParameterPath) -> np.ndarray:
        """Return a parameter, [stacked_layers, ...] for layers; merged ones are float32."""
        value = self._array(path)
        factors = self.adapter(path)
        if factors is None:
            return value
        added = np.matmul(*factors).reshape(value.shape) * (self._lora.alpha / self._lora.rank)
        merged: np.ndarray = value.astype(np.float32) + added
        return merged

    def adapter(self, path: ParameterPath) -> tuple[np.ndarray, np.ndarray] | None:
        """Return a parameter's A [..., inputs, R] and B [..., R, outputs], float32; None if absent.

        Factors of layer parameters have a leading dimension [stacked_layers].
        """
        *place, name = path
        own = (*place, f"{name}{_SUFFIX}")
        if not self._lora.rank or ".".join((PARAMS, *own, "a")) not in self._reader.leaves:
            return None
        a, b = (self._array((*own, factor)).astype(np.float32) for factor in ("a", "b"))
        rank, stack = self._lora.rank, a.shape[:1] if path[0] == "layers" else ()
        return a.reshape(*stack, -1, rank), b.reshape(*stack, rank, -1)

    def _array(self, path: ParameterPath) -> np.ndarray:
        return np.asarray(self._reader.read(".".join((PARAMS, *path))))


def is_of_adapter(name: str) -> bool:
    """Return whether a checkpoint's array with this name is a factor of an adapter."""
    *_, place, factor = name.split(".")
    return place.endswith(_SUFFIX) and factor in ("a", "b")


def export_adapter(
    reader: ParameterReader,
    config: Config,
    target: Path,
    *,
    family: Family,
    dtype: str,
    origin: Path | None,
) -> list[str]:
    """Write a step's adapters into a new folder that PEFT's `PeftModel.from_pretrained` reads, and
    return the names of all files.

    `family` is the model type of the base, and `origin` the imported folder, from `origin_of`.
    Raises ConfigError if the run has no adapters, or PEFT has no form for them; other errors are
    those of `maxpipe.hf.exporter.export`.
    """
    model = config.model
    if not model.lora.rank:
        message = "the run has model.lora.rank=0, no adapters; use --hf for all of the model"
        raise ConfigError(Problem(FLAG, message))
    parameters = MergedParameters(reader, model.lora)
    mlp_only = [name for name in model.dense.adapted if name not in model.adapted]
    if model.first_dense_layers and mlp_only:
        message = (
            f"the first dense layers have adapters of {', '.join(mlp_only)}, which PEFT takes for "
            "those of experts; use --hf, which merges them"
        )
        raise ConfigError(Problem(FLAG, message))
    rules = [
        rule
        for rule in tensor_rules(family, ModelProgram(model.base))
        if rule.path[-1] in model.adapted and rule.path[-2] in ("attention", "mlp")
    ]
    if any(rule.rows is not None for rule in rules):
        message = (
            f"{family.model_type} has projections in one tensor that have an adapter each here; "
            "use --hf, which merges them"
        )
        raise ConfigError(Problem(FLAG, message))
    tensors: dict[str, np.ndarray] = {}
    is_part = origin is not None and is_text_a_part(json.loads(read_kept(origin / FILE)))
    for rule in rules:
        tensors |= _tensors_of(rule, parameters, _PART if is_part else "model.")
    with new_folder(target, FLAG) as unfinished:
        _write(unfinished / WEIGHTS, tensors, jnp.dtype(dtype))
        write_json(unfinished / CONFIG, _peft_config(config, tensors))
    return [CONFIG, WEIGHTS]


def _tensors_of(rule: Rule, parameters: MergedParameters, part: str) -> dict[str, np.ndarray]:
    """Return PEFT's tensors of one projection of all layers, [R, inputs] and [outputs, R]; `part`
    is where transformers' model of the base has its layers.
    """
    factors = parameters.adapter(rule.path)
    assert factors is not None, rule.path
    a, b = (f if rule.is_layer else f[None] for f in factors)
    tensors = {}
    for layer in range(len(a)):
        ((name, _),) = rule.tensors(layer)
        module = f"base_model.model.{part}{name.removeprefix('model.').removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = a[layer].T
        tensors[f"{module}.lora_B.weight"] = b[layer].T
    return tensors


def _write(file: Path, tensors: dict[str, np.ndarray], dtype: np.dtype) -> None:
    data = write_file(file, [(name, dtype, array.shape) for name, array in tensors.items()])
    end = 0
    for array in tensors.values():
        begin, end = end, end + array.size * dtype.itemsize
        data[begin:end].view(dtype).reshape(array.shape)[...] = array.astype(dtype)
    data.flush()


def _peft_config(config: Config, tensors: dict[str, np.ndarray]) -> dict[str, object]:
    model, (base, revision) = config.model, _base_of(config.init_from)
    paths = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    # The last name alone would match projections of experts or of a vision tower, too.
    is_part = any(path.startswith(_PART) for path in paths)
    targets = paths if model.moe.experts or is_part else {path.rpartition(".")[2] for path in paths}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": model.lora.dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _base_of(init_from: str) -> tuple[str | None, str | None]:
    """Return path or name of the base and its revision, where PEFT can read it itself."""
    folder = folder_of(init_from)
    if not init_from.startswith(SCHEME) or is_url(folder):
        return None, None
    if is_directory(folder):
        return folder, None
    name, _, revision = folder.partition("@")
    return name, revision or None

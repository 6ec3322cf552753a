"""Write folders of tiny models as Hugging Face has them: weights, config.json, tokenizer."""

import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import tokenizers

from helpers.engines import canonical_params
from helpers.hf_models import recorded, weights
from helpers.hf_parameters import family_of
from maxpipe.checkpoint.manager import Checkpointer
from maxpipe.config import Config, load, replace, resolve
from maxpipe.config.from_hf import read_shape
from maxpipe.hf.importer import HfWeights
from maxpipe.hf.safetensors import INDEX, write_file
from maxpipe.hf.tensors import tensor_names, tensor_rules
from maxpipe.model.parameters import Params, ParamSpec
from maxpipe.model.program import ModelProgram
from maxpipe.training.run_directory import RunDirectory

SMALL = {"vocab_size": 320, "num_hidden_layers": 4}


def write_weights(path: Path, tensors: dict[str, np.ndarray]) -> None:
    data = write_file(path, [(name, x.dtype, x.shape) for name, x in tensors.items()])
    data[:] = np.frombuffer(b"".join(x.tobytes() for x in tensors.values()), np.uint8)
    data.flush()


def write_tokenizer(directory: Path, letters: str = "abc") -> Path:
    """Write a tokenizer of single letters into a directory; return its tokenizer.json."""
    vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.decoder = tokenizers.decoders.Fuse()  # no spaces between letters
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return directory / "tokenizer.json"


def write_byte_pairs(directory: Path, text: str, specials: Sequence[str], size: int) -> Path:
    """Write a byte-level BPE tokenizer trained on a text; return its tokenizer.json."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*specials],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    if "<s>" in specials:
        # Llama's file adds bos, too; the loader frames documents itself and must not get it twice.
        bos = ("<s>", specials.index("<s>"))
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            "<s> $A", special_tokens=[bos]
        )
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_folder(path: Path, name: str = "gemma3") -> Path:
    """Write a model of a case into a new directory: two files of bfloat16 with their index."""
    path.mkdir()
    c = recorded(name)["config"] | SMALL | {"eos_token_id": [2, 7]}
    c.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(c))
    write_tokenizer(path)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    words = [f"model.from_hf={path}", "mesh.ici.stage=1", "mesh.ici.fsdp=4"]
    model = resolve(load("base", words), 4).model
    shapes = tensor_names(tensor_rules(family_of(name), ModelProgram(model)), model.stacked_layers)
    drawn = weights(shapes, is_gemma=name == "gemma3")
    tensors = {n: x.astype(ml_dtypes.bfloat16) for n, x in drawn.items()}
    for x in tensors.values():
        x.flat[0] = -0.0  # which arithmetic easily loses
    halves = [*tensors][::2], [*tensors][1::2]
    for i, half in enumerate(halves):
        write_weights(path / f"{i}.safetensors", {n: tensors[n] for n in half})
    weight_map = {n: f"{i}.safetensors" for i, half in enumerate(halves) for n in half}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def importing(path: Path, **values: object) -> Config:
    """Return a configuration that starts from the weights of a folder, resolved for one device."""
    values = {"init_from": f"hf:{path}", **read_shape(str(path)).values, **values}
    return resolve(replace(Config(), **values), 1)


def imported_parameters(config: Config) -> Params:
    """Return the weights of a folder as parameters of one device; adapters are random."""
    reader = HfWeights(dataclasses.replace(config, model=config.model.base))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def read(path: Any, spec: ParamSpec) -> Any:
        names = tuple(key.key for key in path)
        leading = (config.model.stacked_layers,) if names[0] == "layers" else ()
        shape = (*leading, *spec.shape)
        if spec.frozen or not config.model.lora.rank:
            return reader.read(names, jax.ShapeDtypeStruct(shape, spec.dtype, sharding=device))
        random = np.random.default_rng(zlib.crc32(".".join(names).encode()))
        return (0.2 * random.standard_normal(shape)).astype(np.float32)

    specs = ModelProgram(config.model).specs
    return jax.tree_util.tree_map_with_path(read, specs, is_leaf=dataclasses.is_dataclass)


def save_checkpoint(config: Config, directory: Path, params: Params) -> Checkpointer:
    checkpoints = Checkpointer(directory / "checkpoints", config.checkpoint)
    meta = {"config": dataclasses.asdict(config)}
    checkpoints.save(1, {"params": params}, np.zeros((1, 1), np.int64), meta)
    checkpoints.close()
    return checkpoints


def save_run(folder: Path, **values: object) -> str:
    """Write step 1 of a run with random weights of a folder's shape; return its directory."""
    config = replace(importing(folder), output_dir=str(folder.parent), run_name="run", **values)
    directory = RunDirectory(config)
    directory.claim()
    save_checkpoint(config, directory.root, canonical_params(ModelProgram(config.model)))
    return str(directory.root)

"""Measure how much host memory reading weights of Hugging Face takes besides the weights.

python scripts/benchmark/read_weights.py [DIR] [--layers N] [--width N] [--vocabulary N] [--dtype D]

DIR gets a random model of Llama's kind, if it has none yet. The model is then read onto one
simulated device, whose memory is the host's, as float32. Pages of mapped files do not count: the
system takes them back when it needs memory.
"""

import argparse
import dataclasses
import json
import os
import tempfile
import threading
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from maxpipe.config import Config, replace, resolve
from maxpipe.config.from_hf import read_shape
from maxpipe.hf.families.llama import Llama
from maxpipe.hf.importer import HfWeights
from maxpipe.hf.safetensors import write_file
from maxpipe.hf.tensors import tensor_names, tensor_rules
from maxpipe.model.parameters import map_specs
from maxpipe.model.program import ModelProgram


def write_config(directory: Path, layers: int, width: int, vocabulary: int) -> Config:
    """Write config.json; return a configuration that reads the folder."""
    content = {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "max_position_embeddings": 2048,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(content))
    values = {**read_shape(str(directory)).values, "model.param_dtype": "float32"}
    return resolve(replace(Config(), **values, init_from=f"hf:{directory}"), 1)


def write_model(file: Path, config: Config, dtype: np.dtype) -> None:
    """Write random tensors."""
    rules = tensor_rules(Llama(), ModelProgram(config.model))
    shapes = tensor_names(rules, config.model.num_layers)
    data = write_file(file, [(name, dtype, shape) for name, shape in shapes.items()])
    block = np.random.default_rng(0).standard_normal(1 << 20).astype(dtype).view(np.uint8)
    for first in range(0, len(data), len(block)):
        data[first : first + len(block)] = block[: len(data) - first]
    data.flush()


def own_memory() -> int:
    """Return bytes of this process's memory that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kilobytes) << 10


def measure(config: Config) -> tuple[int, int]:
    """Return (bytes of all parameters, largest number of bytes besides them while reading)."""
    weights, program = HfWeights(config), ModelProgram(config.model)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    jnp.zeros(1).block_until_ready()
    before = peak = own_memory()
    is_done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_done.is_set():
            peak = max(peak, own_memory())
            time.sleep(0.002)

    def read(path, spec):
        names = tuple(key.key for key in path)
        leading = (config.model.num_layers,) if names[0] == "layers" else ()
        shape = (*leading, *spec.shape)
        return weights.read(names, jax.ShapeDtypeStruct(shape, spec.dtype, sharding=device))

    watcher = threading.Thread(target=watch)
    watcher.start()
    specs = map_specs(lambda spec: spec, program.specs)
    params = jax.tree_util.tree_map_with_path(read, specs, is_leaf=dataclasses.is_dataclass)
    jax.block_until_ready(params)
    is_done.set()
    watcher.join()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    return size, peak - before - size


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = flags.directory or Path(temporary)
        config = write_config(directory, flags.layers, flags.width, flags.vocabulary)
        if not (directory / "model.safetensors").exists():
            write_model(directory / "model.safetensors", config, jnp.dtype(flags.dtype))
        started = time.perf_counter()
        size, more = measure(config)
        seconds = time.perf_counter() - started
    largest = 4 * flags.width * max(flags.vocabulary, 4 * flags.width)
    figures = {"parameters": size, "besides": more, "largest tensor": largest}
    print(", ".join(f"{name} {x / 2**20:.0f} MiB" for name, x in figures.items()), end="")
    print(f", {seconds:.1f} s")


if __name__ == "__main__":
    main()

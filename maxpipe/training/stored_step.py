"""A compiled train step in a file, and an engine that runs it instead of compiling its own.

The file holds the executable as the runtime writes it and, as JSON, what it was compiled from.
Nothing is unpickled:
the structure of arguments and results follows from the configuration. An executable is machine code
all the same, so load only files whose origin you trust.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.xla_client import DeviceList

from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.options import OPTIONS, get
from maxpipe.devices.simulated import hindrance
from maxpipe.pipeline.engines.base import Batch, Metrics
from maxpipe.training.trainer import SpmdTrainer

SAVE, LOAD = "compile.save", "compile.load"
MAGIC = b"maxpipe train step 1\n"
# Sections and keys that end up in the program.
PROGRAM = (
    "model",
    "mesh.ici",
    "mesh.dcn",
    "sharding.logical_axis_rules",
    "pipeline",
    "optimizer",
    "data.global_batch_size",
    "data.sequence_length",
)
# Distributions that hold compiler and runtime, beside jaxlib.
RUNTIMES = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


@dataclass(frozen=True)
class Stored:
    """What a file holds.

    Attributes:
      origin: what the executable was compiled from, flat, keys as in `origin`.
      metrics: names of the step's metrics, sorted.
      executable: the runtime's bytes.
    """

    origin: dict[str, Any]
    metrics: list[str]
    executable: bytes


def write(file: str, compiled: jax.stages.Compiled, config: Config, mesh: Mesh) -> int:
    """Stores a compiled step, whole or not at all; returns the bytes written.

    Raises:
      ConfigError: the file cannot be written.
    """
    runtime: Any = compiled.runtime_executable()
    payload = runtime.serialize()
    header = {
        "origin": origin(config, mesh),
        "metrics": sorted(compiled.out_info[1]),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    try:
        with tempfile.TemporaryDirectory(dir=Path(file).parent) as scratch:
            partial = Path(scratch, "partial")
            count = partial.write_bytes(MAGIC + json.dumps(header).encode() + b"\n" + payload)
            os.replace(partial, file)
            return count
    except OSError as error:
        raise ConfigError(Problem(SAVE, f"cannot write {file}: {error.strerror}")) from None


def read(file: str) -> Stored:
    """Reads what `write` wrote.

    Raises:
      ConfigError: there is no such file, or it is something else or damaged.
    """
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(Problem(LOAD, f"cannot read {file}: {error.strerror}")) from None
    if not content.startswith(MAGIC):
        raise ConfigError(
            Problem(LOAD, f"{file} was not written by {SAVE}, or by another version of maxpipe")
        )
    header, _, payload = content.removeprefix(MAGIC).partition(b"\n")
    try:
        found = json.loads(header)
        intact = found["sha256"] == hashlib.sha256(payload).hexdigest()
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise ConfigError(Problem(LOAD, f"{file} is damaged; {_again(file)}"))
    return Stored(found["origin"], found["metrics"], payload)


def origin(config: Config, mesh: Mesh) -> dict[str, Any]:
    """All that decides what a step compiles to, JSON values by name.

    Args:
      config: resolved.
      mesh: the devices and their order.
    """
    devices = mesh.devices.reshape(-1).tolist()
    places = [(d.id, getattr(d, "slice_index", 0), *getattr(d, "coords", ())) for d in devices]
    names = ("jax", "jaxlib", *RUNTIMES.get(devices[0].platform, ()))
    keys = [key for key in OPTIONS if any(f"{key}.".startswith(f"{part}.") for part in PROGRAM)]
    return {
        **{key: get(config, key) for key in keys},
        "devices": f"{mesh.size} x {devices[0].device_kind}",
        "order of devices": hashlib.sha256(repr(places).encode()).hexdigest()[:16],
        **{name: _version(name) for name in names},
        "sources of maxpipe": _sources(),
    }


class StoredStep:
    """An engine whose steps run a stored executable.

    Args:
      engine: does everything else.
      config: resolved; `compile.load` names the file.
      mesh: the engine's.

    Raises:
      ConfigError: the file cannot be read, or was compiled from something else (a problem for each
        difference), or no program from a file is safe on these devices.
    """

    def __init__(self, engine: SpmdTrainer, config: Config, mesh: Mesh):
        file = config.compile.load
        stored = read(file)
        if problems := _differences(file, stored.origin, origin(config, mesh)):
            raise ConfigError(*problems)
        if reason := hindrance():
            raise ConfigError(Problem(LOAD, f"{reason}; or leave out {LOAD}"))
        self._engine = engine
        self._executable = _load(file, stored.executable, mesh.devices.reshape(-1).tolist())
        self._state = engine.abstract_state()
        self._batch_sharding = NamedSharding(mesh, engine.batch_spec)
        whole = NamedSharding(mesh, PartitionSpec())
        scalars = dict.fromkeys(
            stored.metrics, jax.ShapeDtypeStruct((), jnp.float32, sharding=whole)
        )
        self._results, self._tree = jax.tree.flatten((self._state, scalars))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, state: Any, batch: Batch) -> tuple[Any, Metrics]:
        # The executable takes its arguments as they lie; JAX, which would check them, is not asked.
        assert all(
            jax.tree.leaves(jax.tree.map(lambda a, s: a.sharding == s.sharding, state, self._state))
        )
        assert all(a.sharding == self._batch_sharding for a in batch.values())
        results = self._executable.execute_sharded(jax.tree.leaves((state, batch)))
        arrays = [
            jax.make_array_from_single_device_arrays(like.shape, like.sharding, shards)
            for like, shards in zip(
                self._results, results.disassemble_into_single_device_arrays(), strict=True
            )
        ]
        return jax.tree.unflatten(self._tree, arrays)


def _load(file: str, executable: bytes, devices: Sequence[Any]) -> Any:
    try:
        return devices[0].client.deserialize_executable(
            executable, executable_devices=DeviceList(tuple(devices))
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            Problem(LOAD, f"the runtime does not take {file}: {reason}; {_again(file)}")
        ) from None


def _differences(file: str, theirs: dict[str, Any], ours: dict[str, Any]) -> list[Problem]:
    """A problem for each name with another value; its key if it is one of the configuration, else `compile.load`."""
    problems = []
    for name in sorted(theirs.keys() | ours.keys()):
        then, now = theirs.get(name, "missing"), ours.get(name, "missing")
        if then != now:
            message = f"{file} was compiled with {then!r}, this run has {now!r}"
            key, what = (name, message) if name in OPTIONS else (LOAD, f"{name}: {message}")
            problems.append(Problem(key, f"{what}; {_again(file)}"))
    return problems


def _again(file: str) -> str:
    return f"compile it again with python -m maxpipe.compile ... {SAVE}={file}, or leave out {LOAD}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "missing"


@cache
def _sources() -> str:
    """Digest of the package's code: any line of it may change the program."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]

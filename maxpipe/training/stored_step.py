"""Store a compiled train step in a file, and run it instead of compiling a new one.

The file holds the executable as the runtime writes it and, as JSON, what it was compiled from.
Nothing is unpickled: the structure of arguments and results follows from the configuration. An
executable is machine code all the same, so load only files whose origin you trust.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.xla_client import DeviceList, LoadedExecutable

from maxpipe.config import Config, ConfigError, Problem
from maxpipe.config.options import OPTIONS, get
from maxpipe.devices.agreement import source_digest
from maxpipe.devices.simulated import hindrance
from maxpipe.pipeline.engines.base import Batch, Metrics
from maxpipe.storage.local_files import write_atomically
from maxpipe.storage.records import Damaged, parse_record
from maxpipe.training.resuming import installed_version
from maxpipe.training.state import TrainState

SAVE, LOAD = "compile.save", "compile.load"
MAGIC = b"maxpipe train step 1\n"
# Sections and keys that the program depends on.
PROGRAM = (
    "model",
    "mesh.ici",
    "mesh.dcn",
    "sharding.logical_axis_rules",
    "pipeline",
    "optimizer",
    "data.global_batch_size",
    "data.sequence_length",
    "data.packing",  # the attention kernel of a GPU depends on it
)
# Distributions that hold compiler and runtime, besides jaxlib.
RUNTIMES = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}


Origin = dict[str, object]  # values of JSON, flat, keys as in `origin`


@dataclass(frozen=True)
class Header:
    """What precedes the executable in a file."""

    origin: Origin  # what it was compiled from
    metrics: dict[str, list[int]]  # shapes of the step's metrics by name, sorted
    sha256: str  # digest of the executable


def write(file: str, compiled: jax.stages.Compiled, config: Config, mesh: Mesh) -> int:
    """Store a compiled step atomically; return the number of bytes written.

    Raises:
      ConfigError: the file cannot be written.
    """
    executable = compiled.runtime_executable()
    assert executable is not None
    payload = executable.serialize()
    metrics = {name: list(m.shape) for name, m in sorted(compiled.out_info[1].items())}
    header = Header(origin(config, mesh), metrics, hashlib.sha256(payload).hexdigest())
    pieces = [MAGIC, json.dumps(asdict(header)).encode(), b"\n", payload]
    try:
        write_atomically(Path(file), pieces)
    except OSError as error:
        raise ConfigError(Problem(SAVE, f"cannot write {file}: {error.strerror}")) from None
    return sum(map(len, pieces))


def read(file: str) -> tuple[Header, bytes]:
    """Read what `write` wrote: what the step was compiled from, and the executable.

    Raises:
      ConfigError: there is no such file, it is not a stored step, or it is damaged.
    """
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(Problem(LOAD, f"cannot read {file}: {error.strerror}")) from None
    if not content.startswith(MAGIC):
        message = f"{file} was not written by {SAVE}, or by another version of maxpipe"
        raise ConfigError(Problem(LOAD, message))
    line, _, payload = content.removeprefix(MAGIC).partition(b"\n")
    with suppress(Damaged):
        header = parse_record(line, Header)
        if header.sha256 == hashlib.sha256(payload).hexdigest():
            return header, payload
    raise ConfigError(Problem(LOAD, f"{file} is damaged; {_again(file)}"))


def holds(file: str, config: Config, mesh: Mesh) -> bool:
    """Return whether a file holds the step of a configuration on a mesh, and is not damaged."""
    try:
        return read(file)[0].origin == origin(config, mesh)
    except ConfigError:
        return False


def origin(config: Config, mesh: Mesh) -> Origin:
    """Return everything that determines what a step compiles to, JSON values by name."""
    devices = mesh.devices.reshape(-1).tolist()
    places = [(d.id, getattr(d, "slice_index", 0), *getattr(d, "coords", ())) for d in devices]
    names = ("jax", "jaxlib", *RUNTIMES.get(devices[0].platform, ()))
    keys = [key for key in OPTIONS if any(f"{key}.".startswith(f"{part}.") for part in PROGRAM)]
    return {
        **{key: get(config, key) for key in keys},
        "devices": f"{mesh.size} x {devices[0].device_kind}",
        "order of devices": hashlib.sha256(repr(places).encode()).hexdigest()[:16],
        **{name: installed_version(name) for name in names},
        "sources of maxpipe": source_digest(),
    }


class StoredStep:
    """A training step that runs a stored executable; see `SpmdTrainer`'s `load_step`.

    Args:
      config: the resolved configuration; `compile.load` names the file.
      mesh: the mesh of all devices.
      state: the abstract live state.
      batch_sharding: sharding of the arrays of a batch.

    Raises:
      ConfigError: the file cannot be read, or was compiled from something else (a problem for each
        difference), or no program from a file is safe on these devices.
    """

    def __init__(
        self, config: Config, mesh: Mesh, state: TrainState, batch_sharding: NamedSharding
    ):
        file = config.compile.load
        header, executable = read(file)
        if problems := _differences(file, header.origin, origin(config, mesh)):
            raise ConfigError(*problems)
        if reason := hindrance():
            raise ConfigError(Problem(LOAD, f"{reason}; or leave out {LOAD}"))
        self._executable = _load(file, executable, mesh.devices.reshape(-1).tolist())
        self._state_shardings = [leaf.sharding for leaf in jax.tree.leaves(state)]
        self._batch_sharding = batch_sharding
        replicated = NamedSharding(mesh, PartitionSpec())
        metrics = {
            name: jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=replicated)
            for name, shape in header.metrics.items()
        }
        self._results, self._tree = jax.tree.flatten((state, metrics))

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        # The runtime takes arguments unchecked; these are the checks that JAX would make.
        state_leaves = jax.tree.leaves(state)
        assert [leaf.sharding for leaf in state_leaves] == self._state_shardings
        assert all(x.sharding == self._batch_sharding for x in batch.values())
        results = self._executable.execute_sharded([*state_leaves, *jax.tree.leaves(batch)])
        arrays = [
            jax.make_array_from_single_device_arrays(result.shape, result.sharding, shards)
            for result, shards in zip(
                self._results, results.disassemble_into_single_device_arrays(), strict=True
            )
        ]
        return jax.tree.unflatten(self._tree, arrays)


def _load(file: str, executable: bytes, devices: Sequence[jax.Device]) -> LoadedExecutable:
    try:
        return devices[0].client.deserialize_executable(
            executable, executable_devices=DeviceList(tuple(devices))
        )
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            Problem(LOAD, f"the runtime does not take {file}: {reason}; {_again(file)}")
        ) from None


def _differences(file: str, theirs: Origin, ours: Origin) -> list[Problem]:
    """Return a problem for each name whose value differs, under LOAD if the name is not a key."""
    problems = []
    for name in sorted(theirs.keys() | ours.keys()):
        then, now = theirs.get(name, "missing"), ours.get(name, "missing")
        if then != now:
            key, prefix = (name, "") if name in OPTIONS else (LOAD, f"{name}: ")
            message = f"{prefix}{file} was compiled with {then!r}, this run has {now!r}"
            problems.append(Problem(key, f"{message}; {_again(file)}"))
    return problems


def _again(file: str) -> str:
    return f"compile it again with python -m maxpipe.compile ... {SAVE}={file}, or leave out {LOAD}"

"""Store a compiled train step in a file, and run it instead of compiling a new one.

The file holds the executable as the runtime writes it and, as JSON, what it was compiled from.
Nothing is unpickled: the structure of arguments and results follows from the configuration. An
executable is machine code all the same, so load only files whose origin you trust.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib.xla_client import DeviceList

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


class Header(NamedTuple):
    origin: Origin  # what it was compiled from
    metrics: dict[str, list[int]]  # shapes of the step's metrics by name, sorted
    sha256: str  # digest of the executable


def write(file: str, compiled: jax.stages.Compiled, config: Config, mesh: Mesh) -> int:
    """Store a compiled step; return the bytes written. ConfigError if that is impossible."""
    executable = compiled.runtime_executable()
    assert executable is not None
    payload = executable.serialize()
    metrics = {name: list(m.shape) for name, m in sorted(compiled.out_info[1].items())}
    header = Header(origin(config, mesh), metrics, hashlib.sha256(payload).hexdigest())
    pieces = [MAGIC, json.dumps(header._asdict()).encode(), b"\n", payload]
    try:
        write_atomically(Path(file), pieces)
    except OSError as error:
        raise ConfigError(Problem(SAVE, f"cannot write {file}: {error.strerror}")) from None
    return sum(map(len, pieces))


def read(file: str) -> tuple[Header, bytes]:
    """Read what `write` wrote; raises ConfigError."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(Problem(LOAD, f"cannot read {file}: {error.strerror}")) from None
    line, _, payload = content.removeprefix(MAGIC).partition(b"\n")
    with suppress(Damaged):
        header = parse_record(line, Header)
        is_whole = header.sha256 == hashlib.sha256(payload).hexdigest()
        if content.startswith(MAGIC) and is_whole:
            return header, payload
    reason = f"{file} is damaged, or was not written by {SAVE} of this version of maxpipe"
    raise ConfigError(_refusal(file, reason))


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

    `state` is the abstract live state, `batch_sharding` that of the arrays of a batch. Raises
    ConfigError if the file cannot be run here, with a problem for each difference in its origin.
    """

    def __init__(
        self, config: Config, mesh: Mesh, state: TrainState, batch_sharding: NamedSharding
    ):
        file = config.compile.load
        header, executable = read(file)
        _check_origin(file, header.origin, origin(config, mesh))
        if reason := hindrance():
            raise ConfigError(Problem(LOAD, f"{reason}; or leave out {LOAD}"))
        devices = DeviceList(tuple(mesh.devices.reshape(-1).tolist()))
        client = mesh.devices.flat[0].client
        try:
            self._executable = client.deserialize_executable(executable, executable_devices=devices)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).splitlines()[0]
            problem = _refusal(file, f"the runtime does not take {file}: {reason}")
            raise ConfigError(problem) from None
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


def _check_origin(file: str, theirs: Origin, ours: Origin) -> None:
    """Raise a problem for each name whose value differs, under LOAD if the name is not a key."""
    problems: list[Problem] = []
    for name in sorted(theirs.keys() | ours.keys()):
        then, now = theirs.get(name, "missing"), ours.get(name, "missing")
        if then != now:
            key, prefix = (name, "") if name in OPTIONS else (LOAD, f"{name}: ")
            message = f"{prefix}{file} was compiled with {then!r}, this run has {now!r}"
            problems.append(_refusal(file, message, key))
    if problems:
        raise ConfigError(*problems)


def _refusal(file: str, reason: str, key: str = LOAD) -> Problem:
    remedy = f"compile it again with python -m maxpipe.compile ... {SAVE}={file}"
    return Problem(key, f"{reason}; {remedy}, or leave out {LOAD}")

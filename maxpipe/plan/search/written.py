"""Write a row of the plan as a complete YAML file, which runs from any folder."""

import glob
import importlib.metadata
import os
import shlex
from collections.abc import Sequence

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import redacted
from maxpipe.config.files import LISTS, MIXTURE, NAMES, exists
from maxpipe.config.from_hf import VOCABULARY
from maxpipe.config.identity import SHAPE_DEFAULTS
from maxpipe.config.model_places import split_scheme
from maxpipe.config.options import OPTIONS, get, is_set, update
from maxpipe.config.printing import to_yaml
from maxpipe.config.sections import Config
from maxpipe.devices.chips import GIB
from maxpipe.plan.search.best import OWN, Plan
from maxpipe.plan.search.candidate import Row
from maxpipe.plan.search.space import MESH_KEYS, SEARCHED

BASES = {"compiled": "the compiled program", "closed": "closed forms"}
_PACKAGES = ("maxpipe", "jax", "libtpu")


def file_text(plan: Plan, row: Row, words: Sequence[str]) -> str:
    """Return the YAML of a row of a plan, with its prediction in comments.

    `words` is the command line after the command.
    """
    machine, margin = plan.request.machine, plan.request.margin
    seconds = row.seconds
    basis = BASES[row.basis]
    prediction = f"{seconds:.4g} s a step, MFU {100 * plan.mfu(row):.1f} %, by {basis}"
    if not machine.is_timed:
        prediction = "no seconds, since the speed of this machine is not known"
    memory = f"{row.memory / GIB:.3g} GiB a device"
    if machine.capacity:
        memory += f" of {machine.capacity / GIB:.3g}, of which closed forms leave {margin:.0%} free"
    command = redacted(shlex.join(["python", "-m", "maxpipe.plan", *words]))
    lines = [
        command,
        "",
        f"predicted: {prediction}",
        f"memory: {memory}",
        f"topology: {machine.topology}" + f", {machine.slices} slices" * (machine.slices > 1),
        f"made with {versions()}",
    ]
    if machine.is_compilable:
        lines.append("before training, python -m maxpipe.compile prints this chip's XLA flags")
    comments = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return comments + "\n" + to_yaml(_located(row.config), _keys(row))


def versions() -> str:
    installed = []
    for package in _PACKAGES:
        try:
            installed.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(installed)


def _keys(row: Row) -> set[str]:
    """Return the keys that a file needs: those that differ from their defaults, and the plan's.

    Keys that the engine does not read, such as a schedule without stages, are left out.
    """
    config = row.config
    keys = {key for key in OPTIONS if is_set(config, key)}
    if row.name != OWN:
        keys |= {*SEARCHED} - {*MESH_KEYS}
    # The base has the shape, except padding of the vocabulary.
    if config.model.from_hf or config.base_model:
        keys -= {f"model.{name}" for name in SHAPE_DEFAULTS}
        keys.add(VOCABULARY)
    return {key for key in keys if ENGINES[config.pipeline.engine].takes(key)}


def _located(config: Config) -> Config:
    changes: dict[str, object] = {key: _absolute(str(get(config, key))) for key in LISTS}
    for key, names in NAMES.items():
        value = str(get(config, key))
        changes[key] = value if value in names else _absolute(value)
    changes[MIXTURE] = [
        {**entry, "path": _absolute(str(entry["path"]))} if "path" in entry else entry
        for entry in config.data.mixture
    ]
    return update(config, changes)


def _absolute(path: str) -> str:
    """Return a path, or several separated by commas, as absolute paths where they exist."""
    scheme, paths = split_scheme(path)
    parts = [part.strip() for part in paths.split(",")]
    local = [
        part and "://" not in part and (exists(part) or glob.has_magic(part)) for part in parts
    ]
    located = (os.path.abspath(p) if here else p for p, here in zip(parts, local, strict=True))
    return scheme + ",".join(located)

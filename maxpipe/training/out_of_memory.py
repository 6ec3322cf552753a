"""Say what helps when a device's memory is not enough for a run."""

import re
from contextlib import suppress

import jax
from jax.sharding import Mesh

from maxpipe.compile.knobs import knobs
from maxpipe.compile.report import NO_KNOB, size
from maxpipe.compile.step import UNITS, out_of_memory
from maxpipe.config.options import update
from maxpipe.config.sections import Config
from maxpipe.devices.chips import tpu_of
from maxpipe.devices.host_memory import free_memory
from maxpipe.devices.mesh import num_slices
from maxpipe.plan.choices import with_gather_mode
from maxpipe.plan.footprint import on_platform

_MOST_KNOBS = 3
_KERNELS = ("attention", "rotation", "gating")
# Of CPUs "allocating 8 bytes"; of GPUs "to allocate 8 bytes", "to allocate 3.4GiB" and "request for
# 3.4GiB (8B)"; of TPUs "to allocate 1.5G" and "to reserve 1.5G"; of NumPy "to allocate 3.4 GiB".
_REQUEST = re.compile(r"(?:allocating|to allocate|to reserve|request for) ([\d.]+) ?([KMGT]?)")
_FREE = re.compile(r"There are ([\d.]+)([KMGT]?)B? free")  # of TPUs


def explanation(error: Exception, written: Config, config: Config, mesh: Mesh) -> str:
    """Return the sizes of what has no room, and remedies; "" for an error about something else."""
    sizes = _sizes(str(error), mesh.devices.flat[0])
    return sizes and f"out of memory: {sizes}\n{_remedies(written, config, mesh)}"


def _sizes(message: str, device: jax.Device) -> str:
    if program := out_of_memory(message):
        return f"the program needs {size(program.needed)} of {size(program.available)} on a device"
    if not (request := _REQUEST.search(message)):
        return ""
    sizes = f"{_bytes(request)} asked for at once"
    if free := _FREE.search(message):
        return f"{sizes}, {_bytes(free)} free on a device"
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        return f"{sizes}, a device has {size(limit)} in all"
    with suppress(OSError):  # not on Linux
        return f"{sizes}, the host has {size(free_memory())} free"
    return sizes


def _bytes(match: re.Match[str]) -> str:
    return size(float(match[1]) * UNITS[match[2]])


def _remedies(written: Config, config: Config, mesh: Mesh) -> str:
    devices = mesh.devices.reshape(-1).tolist()
    tpu, count = tpu_of(devices), (mesh.size, num_slices(devices))
    config = with_gather_mode(on_platform(config, devices[0].platform), tpu)
    chosen = {f"model.{name}": getattr(config.model, name) for name in _KERNELS}
    written = update(written, chosen)
    helpful = knobs(written, config, count, tpu)
    if not helpful:
        return NO_KNOB
    saves = [f"{knob.words} saves {size(knob.saves)}" for knob in helpful[:_MOST_KNOBS]]
    more = "; `python -m maxpipe.compile` lists all" if helpful[_MOST_KNOBS:] else ""
    return f"what would help, by estimate: {'; '.join(saves)}{more}"

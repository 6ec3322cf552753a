"""Fit a configuration to fewer hosts than it is written for: smaller axes, the same batch.

Only sizes of the axes that `mesh.elastic.axes` names and the number of microbatches change. Each
device keeps about as many rows of a microbatch, so that activations take about as much memory.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from maxpipe.config.catalog import ENGINES
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.identity import differing_keys
from maxpipe.config.load import Loaded, resolve
from maxpipe.config.options import get, update
from maxpipe.config.rules.engines import check_processes
from maxpipe.config.rules.layout import data_shards, is_csv
from maxpipe.config.rules.mesh import LEVELS
from maxpipe.config.rules.rule import Updates, divisors
from maxpipe.config.sections import MESH_AXES, Config

KEY = "mesh.elastic.axes"


@dataclass(frozen=True)
class Hosts:
    """Numbers of processes, of devices over all slices, and of slices in one attempt of a run."""

    processes: int
    devices: int
    slices: int = 1

    def fewer(self, processes: int) -> "Hosts | None":
        """Return the numbers for `processes` of the processes; None if these are not all alike.

        They are if they have equal numbers of devices, and are a slice each or all in one slice.
        """
        if self.devices % self.processes or self.slices not in (1, self.processes):
            return None
        devices = self.devices // self.processes * processes
        return Hosts(processes, devices, processes if self.slices > 1 else 1)


def fit_fewer(loaded: Loaded, whole: Hosts, now: Hosts) -> Loaded:
    """Return the configuration for the hosts that are left, with a remark on what has changed.

    Raises ConfigError if it does not fit `whole`, or no smaller mesh fits `now`.
    """
    config = resolve(loaded, whole.devices, whole.slices)
    if smaller := _fewer(loaded, config, whole, now):
        return smaller
    message = f"{now.processes} of {whole.processes} processes cannot go on"
    raise ConfigError(Problem(KEY, message))


def counts_to_go_on(loaded: Loaded, whole: Hosts) -> list[int]:
    """Return the smaller numbers of processes that `fit_fewer` accepts, ascending.

    Raises ConfigError if the configuration does not fit `whole`, or no smaller number fits.
    """
    config = resolve(loaded, whole.devices, whole.slices)
    smaller = [(count, whole.fewer(count)) for count in range(1, whole.processes)]
    if counts := [n for n, hosts in smaller if hosts and _fewer(loaded, config, whole, hosts)]:
        return counts
    sizes = ", ".join(f"{axis}={config.mesh.size(axis)}" for axis in config.mesh.elastic.axes)
    message = f"{sizes} cannot shrink by whole processes or slices with this batch; leave it out"
    raise ConfigError(Problem(KEY, message))


def _fewer(loaded: Loaded, config: Config, whole: Hosts, now: Hosts) -> Loaded | None:
    devices = {"ici": now.devices // now.slices, "dcn": now.slices}
    for sizes in itertools.product(*(_shrunk(config, level, devices[level]) for level in LEVELS)):
        mesh: Updates = {
            f"mesh.{level}.{axis}": size
            for level, axes in zip(LEVELS, sizes, strict=True)
            for axis, size in axes.items()
        }
        smaller = update(config, mesh)
        for count in _microbatches(config, smaller):
            updates = {**mesh, "pipeline.num_microbatches": count}
            fitted = replace(loaded, config=update(loaded.config, updates))
            try:
                check_processes(resolve(fitted, now.devices, now.slices), now.processes)
            except ConfigError:
                continue
            resized = update(config, updates)
            changed = [f"{key}={get(resized, key)}" for key in differing_keys(config, resized)]
            reason = f"{now.processes} of {whole.processes} processes go on ({KEY})"
            rest = f"the batch stays {config.data.global_batch_size} rows"
            remark = f"{','.join(changed)}: {reason}; {rest}"
            return replace(fitted, remarks=(*loaded.remarks, remark))
    return None


def _shrunk(config: Config, level: str, count: int) -> Iterator[dict[str, int]]:
    """Yield sizes of all axes of a level whose product is `count`, shrinking the last axes last."""
    sizes = {axis: get(config, f"mesh.{level}.{axis}") for axis in MESH_AXES}
    axes = config.mesh.elastic.axes
    fixed = math.prod(size for axis, size in sizes.items() if axis not in axes)
    if count % fixed:
        return
    usable = [[size for size in divisors(count // fixed) if size <= sizes[axis]] for axis in axes]
    chosen = [sizes for sizes in itertools.product(*usable) if math.prod(sizes) * fixed == count]
    for choice in sorted(chosen, key=lambda sizes: [-size for size in reversed(sizes)]):
        yield sizes | dict(zip(axes, choice, strict=True))


def _microbatches(config: Config, smaller: Config) -> list[int]:
    """Return numbers of microbatches with at most as many rows on a device as before, ascending.

    A schedule from a file keeps the number that it is written for.
    """
    count = config.pipeline.num_microbatches
    if is_csv(config.pipeline.schedule) and ENGINES[config.pipeline.engine].has_stages:
        return [count]
    rows, rest = divmod(config.data.global_batch_size, data_shards(smaller))
    least = count * data_shards(config) / data_shards(smaller)
    return [] if rest else [number for number in divisors(rows) if number >= least]

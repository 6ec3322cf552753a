"""Fit a configuration to the hosts present, and tell a supervisor which other numbers would do."""

from dataclasses import replace

import jax

from maxpipe.config.elastic import KEY, Hosts, counts_to_go_on, fit_fewer
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.load import Loaded
from maxpipe.devices.cluster import Sizes, whole_of_process, whole_variable
from maxpipe.devices.mesh import num_slices
from maxpipe.supervise.progress import ProgressFile


def fit_hosts(loaded: Loaded, progress: ProgressFile) -> Loaded:
    """Return the configuration for the hosts present; unchanged if these are all.

    The supervisor learns from `progress` with how many hosts the run may go on. Without a
    supervisor, or with one host, a remark says that the key has no effect.

    Raises:
      ConfigError: the run cannot go on with fewer hosts, or not with these.
    """
    elastic = loaded.config.mesh.elastic
    if not elastic.axes:
        return loaded
    now, whole = _hosts()
    if not progress.is_read or whole.processes == 1:
        missing = "a supervisor (maxpipe supervise)" if not progress.is_read else "other hosts"
        remark = f"{KEY} has no effect without {missing}: the run needs all its devices"
        return replace(loaded, remarks=(*loaded.remarks, remark))
    if jax.devices()[0].platform == "tpu":
        message = "a slice of TPUs does not start without one of its hosts: leave the key out"
        raise ConfigError(Problem(KEY, message))
    counts = tuple(counts_to_go_on(loaded, whole))
    progress.may_go_on(Sizes(counts, elastic.wait_seconds, whole_variable(whole)))
    return loaded if now == whole else fit_fewer(loaded, whole, now)


def fit_next(loaded: Loaded) -> tuple[Loaded, Hosts] | None:
    """Return the configuration and the hosts with which the run goes on if one more host is lost.

    None if the run needs all hosts present.
    """
    now, whole = _hosts()
    counts = [count for count in counts_to_go_on(loaded, whole) if count < now.processes]
    hosts = whole.fewer(counts[-1]) if counts else None
    return (fit_fewer(loaded, whole, hosts), hosts) if hosts else None


def _hosts() -> tuple[Hosts, Hosts]:
    """Return the hosts present, and all hosts of the run."""
    devices = jax.devices()
    now = Hosts(jax.process_count(), len(devices), num_slices(devices))
    return now, whole_of_process() or now

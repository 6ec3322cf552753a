"""Serve the newest metrics of a run to Prometheus, at `http://HOST:PORT/metrics`."""

import errno
import math
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.telemetry.writers import Row, Value

if TYPE_CHECKING:
    from prometheus_client import Metric
    from prometheus_client.registry import Collector

_PREFIX = "maxpipe_"
_OF_SOURCE = "eval_loss/"  # begins the keys of sources of a mixture
_COUNTERS = {
    "tokens": "Tokens that this process has trained on",
    "skipped_steps": "Steps of this process whose update was skipped",
    "checkpoints": "Checkpoints that this process has begun to save; a failed save ends the run",
}


class Prometheus:
    """Holds the newest numbers of a run, and counts what this process has done.

    It is a collector of Prometheus' library: a number becomes text only when a scrape asks for it,
    in another thread. Counters begin at 0 in every process, as Prometheus expects of them.
    """

    def __init__(self, run_name: str = ""):
        self._run = run_name
        self._values: Row = {}
        self._counts = dict.fromkeys(_COUNTERS, 0)

    def show(self, values: Row, **counts: int) -> None:
        """Show values in place of earlier ones of the same keys, and add to counters."""
        self._values = {**self._values, **values}  # replaced, as a scrape may be reading it
        for name, count in counts.items():
            self._counts[name] += count

    def collect(self) -> "Iterator[Metric]":
        """Yield all families of metrics, as the library asks for them."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["run"])
            counter.add_metric([self._run], self._counts[name])
            yield counter
        gauges: dict[str, GaugeMetricFamily] = {}
        for key, value in self._values.items():
            name, labels, points = _series(key, value)
            text = f"Newest {name} of the run"
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["run", *labels])
            gauge = gauges.setdefault(name, gauge)
            for at, number in points:
                gauge.add_metric([self._run, *at], number)
        yield from gauges.values()


def _series(key: str, value: Value) -> tuple[str, list[str], list[tuple[list[str], float]]]:
    """Return a metric's name, the names of its labels besides `run`, and (labels, number) pairs."""
    name = re.sub(r"\W", "_", key)
    if isinstance(value, list):
        label = "stage" if key == "stage_seconds" else "layer"
        return name, [label], [([str(i)], x) for i, x in enumerate(value) if not math.isnan(x)]
    if value is None:
        return name, [], []
    if key.startswith(_OF_SOURCE):
        return "eval_loss_of_source", ["source"], [([key.removeprefix(_OF_SOURCE)], value)]
    return name, [], [([], value)]


@contextmanager
def serving(run_name: str, host: str, port: int) -> Iterator[Prometheus]:
    """Serve what the `Prometheus` gets until the end of the context; nothing at port 0.

    Raises ConfigError if the port or the host cannot be used.
    """
    metrics = Prometheus(run_name)
    if not port:
        yield metrics
        return
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry()
    registry.register(cast("Collector", metrics))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        message = f"metrics cannot be served at {host}:{port}: {error.strerror}; name "
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            problem = Problem("telemetry.metrics_host", f"{message}an address of process 0's host")
        else:
            problem = Problem("telemetry.metrics_port", f"{message}a free port, or 0 for none")
        raise ConfigError(problem) from error
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

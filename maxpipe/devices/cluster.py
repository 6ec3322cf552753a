"""Read from the environment how the processes of a run find each other.

No other module does. JAX is imported only in a process of its own, and only if nothing else knows.
"""

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass

from maxpipe.config.elastic import Hosts
from maxpipe.config.errors import ConfigError, Problem
from maxpipe.storage.records import parse_record

# Variables by which JAX's own cluster detection finds a TPU pod, a multi-slice job, or an MPI
# launch.
CLUSTER_VARIABLES = ("MEGASCALE_COORDINATOR_ADDRESS", "OMPI_MCA_orte_hnp_uri")

# All hosts of a run that goes on with fewer of them: JSON by `whole_variable`, from a supervisor.
WHOLE = "MAXPIPE_WHOLE"

# Below the ports that systems give to clients, from 32768 (Linux) or 49152 on.
_SERVER_PORTS = range(20_000, 30_000)

_DETECT_SECONDS = 300
_IMPORT_SECONDS = 60  # for importing JAX, on top
_DETECT = f"""
import json
from jax._src.clusters import ClusterEnv
place = ClusterEnv.auto_detect_unset_distributed_params(*[None] * 5, {_DETECT_SECONDS})
print(json.dumps(place))
"""
_REMEDY = "set JAX_COORDINATOR_ADDRESS=HOST:PORT, JAX_NUM_PROCESSES and JAX_PROCESS_ID"


@dataclass(frozen=True)
class Place:
    """The place of a process in its run: the coordinator, the number of processes, its index."""

    host: str
    port: int
    count: int
    index: int


@dataclass(frozen=True)
class Sizes:
    """Numbers of processes with which a run may go on, as its trainers find out."""

    counts: tuple[int, ...] = ()  # smaller numbers; none if it needs all of them
    wait_seconds: float = 0.0  # time that lost processes have to come back
    whole: str = ""  # value of MAXPIPE_WHOLE, which the trainers of fewer processes have to know


def announced_processes() -> int:
    """Return the number of processes in the environment; 1 where only JAX can detect it; raises
    ConfigError if the variable does not hold a number.
    """
    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        return _integer("JAX_NUM_PROCESSES", 1)
    return _num_slurm_tasks()


def whole_variable(whole: Hosts) -> str:
    return json.dumps(asdict(whole))


def whole_of_process() -> Hosts | None:
    """Return all hosts of the run if this process is to go on without some of them, else None."""
    text = os.environ.get(WHOLE)
    return parse_record(text, Hosts) if text else None


def job_of_process() -> tuple[str, int]:
    """Return name and attempt of the job that this process belongs to; ("", 0) without a job.

    A scheduler or launcher that starts a job again gives it the same name and a higher attempt,
    after the previous attempt has ended. MAXPIPE_JOB and MAXPIPE_ATTEMPT, which the launchers set,
    take precedence over the variables of Slurm.
    """
    env = os.environ
    if "MAXPIPE_JOB" in env:
        return env["MAXPIPE_JOB"], _number(env.get("MAXPIPE_ATTEMPT", ""))
    if "SLURM_JOB_ID" in env:
        name = f"slurm {env.get('SLURM_CLUSTER_NAME', '')} {env['SLURM_JOB_ID']}"
        return name, _number(env.get("SLURM_RESTART_COUNT", ""))
    return "", 0


def is_cluster() -> bool:
    """Return whether JAX itself is to find the other processes of the run."""
    env = os.environ
    is_requested = env.get("MAXPIPE_DISTRIBUTED") == "1"
    is_pod = len(env.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1
    return (
        is_requested or is_pod or _num_slurm_tasks() > 1 or any(n in env for n in CLUSTER_VARIABLES)
    )


def coordinator_variables() -> tuple[str, int, int] | None:
    """Return coordinator, number of processes and index from JAX's variables, None if not set;
    raises ConfigError if some of the variables are missing or malformed.
    """
    env = os.environ
    if "JAX_COORDINATOR_ADDRESS" not in env:
        alone = {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}
        names = " and ".join(n for n, value in alone.items() if (env.get(n) or value) != value)
        if names and not is_cluster():  # each process would train by itself
            message = f"with {names}, JAX_COORDINATOR_ADDRESS must be set as well, to HOST:PORT"
            raise ConfigError(Problem("", message))
        return None
    missing = [n for n in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if n not in env]
    if missing:
        names = " and ".join(missing)
        message = f"JAX_COORDINATOR_ADDRESS is set, so {names} must be set as well"
        raise ConfigError(Problem("", message))
    address = env["JAX_COORDINATOR_ADDRESS"]
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and 1 <= int(port) <= 65535 and host.strip("[]")):
        message = (
            f"JAX_COORDINATOR_ADDRESS={address}: must be HOST:PORT, with a port from 1 to 65535"
        )
        raise ConfigError(Problem("", message))
    count, index = _integer("JAX_NUM_PROCESSES", 1), _integer("JAX_PROCESS_ID", 0)
    if index >= count:
        message = f"JAX_PROCESS_ID={index} must be below JAX_NUM_PROCESSES={count}"
        raise ConfigError(Problem("", message))
    return address, count, index


def find_place() -> Place:
    """Return the place of this process as JAX would find it, without importing JAX here; raises
    ConfigError if variables are missing, or JAX cannot tell.
    """
    place = coordinator_variables() or (_detect() if is_cluster() else None)
    if place is None or place[1] == 1:
        return Place("localhost", 0, 1, 0)
    host, _, port = place[0].rpartition(":")
    return Place(host.strip("[]"), int(port), *place[1:])


def _detect() -> tuple[str, int, int]:
    """Return coordinator, number of processes and index as JAX detects them."""
    command, limit = [sys.executable, "-c", _DETECT], _DETECT_SECONDS + _IMPORT_SECONDS
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        if found.returncode == 0:
            address, count, index = json.loads(found.stdout.splitlines()[-1])[:3]
            if None not in (address, count, index):
                return address, count, index
        reason = found.stderr.strip().rpartition("\n")[2] or "it knows no such cluster"
    except subprocess.TimeoutExpired:
        reason = f"it has not found them in {limit:g} s"
    message = f"JAX cannot tell the processes of this job: {reason}; {_REMEDY}"
    raise ConfigError(Problem("", message))


def free_port() -> int:
    """Return a port at which nothing listens, for a server that starts within seconds; raises
    OSError if no port is free.
    """
    for port in random.SystemRandom().sample(_SERVER_PORTS, len(_SERVER_PORTS)):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError(f"no port from {_SERVER_PORTS[0]} to {_SERVER_PORTS[-1]} is free")


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _integer(name: str, least: int) -> int:
    """Return the number in a variable, 1 if it is not set."""
    text = os.environ.get(name, "1")
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(Problem("", f"{name}={text} must be a whole number of at least {least}"))
    return int(text)


def _num_slurm_tasks() -> int:
    """Return the number of tasks of this process's Slurm job step; 1 outside of Slurm."""
    return _integer("SLURM_NTASKS", 1) if "SLURM_PROCID" in os.environ else 1

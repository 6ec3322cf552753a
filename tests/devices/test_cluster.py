"""What the environment says about a process's place in its run, and about its job."""

import socket

import pytest

from maxpipe.config import ConfigError
from maxpipe.devices import cluster
from maxpipe.devices.cluster import (
    CLUSTER_VARIABLES,
    Place,
    coordinator_variables,
    find_place,
    free_port,
    job_of_process,
)

SLURM = {
    "SLURM_JOB_ID": "70000",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
}


def test_job_of_process_is_named_by_launcher_or_slurm(monkeypatch):
    names = ("MAXPIPE_JOB", "MAXPIPE_ATTEMPT", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")
    for name in (*names, "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    for environment, job in (
        ({}, ("", 0)),
        ({"SLURM_JOB_ID": "9"}, ("slurm  9", 0)),
        ({"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "3"}, ("slurm  9", 3)),
        ({"MAXPIPE_JOB": "a", "MAXPIPE_ATTEMPT": "7", "SLURM_JOB_ID": "9"}, ("a", 7)),
        ({"MAXPIPE_JOB": "a", "MAXPIPE_ATTEMPT": "x"}, ("a", 0)),
    ):
        with monkeypatch.context() as context:
            for name, value in environment.items():
                context.setenv(name, value)
            assert job_of_process() == job


@pytest.fixture
def environment(monkeypatch):
    coordinator = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    others = ("MAXPIPE_DISTRIBUTED", "TPU_WORKER_HOSTNAMES", *CLUSTER_VARIABLES, *SLURM)
    for name in (*coordinator, *others):
        monkeypatch.delenv(name, raising=False)

    def setenv(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return setenv


def test_find_place_takes_jax_s_variables(environment):
    assert find_place() == Place("localhost", 0, 1, 0)
    for address, host in (("a.b:70", "a.b"), ("10.0.0.1:70", "10.0.0.1"), ("[::1]:70", "::1")):
        variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "3"}
        environment(variables | {"JAX_PROCESS_ID": "2"})
        assert find_place() == Place(host, 70, 3, 2)


def test_find_place_asks_jax_about_slurm(environment):
    environment(SLURM)
    place = find_place()
    assert (place.host, place.count, place.index) == ("node07", 2, 1)
    assert place.port > 1023


def test_coordinator_variables_without_an_address_allows_one_process_and_what_jax_detects(
    environment,
):
    environment({"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"})
    assert coordinator_variables() is None
    environment({"JAX_NUM_PROCESSES": "", "JAX_PROCESS_ID": ""})
    assert coordinator_variables() is None
    environment({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", **SLURM})
    assert coordinator_variables() is None


def test_find_place_says_that_jax_has_not_answered(environment, monkeypatch):
    environment({"MAXPIPE_DISTRIBUTED": "1", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    monkeypatch.setattr(cluster, "_DETECT_SECONDS", 0.0)
    monkeypatch.setattr(cluster, "_IMPORT_SECONDS", 0.01)
    with pytest.raises(ConfigError, match=r"not found them in 0\.01 s; set JAX_COORDINATOR_"):
        find_place()


NAMES = {"at": "JAX_COORDINATOR_ADDRESS", "of": "JAX_NUM_PROCESSES", "index": "JAX_PROCESS_ID"}
REFUSED = {
    "at=a:1 index=2": "so JAX_NUM_PROCESSES must be set as well",
    "of=2 index=1": "with JAX_NUM_PROCESSES and JAX_PROCESS_ID, JAX_COORDINATOR_ADDRESS must be",
    "at=[fd00::1] of=2 index=1": "=[fd00::1]: must be HOST:PORT",
    "at=node07:84760 of=2 index=1": "with a port from 1 to 65535",
    "at=a:1 of=two index=1": "=two must be a whole number of at least 1",
    "at=a:1 of=2 index=-1": "JAX_PROCESS_ID=-1 must be a whole number of at least 0",
    "at=a:1 of=2 index=2": "JAX_PROCESS_ID=2 must be below JAX_NUM_PROCESSES=2",
}


def test_find_place_says_which_variable_is_missing_or_wrong(environment, monkeypatch):
    environment({})
    said = {}
    for words in REFUSED:
        with monkeypatch.context() as context:
            for name, value in (word.split("=") for word in words.split()):
                context.setenv(NAMES[name], value)
            with pytest.raises(ConfigError) as refused:
                find_place()
        said[words] = str(refused.value)
    assert {words: said[words] for words, part in REFUSED.items() if part not in said[words]} == {}


def test_free_port_passes_by_ports_at_which_something_listens(monkeypatch):
    with socket.create_server(("", 0)) as taken, socket.create_server(("", 0)) as closed:
        ports = [server.getsockname()[1] for server in (taken, closed)]
        monkeypatch.setattr(cluster, "_SERVER_PORTS", ports)
        with pytest.raises(OSError, match="no port"):
            free_port()
        closed.close()
        assert {free_port() for _ in range(8)} == {ports[1]}

"""Starting JAX: processes and simulated devices."""

import os
import time
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax._src import cloud_tpu_init
from jax.experimental.compilation_cache import compilation_cache

from maxpipe.config import Config, ConfigError, replace
from maxpipe.config.elastic import Hosts
from maxpipe.devices import start
from maxpipe.devices.cluster import CLUSTER_VARIABLES, WHOLE, whole_variable
from maxpipe.devices.start import (
    NO_MACHINE,
    check_platforms,
    compile_cache,
    name_machine,
    simulated_share,
    start_compile_cache,
    start_jax,
    start_processes,
)

FOUR = {"JAX_COORDINATOR_ADDRESS": "host:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TIMEOUTS = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 30}


class TestStartOfProcesses:
    @pytest.fixture
    def started(self, monkeypatch):
        """The arguments of `jax.distributed.initialize`, in an environment that says nothing."""
        calls = []
        others = ("TPU_WORKER_HOSTNAMES", "SLURM_NTASKS", "SLURM_PROCID", "MAXPIPE_DISTRIBUTED")
        for name in (*FOUR, *others, *CLUSTER_VARIABLES):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(
            jax.distributed, "initialize", lambda *args, **timeouts: calls.append((*args, timeouts))
        )
        return calls

    def test_start_processes_with_explicit_variables_passes_them(self, started, monkeypatch):
        start_processes(30)
        assert started == []
        for name, value in FOUR.items():
            monkeypatch.setenv(name, value)
        start_processes(30)
        assert started == [("host:1234", 4, 3, TIMEOUTS)]

    def test_processes_that_do_not_meet_are_told_where(self, started, monkeypatch, capsys):
        for name, value in FOUR.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: time.sleep(0.3))
        monkeypatch.setattr(start, "_QUIET_SECONDS", 0.1)
        start_processes(30)
        assert "4 processes to meet at host:1234 (" in capsys.readouterr().out
        monkeypatch.setattr(start, "_QUIET_SECONDS", 0.4)
        start_processes(30)
        time.sleep(0.2)
        assert not capsys.readouterr().out

    def test_start_jax_refuses_parts_of_stages_before_waiting(self, started, monkeypatch):
        for name, value in FOUR.items():
            monkeypatch.setenv(name, value)
        config = replace(Config(), **{"pipeline.schedule": "1f1b", "mesh.ici.stage": 3})
        with pytest.raises(ConfigError, match=r"mesh\.ici\.stage: 3 stages do not fit 4 processes"):
            start_jax(config)
        assert started == []

    def test_start_processes_on_known_clusters_leaves_detection_to_jax(self, started, monkeypatch):
        for variables, several in (
            ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
            ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
            ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, True),
            ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
            ({"SLURM_NTASKS": "4"}, False),
            ({"MEGASCALE_COORDINATOR_ADDRESS": "a:1"}, True),
            ({"MAXPIPE_DISTRIBUTED": "1"}, True),
        ):
            started.clear()
            with monkeypatch.context() as context:
                for name, value in variables.items():
                    context.setenv(name, value)
                start_processes(30)
            assert started == ([(TIMEOUTS,)] if several else []), variables

    @pytest.mark.parametrize(
        "variables",
        [
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4"},
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        ],
        ids=str,
    )
    def test_simulated_share_divides_devices_evenly(self, started, monkeypatch, variables):
        assert simulated_share(6) == 6
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert simulated_share(8) == 2
        with pytest.raises(
            ConfigError, match="6 do not divide over 4 processes; take a multiple of 4"
        ):
            simulated_share(6)

    def test_simulated_share_of_a_run_without_some_hosts_stays(self, started, monkeypatch):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "a:1")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "1")
        monkeypatch.setenv(WHOLE, whole_variable(Hosts(4, 8)))
        assert simulated_share(8) == 2


@pytest.mark.parametrize("has_tpu", [False, True])
def test_a_machine_is_named_only_where_jax_has_found_no_tpu(monkeypatch, has_tpu):
    monkeypatch.setattr(cloud_tpu_init, "running_in_cloud_tpu_vm", has_tpu)
    monkeypatch.setattr(os, "environ", {"TPU_WORKER_HOSTNAMES": "mine"})
    name_machine()
    named = {"TPU_ACCELERATOR_TYPE": NO_MACHINE["TPU_ACCELERATOR_TYPE"]}
    assert os.environ == {"TPU_WORKER_HOSTNAMES": "mine"} | ({} if has_tpu else named)


def test_a_platform_that_jax_does_not_have_is_a_mistake_of_the_variable(monkeypatch):
    """JAX says nothing of GPUs without their plugin, and fails an assertion."""
    unable = RuntimeError("Unable to initialize 'rocket'\nmore")
    for error, reason in ((AssertionError(), "it is not installed"), (unable, "Unable to init")):
        monkeypatch.setenv("JAX_PLATFORMS", "rocket")
        monkeypatch.setattr(jax, "local_devices", Mock(side_effect=error))
        with pytest.raises(ConfigError, match=f"JAX cannot use 'rocket' here: {reason}.*or unset"):
            check_platforms()


def test_compile_cache_is_in_the_output_directory_by_default(tmp_path):
    config = replace(Config(), output_dir=str(tmp_path))
    assert compile_cache(config) == tmp_path / "compile_cache"
    assert compile_cache(replace(config, **{"compile.cache_dir": "off"})) is None
    assert (
        compile_cache(replace(config, **{"compile.cache_dir": "/elsewhere"})).as_posix()
        == "/elsewhere"
    )


class TestCompileCache:
    @pytest.fixture(autouse=True)
    def _settings(self):
        names = ("enable_compilation_cache", "compilation_cache_dir")
        names += ("persistent_cache_min_compile_time_secs",)
        before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
        yield
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()

    def test_start_compile_cache_on_several_cpu_devices_needs_a_directory(
        self, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("NPROC", "128")
        jax.config.update("jax_enable_compilation_cache", True)
        start_compile_cache(replace(Config(), **{"compile.cache_dir": str(tmp_path)}))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        start_compile_cache(Config())
        assert jax.config.jax_compilation_cache_dir is None

    def test_start_compile_cache_that_cannot_be_written_is_off_and_said_once(
        self, monkeypatch, tmp_path, capsys
    ):
        """JAX itself would warn of every program."""
        monkeypatch.setenv("NPROC", "128")
        (tmp_path / "file").touch()
        jax.config.update("jax_enable_compilation_cache", True)
        for cache in (tmp_path / "file", tmp_path / "file/cache"):
            start_compile_cache(replace(Config(), **{"compile.cache_dir": str(cache)}))
            assert jax.config.jax_compilation_cache_dir is None
            said = f"nothing is cached: {cache} cannot be written (compile.cache_dir)\n"
            assert capsys.readouterr().out == said

    def test_each_run_of_a_program_has_the_cache_of_its_own_configuration(
        self, monkeypatch, tmp_path
    ):
        monkeypatch.setenv("NPROC", "128")
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()
        for number, place in enumerate(("off", "a", "b", "off", "a")):
            cache = place if place == "off" else str(tmp_path / place)
            start_compile_cache(replace(Config(), **{"compile.cache_dir": cache}))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.jit(lambda x, n=number: n * x + 1).lower(jnp.ones(3)).compile()
        stored = {place: [*(tmp_path / place).glob("jit__lambda*-cache")] for place in "ab"}
        assert {place: len(entries) for place, entries in stored.items()} == {"a": 2, "b": 1}

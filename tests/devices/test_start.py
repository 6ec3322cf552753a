from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.engines import make_mesh, tiny
from jax.sharding import PartitionSpec as P

from maxpipe.config import MESH_AXES, Config, ConfigError, replace
from maxpipe.devices.mesh import build_mesh, num_slices, rows_of_this_process
from maxpipe.devices.start import (
    compile_cache,
    simulated_share,
    start_compile_cache,
    start_jax,
    start_processes,
)

TIMEOUTS = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 30}
EIGHT = {"mesh.ici.data": 2, "mesh.ici.stage": 2, "mesh.ici.fsdp": 2}


def test_axes_have_their_order_and_automatic_partitioning():
    mesh = make_mesh(tiny(**EIGHT))
    assert mesh.axis_names == MESH_AXES == ("data", "stage", "fsdp", "context", "tensor", "expert")
    assert dict(mesh.shape) == {
        "data": 2,
        "stage": 2,
        "fsdp": 2,
        "context": 1,
        "tensor": 1,
        "expert": 1,
    }
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_neighbours_in_the_last_axes_are_neighbours_among_the_devices():
    ids = np.vectorize(lambda device: device.id)(make_mesh(tiny(**EIGHT)).devices).reshape(2, 2, 2)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(2, 2, 2))


@dataclass(frozen=True)
class FakeDevice:
    """What a mesh needs to know of a device, with two devices in each slice."""

    id: int
    platform: str = "cpu"
    device_kind: str = "fake"
    process_index: int = 0
    client: None = None

    @property
    def slice_index(self):
        return self.id // 2


def test_dcn_lies_outside_ici():
    """Two slices of two devices: neighbours in an axis are in one slice as far as its ICI part goes."""
    config = replace(Config(), **{"mesh.ici.fsdp": 2, "mesh.dcn.data": 2})
    mesh = build_mesh(config, [FakeDevice(i) for i in (3, 0, 2, 1)])
    slices = np.vectorize(lambda device: device.slice_index)(mesh.devices).reshape(2, 2)
    assert dict(mesh.shape)["data"] == dict(mesh.shape)["fsdp"] == 2
    np.testing.assert_array_equal(slices, [[0, 0], [1, 1]])
    one_axis = replace(Config(), **{"mesh.ici.fsdp": 2, "mesh.dcn.fsdp": 2})
    slices = [
        device.slice_index for device in build_mesh(one_axis, list(mesh.devices.flat)).devices.flat
    ]
    assert slices == [0, 0, 1, 1]


def test_slices_are_counted_by_their_index():
    assert num_slices(jax.devices()) == 1
    assert num_slices([SimpleNamespace(slice_index=i // 2) for i in range(6)]) == 3


@pytest.mark.parametrize(
    ("spec", "rows"),
    [(P(("data", "fsdp")), range(8)), (P("data"), range(8)), (P(None), range(8))],
    ids=str,
)
def test_one_process_has_all_rows(spec, rows):
    assert rows_of_this_process(make_mesh(tiny(**EIGHT)), spec, 8) == list(rows)


def test_rows_of_one_of_several_processes(monkeypatch):
    """A process that owns the devices 2 and 3 of a mesh of 8: stage 1 of the first data row."""
    mesh = make_mesh(tiny(**EIGHT))
    original = jax.sharding.NamedSharding.addressable_devices_indices_map

    def own_part(self, shape):
        return {
            device: index for device, index in original(self, shape).items() if device.id in (2, 3)
        }

    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", own_part)
    assert rows_of_this_process(mesh, P(("data", "fsdp")), 8) == [0, 1, 2, 3]
    assert rows_of_this_process(mesh, P("stage"), 8) == [4, 5, 6, 7]


def test_compilation_cache_is_in_the_output_directory_unless_said_otherwise(tmp_path):
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
        names = (
            "enable_compilation_cache",
            "compilation_cache_dir",
            "persistent_cache_min_compile_time_secs",
        )
        before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
        yield
        for name, value in before.items():
            jax.config.update(name, value)

    def test_not_for_several_cpu_devices_unless_asked_for(self, monkeypatch, tmp_path):
        monkeypatch.setenv("NPROC", "128")
        jax.config.update("jax_enable_compilation_cache", True)
        start_compile_cache(replace(Config(), **{"compile.cache_dir": str(tmp_path)}))
        assert jax.config.jax_enable_compilation_cache
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        start_compile_cache(Config())
        assert not jax.config.jax_enable_compilation_cache

    @pytest.mark.parametrize(("backend", "count"), [("cpu", 1), ("tpu", 4)])
    def test_others_are(self, backend, count, monkeypatch, tmp_path):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        monkeypatch.setattr(jax, "device_count", lambda: count)
        jax.config.update("jax_enable_compilation_cache", True)
        start_compile_cache(replace(Config(), output_dir=str(tmp_path)))
        assert jax.config.jax_enable_compilation_cache
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "compile_cache")


class TestStartOfProcesses:
    @pytest.fixture
    def started(self, monkeypatch):
        """The arguments of `jax.distributed.initialize`, in an environment that says nothing."""
        calls = []
        for name in (
            "JAX_COORDINATOR_ADDRESS",
            "JAX_NUM_PROCESSES",
            "JAX_PROCESS_ID",
            "TPU_WORKER_HOSTNAMES",
            "SLURM_NTASKS",
            "SLURM_PROCID",
            "MEGASCALE_COORDINATOR_ADDRESS",
            "OMPI_MCA_orte_hnp_uri",
            "MAXPIPE_DISTRIBUTED",
        ):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(
            jax.distributed, "initialize", lambda *args, **timeouts: calls.append((*args, timeouts))
        )
        return calls

    def test_one_process_starts_nothing(self, started):
        start_processes(30)
        assert started == []

    def test_explicit_variables(self, started, monkeypatch):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1234")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
        monkeypatch.setenv("JAX_PROCESS_ID", "3")
        start_processes(30)
        assert started == [("host:1234", 4, 3, TIMEOUTS)]

    def test_an_incomplete_set_names_what_is_missing(self, started, monkeypatch):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1234")
        monkeypatch.setenv("JAX_PROCESS_ID", "3")
        with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES"):
            start_processes(30)
        assert started == []

    def test_an_engine_of_one_process_is_refused_before_the_others_are_waited_for(
        self, started, monkeypatch
    ):
        monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host:1234")
        monkeypatch.setenv("JAX_NUM_PROCESSES", "4")
        monkeypatch.setenv("JAX_PROCESS_ID", "3")
        config = replace(Config(), **{"pipeline.schedule": "1f1b", "mesh.ici.stage": 2})
        with pytest.raises(
            ConfigError, match=r"pipeline\.engine: mpmd drives all devices .*, and there are 4"
        ):
            start_jax(config)
        assert started == []

    @pytest.mark.parametrize(
        ("variables", "several"),
        [
            ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
            ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
            ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, True),
            ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, False),
            ({"SLURM_NTASKS": "4"}, False),
            ({"MEGASCALE_COORDINATOR_ADDRESS": "a:1"}, True),
            ({"MAXPIPE_DISTRIBUTED": "1"}, True),
        ],
        ids=str,
    )
    def test_clusters_that_jax_knows(self, started, monkeypatch, variables, several):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        start_processes(30)
        assert started == ([(TIMEOUTS,)] if several else [])

    @pytest.mark.parametrize(
        "variables",
        [
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4"},
            {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        ],
        ids=str,
    )
    def test_processes_share_simulated_devices_evenly(self, started, monkeypatch, variables):
        assert simulated_share(6) == 6
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert simulated_share(8) == 2
        with pytest.raises(
            ConfigError, match="6 do not divide over 4 processes; take a multiple of 4"
        ):
            simulated_share(6)

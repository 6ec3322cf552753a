"""A run's own view of its hosts: all of them, some of them, or none to go on with."""

import jax
import pytest

from maxpipe.config import ConfigError, load
from maxpipe.config.elastic import Hosts
from maxpipe.devices.cluster import WHOLE, Sizes, whole_variable
from maxpipe.supervise.process import ProgressFile, read_progress
from maxpipe.training.elastic import fit_hosts, fit_next

WORDS = ("mesh.ici.stage=1", "mesh.ici.fsdp=1", "data.global_batch_size=64")


@pytest.fixture
def elastic():
    data = f"mesh.ici.data={2 * jax.device_count()}"
    return load("base", [*WORDS, data, "mesh.elastic.axes=[data]", "mesh.elastic.wait_seconds=7"])


@pytest.fixture
def one_of_two(monkeypatch):
    value = whole_variable(Hosts(2, 2 * jax.device_count()))
    monkeypatch.setenv(WHOLE, value)
    return value


def test_fit_hosts_that_go_on_shrinks_the_mesh_and_tells_the_supervisor(
    elastic, one_of_two, tmp_path
):
    fitted = fit_hosts(elastic, ProgressFile(tmp_path / "progress"))
    assert fitted.config.mesh.ici.data == jax.device_count()
    assert fitted.config.pipeline.num_microbatches == 2
    assert read_progress(tmp_path / "progress").sizes == Sizes((1,), 7.0, one_of_two)


def test_fit_hosts_without_a_supervisor_or_other_hosts_says_that_it_is_in_vain(elastic, tmp_path):
    for file, missing in ((ProgressFile(), "a sup"), (ProgressFile(tmp_path / "p"), "hosts")):
        fitted = fit_hosts(elastic, file)
        assert fitted.config == elastic.config
        for text in (missing, "mesh.elastic.axes has no effect"):
            assert text in fitted.remarks[-1]


def test_fit_hosts_of_an_inelastic_run_does_nothing(tmp_path):
    loaded = load("base", WORDS)
    assert fit_hosts(loaded, ProgressFile(tmp_path / "progress")) is loaded
    assert not (tmp_path / "progress").exists()


def test_fit_next_of_all_hosts_is_for_one_less_and_of_the_fewest_none(monkeypatch):
    data = f"mesh.ici.data={jax.device_count()}"
    given = load("base", [*WORDS, data, "mesh.elastic.axes=[data]"])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    fitted, hosts = fit_next(given)
    assert hosts == Hosts(1, jax.device_count() // 2)
    assert fitted.config.mesh.ici.data == hosts.devices
    monkeypatch.setenv(WHOLE, whole_variable(Hosts(2, 2 * jax.device_count())))
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    data = f"mesh.ici.data={2 * jax.device_count()}"
    assert fit_next(load("base", [*WORDS, data, "mesh.elastic.axes=[data]"])) is None


def test_fit_hosts_refuses_tpus(elastic, one_of_two, tmp_path, monkeypatch):
    class Tpu:
        platform = "tpu"

    monkeypatch.setattr(jax, "devices", lambda: [Tpu()])
    with pytest.raises(ConfigError, match="does not start without one of its hosts"):
        fit_hosts(elastic, ProgressFile(tmp_path / "progress"))

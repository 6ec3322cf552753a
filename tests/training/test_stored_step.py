"""Train steps in files: the same results as compiled here, and refusals with a reason."""

import errno
import os

import jax
import numpy as np
import pytest
from helpers.engines import make_batch, make_mesh, tiny

from maxpipe.builder import build_trainer
from maxpipe.compile.step import compile_step
from maxpipe.config import ConfigError, replace
from maxpipe.training import stored_step
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.stored_step import origin, read, write


@pytest.fixture(autouse=True)
def _enough_threads(monkeypatch):
    """Claim 128 threads: of its 64 the process needs those of four devices here."""
    monkeypatch.setenv("NPROC", "128")


@pytest.fixture(scope="module")
def config():
    # With experts, whose figures are arrays among the metrics.
    return tiny(**{"model.num_layers": 2, "model.moe.experts": 4, "model.moe.bias_rate": 1e-3})


@pytest.fixture(scope="module")
def mesh(config):
    return make_mesh(config)


@pytest.fixture(scope="module")
def file(config, mesh, tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "step.bin"
    step = compile_step(config, mesh, build_trainer(config, mesh), print)
    assert write(str(path), step.executable, config, mesh) == path.stat().st_size
    return path


def loading(config, file, **values):
    return replace(config, **values, **{"compile.load": str(file)})


def test_loaded_step_gives_the_results_of_the_compiled_step(config, mesh, file):
    config = replace(config, **{"telemetry.batch_digest": True})
    trainers = [build_trainer(config, mesh), build_trainer(loading(config, file), mesh)]
    results = []
    for trainer in trainers:
        place = BatchPlacer(mesh, trainer.batch_spec, config.data.global_batch_size)
        state = trainer.init(jax.random.key(3))
        for seed in range(2):
            before = state.params["embed"]["embedding"]
            state, metrics = trainer.step(
                state, place(make_batch(config.data.global_batch_size, seed=seed))
            )
            assert before.is_deleted()
        results.append((state, metrics))
    (state, metrics), (loaded_state, loaded_metrics) = results
    assert "batch_digest" in loaded_metrics
    assert loaded_metrics["expert_load_max"].shape == (config.model.num_layers,)
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert jax.tree.map(lambda a: a.sharding, state) == jax.tree.map(
        lambda a: a.sharding, loaded_state
    )


def test_file_of_another_configuration_is_refused_by_key(config, mesh, file):
    for values, key, words in [
        (
            {"optimizer.learning_rate": 0.5},
            "optimizer.learning_rate",
            "compiled with 0.0003, this run has 0.5",
        ),
        ({"data.sequence_length": 16}, "data.sequence_length", "compiled with 8, this run has 16"),
        ({"data.packing": False}, "data.packing", "compiled with True, this run has False"),
    ]:
        with pytest.raises(ConfigError) as error:
            build_trainer(loading(config, file, **values), mesh)
        (problem,) = error.value.problems
        assert problem.key == key
        assert words in str(problem)
        assert "compile.save=" in str(problem)


def test_origin_leaves_out_what_is_not_in_the_program(config, mesh):
    other = replace(
        config,
        **{"steps": 7, "checkpoint.every": 3, "data.source": "synthetic", "run_name": "other"},
    )
    assert origin(other, mesh) == origin(config, mesh)


def test_file_of_another_machine_or_version_is_refused(config, mesh, file, monkeypatch):
    for what in ["jax", "devices", "order of devices", "sources of maxpipe"]:
        other = origin(config, mesh) | {what: "another"}
        monkeypatch.setattr(stored_step, "origin", lambda config, mesh, other=other: other)
        with pytest.raises(ConfigError, match=f"compile.load: {what}: .*this run has 'another'"):
            build_trainer(loading(config, file), mesh)


def test_missing_foreign_and_damaged_files_are_refused(config, file, tmp_path):
    whole = file.read_bytes()
    missing, foreign, cut = tmp_path / "missing", tmp_path / "foreign", tmp_path / "cut"
    foreign.write_bytes(b"\x80\x04\x95pickle")
    cut.write_bytes(whole[:-1])
    cases = {
        missing: "cannot read .*No such file",
        foreign: "not written by compile.save",
        cut: "is damaged",
    }
    for path, reason in cases.items():
        with pytest.raises(ConfigError, match=f"compile.load: .*{reason}"):
            read(str(path))
    with pytest.raises(ConfigError, match=r"compile\.save: cannot write"):
        write(str(tmp_path / "no" / "directory"), _Compiled, config, make_mesh(config))


def test_failed_write_leaves_the_old_file_and_nothing_else(config, mesh, tmp_path, monkeypatch):
    file = tmp_path / "step.bin"
    file.write_bytes(b"old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"compile\.save: cannot write .*No space left"):
        write(str(file), _Compiled, config, mesh)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"old"]


class _Compiled:
    out_info = ({}, {})

    @staticmethod
    def runtime_executable():
        return _Compiled

    @staticmethod
    def serialize():
        return b""


def test_loaded_step_runs_on_several_cpu_devices(tmp_path):
    config = tiny(**{"model.num_layers": 2, "mesh.ici.stage": 2, "pipeline.num_microbatches": 2})
    mesh, file = make_mesh(config), tmp_path / "step.bin"
    trainer = build_trainer(config, mesh)
    write(str(file), compile_step(config, mesh, trainer, print).executable, config, mesh)
    place = BatchPlacer(mesh, trainer.batch_spec, config.data.global_batch_size)
    results = [
        e.step(e.init(jax.random.key(3)), place(make_batch(config.data.global_batch_size)))
        for e in (trainer, build_trainer(loading(config, file), mesh))
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_several_cpu_devices_with_few_threads_are_refused(config, mesh, file, monkeypatch):
    monkeypatch.setenv("NPROC", "16")
    with pytest.raises(
        ConfigError, match=r"compile\.load: .*need NPROC=128 threads .*, not 16; or leave out"
    ):
        build_trainer(loading(config, file), mesh)

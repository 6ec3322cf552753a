"""Train steps in files: the same results as compiled here, and refusals with a reason."""

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


@pytest.fixture(scope="module")
def compiled_once():
    """Share nothing: XLA cannot write a program that has run."""


@pytest.fixture(autouse=True)
def _enough_threads(monkeypatch):
    monkeypatch.setenv("NPROC", "128")


@pytest.fixture(scope="module")
def config():
    experts = {"model.moe.experts": 4, "model.moe.bias_rate": 1e-3}
    stages = {"mesh.ici.stage": 2, "pipeline.num_microbatches": 2}
    return tiny(**{"model.num_layers": 2, **experts, **stages})


@pytest.fixture(scope="module")
def mesh(config):
    return make_mesh(config)


@pytest.fixture(scope="module")
def executable(config, mesh):
    return compile_step(config, mesh, build_trainer(config, mesh), print).executable


@pytest.fixture(scope="module")
def file(config, mesh, executable, tmp_path_factory):
    path = tmp_path_factory.mktemp("steps") / "step.bin"
    assert write(str(path), executable, config, mesh) == path.stat().st_size
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
            batch = make_batch(config.data.global_batch_size, seed=seed)
            state, metrics = trainer.step(state, place(batch))
            assert before.is_deleted()
        results.append((state, metrics))
    (state, _), (loaded_state, loaded_metrics) = results
    assert "batch_digest" in loaded_metrics
    assert loaded_metrics["expert_load_max"].shape == (config.model.num_layers,)
    jax.tree.map(np.testing.assert_array_equal, *results)
    shardings = [jax.tree.map(lambda a: a.sharding, each) for each in (state, loaded_state)]
    assert shardings[0] == shardings[1]


def test_file_of_another_configuration_is_refused_by_key(config, mesh, file):
    for key, compiled, now in [
        ("optimizer.learning_rate", 0.0003, 0.5),
        ("data.sequence_length", 8, 16),
        ("data.packing", True, False),
    ]:
        with pytest.raises(ConfigError) as error:
            build_trainer(loading(config, file, **{key: now}), mesh)
        (problem,) = error.value.problems
        assert problem.key == key
        assert f"compiled with {compiled}, this run has {now}" in str(problem)
        assert "compile.save=" in str(problem)


def test_origin_leaves_out_what_is_not_in_the_program(config, mesh):
    changed = {"steps": 7, "checkpoint.every": 3, "data.source": "synthetic", "run_name": "other"}
    assert origin(replace(config, **changed), mesh) == origin(config, mesh)


def test_file_of_another_machine_or_version_is_refused(config, mesh, file, monkeypatch):
    for what in ["jax", "devices", "order of devices", "sources of maxpipe"]:
        other = origin(config, mesh) | {what: "another"}
        monkeypatch.setattr(stored_step, "origin", lambda config, mesh, other=other: other)
        with pytest.raises(ConfigError, match=f"compile.load: {what}: .*this run has 'another'"):
            build_trainer(loading(config, file), mesh)


def test_file_that_cannot_be_written_is_refused(config, mesh, executable, tmp_path):
    for place in (tmp_path / "no" / "directory", tmp_path):
        with pytest.raises(ConfigError, match=r"compile\.save: cannot write"):
            write(str(place), executable, config, mesh)
    assert [*tmp_path.iterdir()] == []


def test_missing_foreign_and_damaged_files_are_refused(file, tmp_path):
    whole = file.read_bytes()
    missing, foreign, cut = tmp_path / "missing", tmp_path / "foreign", tmp_path / "cut"
    foreign.write_bytes(b"\x80\x04\x95pickle")
    cut.write_bytes(whole[:-1])
    for path, reason in [
        (missing, "cannot read .*No such file"),
        (foreign, "not written by compile.save"),
        (cut, "is damaged"),
    ]:
        with pytest.raises(ConfigError, match=f"compile.load: .*{reason}"):
            read(str(path))


def test_several_cpu_devices_with_few_threads_are_refused(config, mesh, file, monkeypatch):
    monkeypatch.setenv("NPROC", "16")
    reason = r"compile\.load: .*need NPROC=128 threads .*, not 16; or leave out"
    with pytest.raises(ConfigError, match=reason):
        build_trainer(loading(config, file), mesh)

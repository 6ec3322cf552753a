"""Steps compiled ahead for fewer hosts: stored, run once they are needed, and never in the way."""

import dataclasses
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.engines import make_batch
from helpers.training_process import TINY_MODEL

from maxpipe.builder import build_trainer
from maxpipe.config import ConfigError, load, replace, resolve
from maxpipe.config.elastic import Hosts
from maxpipe.devices.cluster import WHOLE, whole_variable
from maxpipe.devices.mesh import build_mesh
from maxpipe.supervise.process import ProgressFile
from maxpipe.training.batches import BatchPlacer
from maxpipe.training.elastic import OPTIONS, build_with_step_ahead, compile_ahead, store_step

ALONE = Hosts(1, 1)


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    device = jax.devices()[0]
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setenv("NPROC", "128")  # for the others, which are there all the same
    monkeypatch.setenv(WHOLE, whole_variable(Hosts(2, 2)))
    words = ("mesh.ici.stage=1", "mesh.ici.fsdp=1", "pipeline.engine=sequential")
    size = ("model.num_layers=1", "data.sequence_length=8", "data.global_batch_size=8")
    return load(
        "base", [*TINY_MODEL, *words, *size, "pipeline.num_repeats=1", f"output_dir={tmp_path}"]
    )


def built(loaded, notes, build=build_trainer):
    config = resolve(loaded, 1)
    mesh = build_mesh(config)
    return config, mesh, build_with_step_ahead(config, mesh, build, notes.append)


def test_store_step_gives_a_step_that_is_run_instead_of_compiling(loaded):
    file = store_step(loaded, ALONE, build_trainer)
    notes = []
    config, mesh, trainer = built(loaded, notes)
    assert notes[-1].startswith(f"compile.load={file}: compiled while there were more hosts")
    trainer.jitted_step = None  # nothing to compile
    place = BatchPlacer(mesh, trainer.batch_spec, config.data.global_batch_size)
    batch = make_batch(config.data.global_batch_size)
    losses = []
    for each in (trainer, build_trainer(config, mesh)):
        _, metrics = each.step(each.init(jax.random.key(1)), place(batch))
        losses.append(np.asarray(metrics["loss"]))
    np.testing.assert_array_equal(*losses)


def test_step_ahead_is_used_once_and_not_with_all_hosts(loaded, monkeypatch):
    store_step(loaded, ALONE, build_trainer)
    with monkeypatch.context() as all_hosts:
        all_hosts.delenv(WHOLE)
        assert built(loaded, [])[2] is None
    assert built(loaded, [])[2] is not None
    assert built(loaded, [])[2] is None  # if it has failed, the next start compiles


def test_build_with_step_ahead_of_a_file_that_does_not_fit_says_so(loaded):
    file = store_step(loaded, ALONE, build_trainer)
    other = replace(loaded.config, **{"optimizer.learning_rate": 0.5})
    loaded, notes = dataclasses.replace(loaded, config=other), []
    assert built(loaded, notes)[2] is None
    (note,) = notes
    assert note.startswith("the step compiled ahead is not used: ")
    assert "optimizer.learning_rate" in note
    assert not file.exists()


def test_store_step_for_several_processes_on_cpus_is_refused_with_the_reason(loaded):
    with pytest.raises(ConfigError, match="several processes on CPUs rely on an order"):
        store_step(loaded, Hosts(2, 2), build_trainer)


def test_compile_ahead_begins_after_a_few_steps_and_says_why_it_cannot(loaded, tmp_path):
    given = load("base", ["mesh.elastic.axes=[data]", "mesh.ici.data=2", "mesh.ici.stage=1"])
    progress = ProgressFile(tmp_path / "progress")
    run = SimpleNamespace(step=7, supervision=SimpleNamespace(progress=progress))
    said = []
    compile_ahead(given, run, build_trainer, said.append)
    time.sleep(0.5)
    assert said == []
    run.step = 10
    until = time.monotonic() + 20
    while not said:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert "compiled ahead, only when it is needed: " in said[0]


def test_options_of_the_compiler_are_known_to_xla():
    for options in OPTIONS.values():
        lowered = jax.jit(lambda x: x).lower(1.0)
        lowered.compile({**options})
        with pytest.raises(Exception, match="No such compile option"):
            lowered.compile({f"{name}_": value for name, value in options.items()})

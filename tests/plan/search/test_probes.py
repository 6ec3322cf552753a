"""Figures of compiled units take the place of the closed forms of layers and head."""

import numpy as np
import pytest

from maxpipe.config import Config, replace
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.memory import memory_bytes, working_of
from maxpipe.plan.search.probes import Probing, UnitFigures
from maxpipe.plan.search.request import shared_config
from maxpipe.plan.search.timing import step_seconds
from maxpipe.plan.search.traffic import residual_seconds
from maxpipe.plan.search.units import units_of
from maxpipe.plan.search.waits import head_wait, unit_waits, waits_of

SIZES = {
    "model.num_layers": 16,
    "model.embed_dim": 256,
    "model.num_query_heads": 8,
    "data.global_batch_size": 64,
    "eval.every": 0,
}
LOCKSTEP = {"pipeline.engine": "scheduled", "pipeline.schedule": "lockstep_1f1b"}
SPLIT = {
    "pipeline.engine": "scheduled",
    "pipeline.schedule": "lockstep_zb",
    "pipeline.remat_policy": "minimal",
}
NOT_SEARCHED = ("pipeline.fsdp_prefetch", "model.tie_embeddings")
FSDP = {"mesh.ici.tensor": 1, "mesh.ici.fsdp": 2}


@pytest.fixture(scope="module")
def model():
    config = replace(Config(), **SIZES)
    config = update(config, {"model.head_dim": derive_known(config).model.head_dim})
    machine = machine_of("v5p:2x2x2", 1, config)
    shared = shared_config(config, machine)
    return shared, Facts(shared), machine


def probing_of(model, changes):
    shared, facts, machine = model
    usual = {
        "mesh.ici.stage": 4,
        "mesh.ici.fsdp": 1,
        "mesh.ici.tensor": 2,
        "pipeline.num_microbatches": 8,
        "pipeline.num_repeats": 1,
        "pipeline.fsdp_gather": "per_iteration",
    }
    # What a search does not vary is that of all candidates, whose facts these are.
    if given := {key: value for key, value in changes.items() if key in NOT_SEARCHED}:
        facts = Facts(update(shared, given))
    return Probing(update(shared, usual | changes), facts, machine)


def closed_figures(probing, machine):
    """Return the figures that a probe would have if the closed forms of its chunk were right."""
    twin, probe = probing._twin, probing.probe
    units, working = units_of(twin, machine), working_of(twin)
    waits = unit_waits(twin, units, waits_of(twin, machine))
    # Programs of their own hand residuals over; the last one's gather the head, and sum it up.
    handed_over = probe.layers * residual_seconds(twin, machine, twin.residuals)
    head = units.head + head_wait(twin, machine)
    forward = probe.layers * units.forward + waits[0] + handed_over
    gradient = probe.layers * units.input_gradient + waits[1] + handed_over
    weight = probe.layers * units.weight_gradient
    times = {"F": forward, "B": gradient + weight, "I": gradient, "W": weight}
    last = probe.chunks - 1

    def figures(kind, chunk):
        seconds = times[kind] + (head if (kind, chunk) == ("F", last) else 0.0)
        needed = working.unit if chunk != last else np.maximum(working.unit, working.head)
        return UnitFigures(float(np.ravel(seconds)[0]), float(np.ravel(needed)[0]))

    return {name: figures(name[0], int(name[1:])) for name in probe.units}


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline.engine": "sequential", "mesh.ici.stage": 1, "mesh.ici.fsdp": 4},
        {"pipeline.engine": "circular", "pipeline.schedule": "circular"},
        LOCKSTEP,
        SPLIT | {"pipeline.num_repeats": 4},
        LOCKSTEP | FSDP,  # gathers in steps
        LOCKSTEP | FSDP | {"pipeline.fsdp_gather": "once"},
    ],
)
def test_a_probe_that_agrees_with_the_closed_forms_of_its_chunk_changes_nothing(model, changes):
    machine = model[-1]
    probing = probing_of(model, changes)
    figures = closed_figures(probing, machine)
    closed = step_seconds(probing._sizes, machine)
    assert probing.seconds(figures).step == pytest.approx(float(np.ravel(closed.step)[0]))
    memory = float(np.ravel(memory_bytes(probing._sizes))[0])
    assert probing.memory(figures) == pytest.approx(memory)


def test_the_simulator_finds_the_bubble_of_an_mpmd_schedule(model):
    changes = {"pipeline.engine": "mpmd", "pipeline.schedule": "1f1b"}
    probing = probing_of(model, changes)
    layers = probing.probe.layers
    figures = closed_figures(probing, model[-1])
    longer = {
        name: unit._replace(seconds=unit.seconds + {"F": 1.0, "B": 5.0}[name[0]] * layers)
        for name, unit in figures.items()
    }
    times = probing.seconds(longer)
    # A chunk has four layers: 3 forwards before the first backward, 3 backwards after the last.
    assert times.bubble == pytest.approx(3 * 4 * (1.0 + 5.0), rel=0.01)

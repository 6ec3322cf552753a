"""Whether cheap values are computed layer by layer on auto, and what is said about it."""

import itertools

import numpy as np
from helpers.compile_command import tpu_aot
from helpers.engines import make_mesh
from helpers.fsdp_stages import config_of

from maxpipe.builder import build_engine_inputs
from maxpipe.compile.topology import devices_of
from maxpipe.config import ConfigError
from maxpipe.devices.chips import GIB, Tpu
from maxpipe.devices.mesh import build_mesh
from maxpipe.plan.choices import CHEAP as KEY
from maxpipe.plan.choices import computes_cheap_again, with_remat_cheap
from maxpipe.plan.estimate import estimate
from maxpipe.plan.layer_costs import saving_of
from maxpipe.plan.search.block import sizes_of_configuration

SEVERAL = {"model.num_layers": 8}  # four on each of two stages
CIRCULAR = {
    "pipeline.engine": "circular",
    "pipeline.schedule": "circular",
    "pipeline.num_microbatches": 4,
}
MPMD = {"pipeline.engine": "mpmd", "pipeline.schedule": "1f1b"}
V5P = Tpu(95 * GIB, 8)


def decided(tpu, **values):
    """Return (value, notes)."""
    notes = []
    config = with_remat_cheap(config_of(**values), tpu, notes.append)
    return config.pipeline.remat_cheap, notes


def test_auto_holds_cheap_values_where_half_of_a_tpu_is_idle():
    for values in ({}, CIRCULAR):
        value, (note,) = decided(V5P, **SEVERAL | values)
        assert value == "false", values
        assert note.startswith("pipeline.remat_cheap=false: with at most 0.00 GiB of cheap values")
        assert note.endswith("at most 50% of a device's 95 GiB"), values


def test_cheap_values_are_at_least_what_norms_and_gates_make():
    config = config_of(**SEVERAL)
    norms, gate = 2 * config.model.embed_dim, config.model.mlp_dim
    assert saving_of(config).cheap >= norms + gate


def test_auto_computes_cheap_values_again_where_a_step_takes_over_half_of_a_tpu():
    for values in ({}, CIRCULAR):
        memory = 2 * estimate(config_of(**SEVERAL | values), V5P).total
        value, (note,) = decided(V5P._replace(memory=memory), **SEVERAL | values)
        assert value == "true", values
        assert " a step takes over 50% " in note, values


def test_auto_says_nothing_where_there_is_no_choice():
    for values in (
        {"model.num_layers": 2},
        SEVERAL | {"pipeline.remat_layers": True},
        SEVERAL | {"pipeline.remat_iterations": False},
        SEVERAL | {"pipeline.remat_policy": "none"},
        SEVERAL | {"pipeline.scan_layers_per_stage": True},
        SEVERAL | {"pipeline.schedule": "lockstep_zb", "pipeline.remat_policy": "minimal"},
        SEVERAL | MPMD,
    ):
        assert decided(V5P, **values) == ("true", []), values


def test_value_that_is_set_is_taken_by_an_engine_that_reads_it():
    assert decided(None, **SEVERAL) == ("true", [])  # auto, on devices other than TPUs
    for value in ("true", "false"):
        assert decided(V5P, **SEVERAL | {KEY: value}) == (value, [])
        assert decided(None, **SEVERAL | {KEY: value}) == (value, [])
    assert decided(V5P, **SEVERAL | MPMD | {KEY: "false"}) == ("true", [])


def test_closed_forms_compute_cheap_values_again_where_a_run_does():
    """Chunks of one layer and of four, loops, and devices that are full or nearly empty."""
    found = []
    for values, layers, policy, option, memory in itertools.product(
        ({}, CIRCULAR, {"pipeline.schedule": "lockstep_zb"}),
        (2, 8),
        ("full", "minimal", "none"),
        ("pipeline.scan_layers_per_stage", "pipeline.remat_layers", ""),
        (95 * GIB, 2e6),
    ):
        keys = values | {"model.num_layers": layers, "pipeline.remat_policy": policy}
        tpu = Tpu(memory, 8)
        try:
            config = config_of(**keys | ({option: True} if option else {}))
        except ConfigError:  # not every option goes with every policy and schedule
            continue
        sizes = [
            sizes_of_configuration(each, tpu, on_tpus=True)
            for each in (config, with_remat_cheap(config, tpu))
        ]
        again = [float(np.max(computes_cheap_again(each, tpu))) for each in sizes]
        assert again[0] == again[1], (keys, option, memory)
        found.append(again[0])
    assert {*found} == {0.0, 1.0}
    assert len(found) > 50


def test_engines_never_see_auto():
    for values in ({}, CIRCULAR, MPMD):
        config = config_of(**SEVERAL | values)
        inputs = build_engine_inputs(config, make_mesh(config))
        assert inputs.config.remat_cheap == "true", values  # on CPUs


class TestTpu:
    pytestmark = tpu_aot

    def test_engine_for_tpus_holds_cheap_values(self):
        config = config_of(**SEVERAL, **{"compile.topology": "v5p:2x2x2"})
        notes = []
        mesh = build_mesh(config, devices_of(config))
        inputs = build_engine_inputs(config, mesh, note=notes.append)
        assert inputs.config.remat_cheap == "false"
        assert any(note.startswith(f"{KEY}=false: ") for note in notes)

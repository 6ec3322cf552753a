"""What auto decides: how weights and keys are gathered, and which values are computed again."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.compile_command import tpu_aot
from helpers.engines import make_mesh, tiny

from maxpipe.builder import build_engine_inputs
from maxpipe.compile.topology import devices_of
from maxpipe.config import ConfigError
from maxpipe.devices.chips import GIB, Tpu, tpu_of
from maxpipe.devices.mesh import build_mesh
from maxpipe.plan import choices
from maxpipe.plan.choices import (
    CHEAP,
    computes_cheap_again,
    gathers_in_steps,
    with_context_strategy,
    with_gather_mode,
    with_remat_cheap,
)
from maxpipe.plan.estimate import estimate
from maxpipe.plan.search.block import sizes_of_configuration

KEY = choices.GATHER
STRATEGY = choices.CONTEXT_STRATEGY


@dataclass(frozen=True)
class Device:
    """What is asked of a device of a mesh; a TPU v5p unless told otherwise."""

    device_kind: str = "TPU v5p"
    platform: str = "tpu"
    coords: tuple[int, ...] = (0, 0, 0)


V5P = Device()


def config_of(**values):
    words = "engine=scheduled schedule=lockstep_1f1b num_repeats=1 num_microbatches=3"
    return tiny(f"{words} stage=2 fsdp=4 global_batch_size=48", **values)


MPMD = {"pipeline.engine": "mpmd", "pipeline.schedule": "1f1b"}
CIRCULAR = {
    "pipeline.engine": "circular",
    "pipeline.schedule": "circular",
    "pipeline.num_microbatches": 4,
}
REPEATS = CIRCULAR | {"pipeline.num_repeats": 8, "model.num_layers": 16}

SEVERAL = {"model.num_layers": 8}  # four on each of two stages
TPU = Tpu(95 * GIB, 8)


@pytest.fixture
def no_memory_is_idle(monkeypatch):
    monkeypatch.setattr(choices, "IDLE_SHARE", 0.0)


def decided(device=V5P, **values):
    notes = []
    config = with_gather_mode(config_of(**values), tpu_of([device]), notes.append)
    return config.pipeline.fsdp_gather, notes


def test_auto_gathers_whole_weights_on_tpus_and_says_what_they_take():
    """Without split weights, too, where units would prepare them or sum gradients in each."""
    whole = {"mesh.ici.fsdp": 1}
    data, experts = {"mesh.ici.data": 2}, {"mesh.ici.expert": 2, "model.moe.experts": 4}
    for values, mode in (
        ({}, "once"),
        (REPEATS, "per_repeat"),
        (MPMD, "once"),
        (whole | CIRCULAR | data, "per_repeat"),
        (whole | CIRCULAR | {"mesh.ici.context": 2}, "per_repeat"),
        (whole | CIRCULAR | experts, "per_repeat"),
        (whole | REPEATS | data | {"mesh.ici.context": 2}, "per_repeat"),
        (whole | {"mesh.ici.data": 4}, "once"),
        (whole | MPMD | {"model.dtype": "bfloat16"}, "once"),
    ):
        decision, (note,) = decided(**values)
        assert decision == mode, (values, mode)
        assert note.startswith(f"pipeline.fsdp_gather={mode}: {mode} takes 0.00 GiB more")
        assert note.endswith(" GiB of a device's 95 GiB"), (values, mode)


@pytest.mark.usefixtures("no_memory_is_idle")
def test_auto_gathers_per_iteration_where_memory_is_short(monkeypatch):
    for limit, value in (("MEMORY_SHARE", -1.0), ("ROOM", 1e-9)):
        with monkeypatch.context() as context:
            context.setattr(choices, limit, value)
            for values in ({}, CIRCULAR):
                mode, (note,) = decided(**values)
                assert mode == "per_iteration"
                assert note.startswith("pipeline.fsdp_gather=per_iteration: ")
                assert " takes 0.00 GiB more than per_iteration, a step" in note


def more(mode, **values):
    tpu = tpu_of([V5P])
    whole, iteration = (
        estimate(config_of(**values, **{KEY: mode}), tpu).total for mode in (mode, "per_iteration")
    )
    assert whole > iteration
    return (whole - iteration) / tpu.memory


def test_whole_weights_may_take_more_where_half_of_a_device_is_idle(monkeypatch):
    monkeypatch.setattr(choices, "MEMORY_SHARE", 0.5 * more("once"))
    tpu = tpu_of([V5P])
    whole = estimate(config_of(**{KEY: "once"}), tpu).total / tpu.memory
    for share, expected in ((1.01 * whole, "once"), (0.99 * whole, "per_iteration")):
        monkeypatch.setattr(choices, "IDLE_SHARE", share)
        assert decided()[0] == expected


def test_mpmd_prepares_weights_once_within_the_memory_that_its_stages_may_take():
    limit = {"pipeline.memory_limit_gib": 1e-4}
    chosen = {"pipeline.layers_per_stage": [1, 3], "model.num_layers": 4}
    mode, (note,) = decided(**MPMD | limit | chosen)
    assert mode == "per_iteration"
    assert note.endswith("of a device's 0.0001 GiB")
    assert decided(**MPMD | limit)[0] == "once"  # which has no effect without a choice of stages


def test_offloading_keeps_only_one_program_from_weights_that_are_prepared_once():
    offloading = {"pipeline.remat_policy": "minimal_offloaded"}
    assert decided(**MPMD | offloading)[0] == "once"
    assert decided(**CIRCULAR | offloading)[0] == "per_iteration"


@pytest.mark.usefixtures("no_memory_is_idle")
def test_share_of_memory_is_what_whole_weights_take_more(monkeypatch):
    """Of the circular engine in the way that holds less."""

    def chosen(share, **values):
        monkeypatch.setattr(choices, "MEMORY_SHARE", share)
        return decided(**values)[0]

    once = more("once")
    assert (chosen(1.01 * once), chosen(0.99 * once)) == ("once", "per_iteration")
    least = more("per_repeat", **CIRCULAR)
    assert least < more("once", **CIRCULAR)
    assert chosen(1.01 * least, **CIRCULAR) == "per_repeat"
    assert chosen(0.99 * least, **CIRCULAR) == "per_iteration"


def test_auto_is_per_iteration_without_a_word_where_nothing_is_decided():
    for values in (
        {"device": Device("cpu", "cpu")},
        {"device": Device("NVIDIA H100 80GB HBM3", "gpu")},
        {"device": Device("TPU v99")},
        CIRCULAR | {"mesh.ici.fsdp": 1},
        REPEATS | {"mesh.ici.fsdp": 1, "mesh.ici.context": 2},  # XLA sums up once in any mode
        MPMD | {"mesh.ici.fsdp": 1},  # there are no casts
    ):
        assert decided(**values) == ("per_iteration", []), values


def test_auto_is_per_iteration_with_a_reason_where_tpus_do_not_take_whole_weights():
    for values, reason in (
        ({"pipeline.fsdp_prefetch": "true"}, "fsdp_prefetch=true"),
        (CIRCULAR | {"pipeline.remat_policy": "minimal_offloaded"}, "the host's memory"),
    ):
        mode, (note,) = decided(**values)
        assert mode == "per_iteration", (values, reason)
        assert note.startswith("pipeline.fsdp_gather=per_iteration: "), (values, reason)
        assert reason in note, (values, reason)


def test_a_mode_as_told_needs_no_words_and_engines_never_see_auto():
    for mode in ("per_iteration", "once"):
        assert decided(**{KEY: mode}) == (mode, [])
    for values in ({}, CIRCULAR, MPMD):
        config = config_of(**{"mesh.ici.fsdp": 2} | SEVERAL | values)
        assert (config.pipeline.fsdp_gather, config.pipeline.remat_cheap) == ("auto", "auto")
        engine = build_engine_inputs(config, make_mesh(config)).config
        assert (engine.fsdp_gather, engine.remat_cheap) == ("per_iteration", "true")  # on CPUs
    # As which it is estimated until then.
    undecided, iteration = (
        estimate(config_of(**{KEY: m}), None) for m in ("auto", "per_iteration")
    )
    assert undecided == iteration


def in_steps(device=V5P, **values):
    notes = []
    return gathers_in_steps(config_of(**values), tpu_of([device]), notes.append), notes


def test_prefetch_on_auto_is_on_with_short_rings_of_tpus_and_says_so():
    for kind, longest in (("TPU v5p", 8), ("TPU v6 lite", 8), ("TPU v5 lite", 2)):
        for size in (longest, 2 * longest):
            does, (note,) = in_steps(Device(kind), **{"mesh.ici.fsdp": size})
            assert does == (size == longest), (kind, size)
            assert note.startswith(f"pipeline.fsdp_prefetch={str(does).lower()}: "), (kind, size)
            assert f"fsdp has {size} devices, and steps are chosen for up to {longest} " in note


def test_prefetch_is_off_without_a_word_where_nothing_is_decided_about_steps():
    for values in (
        {"device": Device("cpu", "cpu")},
        {"device": Device("TPU v99")},
        {"mesh.ici.fsdp": 1},
        {"pipeline.fsdp_gather": "once"},
        {"pipeline.scan_layers_per_stage": True},
        CIRCULAR,
        {"pipeline.fsdp_prefetch": "false"},
    ):
        values = {"model.num_layers": 4, "pipeline.num_layers_per_stage": 2} | values
        assert in_steps(**values) == (False, []), values
        assert in_steps(**{"pipeline.fsdp_prefetch": "true"}) == (True, []), values


def cheap(tpu, **values):
    notes = []
    config = with_remat_cheap(config_of(**values), tpu, notes.append)
    return config.pipeline.remat_cheap, notes


def test_auto_holds_cheap_values_where_half_of_a_tpu_is_idle():
    for values in ({}, CIRCULAR):
        value, (note,) = cheap(TPU, **SEVERAL | values)
        assert value == "false", values
        assert note.startswith("pipeline.remat_cheap=false: with at most 0.00 GiB of cheap values")
        assert note.endswith("at most 50% of a device's 95 GiB"), values


def test_auto_computes_cheap_values_again_where_a_step_takes_over_half_of_a_tpu():
    for values in ({}, CIRCULAR):
        memory = 2 * estimate(config_of(**SEVERAL | values), TPU).total
        value, (note,) = cheap(TPU._replace(memory=memory), **SEVERAL | values)
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
        assert cheap(TPU, **values) == ("true", []), values


def test_value_that_is_set_is_taken_by_an_engine_that_reads_it():
    assert cheap(None, **SEVERAL) == ("true", [])  # auto, on devices other than TPUs
    for value in ("true", "false"):
        assert cheap(TPU, **SEVERAL | {CHEAP: value}) == (value, [])
        assert cheap(None, **SEVERAL | {CHEAP: value}) == (value, [])
    assert cheap(TPU, **SEVERAL | MPMD | {CHEAP: "false"}) == ("true", [])


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


SEQUENTIAL = {"pipeline.engine": "sequential", "mesh.ici.stage": 1}


def strategy(tpu, **values):
    notes = []
    config = with_context_strategy(config_of(**SEQUENTIAL | values), tpu, notes.append)
    return config.sharding.context_strategy, notes


def test_auto_passes_keys_around_a_ring_where_gathered_they_take_much_of_a_tpu():
    # 4 rows of 4 tokens on the other device, keys and values of 2 heads of 4 channels, gradients.
    taken, parts = 4 * 4 * 2 * 2 * 4 * 2 * 4, {"mesh.ici.context": 2}
    little, much = (Tpu(n * taken, 8) for n in (21, 19))
    assert strategy(little, **parts) == ("gather", [])
    value, (note,) = strategy(much, **parts)
    assert value == "ring"
    assert note.startswith("sharding.context_strategy=ring: keys and values gathered for a micro")
    assert strategy(much, **parts | {"model.attention_sinks": True}) == ("gather", [])
    assert strategy(much, **parts | {STRATEGY: "gather"}) == ("gather", [])
    assert strategy(None, **parts) == ("gather", [])
    assert strategy(None, **parts | {STRATEGY: "ring"}) == ("ring", [])
    assert strategy(much) == ("auto", [])


def test_ring_is_estimated_to_hold_no_keys_of_whole_sequences():
    values = SEQUENTIAL | {"mesh.ici.context": 8, "data.sequence_length": 64}
    gathered, ring = (
        estimate(config_of(**values | {STRATEGY: value}), TPU).total for value in ("gather", "ring")
    )
    part = 4 * 8 * 2 * 2 * 4 * 4  # bytes of a device's keys and values
    assert gathered - ring == 2 * 7 * part


class TestTpu:
    pytestmark = tpu_aot

    def test_engine_gets_the_mode_and_holds_cheap_values(self):
        config = config_of(**SEVERAL, **{"compile.topology": "v5p:2x2x2"})
        notes = []
        mesh = build_mesh(config, devices_of(config))
        inputs = build_engine_inputs(config, mesh, note=notes.append)
        assert (inputs.config.fsdp_gather, inputs.config.remat_cheap) == ("once", "false")
        assert not inputs.gathers_in_steps
        (note,) = (note for note in notes if "fsdp" in note)
        assert note.startswith("pipeline.fsdp_gather=once: ")
        assert any(note.startswith(f"{CHEAP}=false: ") for note in notes)

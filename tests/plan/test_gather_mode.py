"""How often weights are gathered on auto, and what is said about it."""

import pytest
from helpers.compile_command import tpu_aot
from helpers.engines import EngineUnderTest, make_mesh
from helpers.fsdp_stages import V5P, Device, config_of

from maxpipe.builder import build_engine_inputs
from maxpipe.compile.topology import devices_of
from maxpipe.config import ConfigError
from maxpipe.config.options import update
from maxpipe.config.sections.parallelism import DEFAULT_RULES
from maxpipe.devices.chips import tpu_of
from maxpipe.devices.mesh import build_mesh
from maxpipe.plan import choices
from maxpipe.plan.choices import with_gather_mode
from maxpipe.plan.estimate import estimate

KEY = choices.GATHER
MPMD = {"pipeline.engine": "mpmd", "pipeline.schedule": "1f1b"}
CIRCULAR = {
    "pipeline.engine": "circular",
    "pipeline.schedule": "circular",
    "pipeline.num_microbatches": 4,
}
REPEATS = CIRCULAR | {"pipeline.num_repeats": 8, "model.num_layers": 16}


@pytest.fixture
def no_memory_is_idle(monkeypatch):
    """Whole weights may take a small share of a device alone."""
    monkeypatch.setattr(choices, "IDLE_SHARE", 0.0)


def decided(device=V5P, **values):
    """Return (mode, notes)."""
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
        assert note.endswith(" of a device's 95 GiB"), (values, mode)


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
    """Return what a mode takes more than `per_iteration`, as a share of a device's memory."""
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
    """Of the circular engine in the way that holds less, between slices only once a step."""

    def chosen(share, **values):
        monkeypatch.setattr(choices, "MEMORY_SHARE", share)
        return decided(**values)[0]

    once = more("once")
    assert (chosen(1.01 * once), chosen(0.99 * once)) == ("once", "per_iteration")
    # In steps gradients of a whole chunk wait to be sent, in units not.
    in_units = more("once", **{"pipeline.fsdp_prefetch": "false"})
    assert once < in_units
    share = (once + in_units) / 2
    assert chosen(share) == "once"
    assert chosen(share, **{"pipeline.fsdp_prefetch": "false"}) == "per_iteration"
    least = more("per_repeat", **CIRCULAR)
    assert least < more("once", **CIRCULAR)
    assert chosen(1.01 * least, **CIRCULAR) == "per_repeat"
    assert chosen(0.99 * least, **CIRCULAR) == "per_iteration"
    extra = more("once", **REPEATS)
    slices = update(config_of(**REPEATS), {"mesh.ici.fsdp": 2, "mesh.dcn.fsdp": 2})
    for factor, mode in ((1.01, "once"), (0.99, "per_repeat")):
        monkeypatch.setattr(choices, "MEMORY_SHARE", factor * extra)
        assert with_gather_mode(slices, tpu_of([V5P])).pipeline.fsdp_gather == mode


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


def test_auto_takes_no_mode_that_the_circular_engine_refuses_for_its_rules():
    for rule in (
        ["activation_batch", ["data"]],
        ["repeat", ["fsdp"]],
        ["layers_per_stage", ["fsdp"]],
    ):
        rules = [["embed", []], rule, *(r for r in DEFAULT_RULES if r[0] not in ("embed", rule[0]))]
        values = CIRCULAR | {"sharding.logical_axis_rules": rules}
        decision, (note,) = decided(**values)
        assert decision == "per_iteration", rule
        assert note.endswith("sharding.logical_axis_rules do not go with whole weights"), rule
        for mode in ("once", "per_repeat"):
            with pytest.raises(ConfigError, match=f"fsdp_gather={mode} needs "):
                EngineUnderTest(config_of(**values, **{KEY: mode}))


def test_a_mode_as_told_needs_no_words_and_engines_never_see_auto():
    for mode in ("per_iteration", "once"):
        assert decided(**{KEY: mode}) == (mode, [])
    config = config_of(**{"mesh.ici.fsdp": 2})
    assert config.pipeline.fsdp_gather == "auto"
    inputs = build_engine_inputs(config, make_mesh(config))
    assert inputs.config.fsdp_gather == "per_iteration"
    # As which it is estimated until then.
    undecided, iteration = (
        estimate(config_of(**{KEY: m}), None) for m in ("auto", "per_iteration")
    )
    assert undecided == iteration


class TestTpu:
    pytestmark = tpu_aot

    def test_engine_gets_the_mode_and_gathers_nothing_in_steps(self):
        config = config_of(**{"compile.topology": "v5p:2x2x2"})
        notes = []
        mesh = build_mesh(config, devices_of(config))
        inputs = build_engine_inputs(config, mesh, note=notes.append)
        assert inputs.config.fsdp_gather == "once"
        assert not inputs.gathers_in_steps
        (note,) = (note for note in notes if "fsdp" in note)
        assert note.startswith("pipeline.fsdp_gather=once: ")

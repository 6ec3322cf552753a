"""Memory of stages from shapes: what the engine holds, and what passes between its programs."""

import numpy as np
import pytest
from helpers.engines import keys, make_mesh
from helpers.mpmd_programs import two_layers_hand_over
from helpers.programs import shard_bytes

from maxpipe.builder import build_trainer
from maxpipe.config import Config, replace, resolve
from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.engines.mpmd.program import UnitName
from maxpipe.pipeline.schedules.load import build_table, load_schedule
from maxpipe.plan.footprint import microbatch_tokens, on_platform
from maxpipe.plan.layer_costs import saving_of
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.memory import StageMemory
from maxpipe.plan.search.patterns import units_in_flight
from maxpipe.plan.search.pricing import Outcome, priced_blocks
from maxpipe.plan.search.space import Space
from maxpipe.plan.simulate import simulate

FREE_RUNNING = [name for name in SCHEDULES if "mpmd" in SCHEDULES[name].engines]


def test_as_many_units_are_in_flight_as_the_simulator_says():
    for S, M, V in ((2, 3, 1), (4, 9, 1), (3, 8, 2)):
        for name in FREE_RUNNING:
            table = load_schedule(name, S, M, SCHEDULES[name].repeats_for(V))
            counts = units_in_flight(table)
            peaks = simulate(table).peak_in_flight.tolist()
            assert [stage.sum(axis=1).max() for stage in counts] == peaks
            assert all(stage.min() >= 0 for stage in counts), (S, M)
            late = any(stage[:, table.num_repeats :].any() for stage in counts)
            assert late == ("W" in table.kinds)


TWO_STAGES = {"pipeline.schedule": "1f1b", "mesh.ici.stage": 2}


def config_of(**values):
    small = keys(
        "embed_dim=64 mlp_dim=192 num_query_heads=4 num_kv_heads=2 vocab_size=512 "
        "sequence_length=16 global_batch_size=16 engine=mpmd num_microbatches=4"
    )
    return resolve(replace(Config(), **small | {"eval.every": 0} | values), 8)


def trainer_of(**values):
    config = config_of(**values)
    return config, build_trainer(config, make_mesh(config))


@pytest.mark.parametrize(
    ("tied", "gather"), [(False, "per_iteration"), (True, "per_iteration"), (True, "once")]
)
def test_parameters_optimizer_and_gradients_are_those_of_the_engine(tied, gather):
    values = {"model.num_layers": 5, "pipeline.layers_per_stage": [3, 2], "mesh.ici.tensor": 2}
    values |= {"model.tie_embeddings": tied, "pipeline.fsdp_gather": gather}
    config, trainer = trainer_of(**values, **TWO_STAGES, **{"mesh.ici.fsdp": 2})
    memory = StageMemory(config, build_table(config))
    for stage, owned in enumerate(trainer.engine.abstract):
        # Parameters, their gradients and two moments, all of them float32.
        state = shard_bytes(owned) * 4
        if tied and stage == 1:  # a copy, and its gradient
            state += 2 * shard_bytes(trainer.engine.abstract[0]["embed"])
        if gather == "once":
            # The gathered weights, and whole sums of gradients instead of halves.
            copied = shard_bytes(trainer.engine.abstract[0]["embed"]) if stage == 1 else 0
            state += 3 * (shard_bytes(owned) + copied)
        # Norms are on every device.
        assert memory.state_bytes(stage, [3, 2][stage]) == pytest.approx(state, rel=0.02)


def test_weights_that_are_cast_once_a_step_are_there_in_both_dtypes():
    values = {"mesh.ici.data": 4, "model.dtype": "bfloat16", "pipeline.fsdp_gather": "once"}
    config, trainer = trainer_of(**TWO_STAGES, **values)
    table = build_table(config)
    plain = replace(config, **{"pipeline.fsdp_gather": "per_iteration"})
    for stage, layers in enumerate(map(len, trainer.engine.layer_index())):
        inputs, _ = trainer.engine.training.runner.gathers[stage]
        each, once = (StageMemory(c, table).state_bytes(stage, layers) for c in (plain, config))
        assert once - each == pytest.approx(sum(2 * v.aval.size for v in inputs), rel=0.02)


@pytest.mark.parametrize(
    ("policy", "keeps", "dtype"),
    [("full", 0.01, "float32"), ("minimal", 0.01, "bfloat16"), ("none", 0.2, "float32")],
)
def test_what_units_keep_is_what_their_programs_hand_over(policy, keeps, dtype):
    """Two more layers cost this much; what norms of bfloat16 models keep is known less exactly."""
    values = {"model.num_layers": 6, "model.dtype": dtype, "pipeline.schedule": "zb_h1"}
    values |= {"mesh.ici.stage": 4, "mesh.ici.fsdp": 2, "pipeline.remat_policy": policy}
    config, trainer = trainer_of(**values, **{"pipeline.layers_per_stage": [1, 1, 3, 1]})
    # Bytes of a device's rows of a microbatch.
    column = 2 * 16 * (4 if dtype == "float32" else 2)
    forward, late = two_layers_hand_over(trainer)
    assert saving_of(config).residuals == pytest.approx(forward / 2 / column, rel=keeps)
    assert saving_of(config).handed_over == pytest.approx(late / 2 / column, rel=0.15)


def test_offloaded_residuals_are_on_the_device_for_two_units_of_those_in_flight():
    values = {"model.num_layers": 8, "pipeline.schedule": "1f1b", "pipeline.num_microbatches": 8}
    values |= {"mesh.ici.stage": 4, "mesh.ici.fsdp": 2}
    plain = config_of(**values, **{"pipeline.remat_policy": "minimal"})
    config, trainer = trainer_of(**values, **{"pipeline.remat_policy": "minimal_offloaded"})
    on_device, on_host = (StageMemory(c, build_table(c)) for c in (plain, config))
    moved = trainer.engine.training.runner.executables[UnitName("F", 0)].moved
    column = microbatch_tokens(config) * 4
    residuals = 2 * saving_of(config).offloaded * column
    # The backward of a sum does not look at its last term, the output of the chunk's last MLP.
    last = config.model.embed_dim * column
    assert sum(v.aval.size * 4 for v in moved) == pytest.approx(residuals - last)
    for stage, in_flight in enumerate((4, 3, 2, 1)):
        difference = on_device.bytes(stage, [2]) - on_host.bytes(stage, [2])
        assert difference == pytest.approx((in_flight - 2) * residuals)


SIZES = keys(
    "num_layers=16 embed_dim=64 num_query_heads=8 num_kv_heads=4 head_dim=8 mlp_dim=256 "
    "vocab_size=512 sequence_length=64 global_batch_size=32"
) | {"eval.every": 0, "compile.topology": "v5p:2x2x2"}
MIXTURE = {"model.moe.experts": 4, "model.moe.per_token": 2, "model.moe.mlp_dim": 64}
FIRST = MIXTURE | {"model.num_layers": 18, "model.first_dense_layers": 2}


def drawn(config, facts):
    machine, draw = machine_of("v5p:2x2x2", 1, config), np.random.default_rng(7)
    space = Space(config, 8, 1, {"pipeline.engine": ["mpmd"]})
    for priced in priced_blocks(space, machine, facts, [32], Outcome()):
        (candidate,) = priced.candidates([draw.integers(len(priced.block))], facts)
        chunks = candidate.grid.size("stage") * candidate.repeats
        if config.model.stacked_layers % chunks == 0:
            yield candidate


def by_table(candidate, config):
    resolved = resolve(candidate.config(config), 8, 1)
    resolved = on_platform(resolved, "tpu")
    memory = StageMemory(resolved, build_table(resolved), on_tpus=True)
    stages = candidate.grid.size("stage")
    layers = config.model.stacked_layers // (stages * candidate.repeats)
    return max(memory.bytes(stage, [layers] * candidate.repeats) for stage in range(stages))


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    [
        ({"model.dtype": "bfloat16", "model.tie_embeddings": True}, 0.01),
        pytest.param(FIRST, 0.06, marks=pytest.mark.slow),
    ],
)
def test_memory_of_mpmd_is_that_of_the_fullest_stage(keys, tolerance):
    """But for the moments of different stages that are taken together."""
    config = replace(Config(), **SIZES | keys)
    facts = Facts(config)
    schedules = set()
    for candidate in drawn(config, facts):
        expected = by_table(candidate, config)
        assert candidate.memory == pytest.approx(expected, rel=tolerance), candidate.updates()
        schedules.add(candidate.schedule)
    assert {"gpipe", "1f1b", "interleaved_zb", "zb_h2", "zb_v", "dualpipe_v"} <= schedules

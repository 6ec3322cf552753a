"""The filters of the search agree with the configuration's own checks."""

import itertools
import random

import pytest
from helpers.engines import keys

from maxpipe.config import Config, ConfigError, replace, resolve
from maxpipe.plan.number import Seconds
from maxpipe.plan.search.block import block_of
from maxpipe.plan.search.candidate import candidate_of
from maxpipe.plan.search.legality import Legality, layout_of
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.pricing import Outcome, only_legal
from maxpipe.plan.search.space import MOST_UNROLLED, SCANS, Space

SEED = 19
SIZES = keys(
    "num_layers=12 embed_dim=64 num_query_heads=8 num_kv_heads=4 head_dim=8 mlp_dim=128 "
    "sequence_length=48 global_batch_size=48"
) | {"eval.every": 0}
# Values that are often illegal, next to those that the search tries by itself.
CHOICES = {
    "pipeline.num_microbatches": [1, 2, 3, 4, 5, 6, 8, 12, 16],
    "pipeline.num_repeats": [1, 2, 3, 4, 5],
    "pipeline.remat_policy": ["full", "minimal", "none", "minimal_offloaded", "save_qkv_proj"],
}


def candidates(config, topology, slices, seed):
    """Yield (candidate, whether the filter finds it legal), drawn at random from the product."""
    machine = machine_of(topology, slices, config)
    space = Space(config, machine.devices, slices, CHOICES, is_tpu=True)
    legality, draw = Legality(config), random.Random(seed)
    blocks = [
        (grid, engine, schedule, scans)
        for grid in space.grids()
        for engine, schedule in space.pipelines(grid.size("stage"))
        for scans in space.scans(engine)
    ]
    masks = {}
    while True:
        grid, engine, schedule, scans = key = draw.choice(blocks)
        if key not in masks:
            block = block_of(space, grid, engine, schedule, 48, scans=scans)
            legal = only_legal(block, legality, Outcome().fallen)
            kept = set() if legality.of_mesh(grid) else {*options(legal)}
            masks[key] = block, [option in kept for option in options(block)]
        block, mask = masks[key]
        place = draw.randrange(len(block))
        layers = config.model.stacked_layers
        yield candidate_of(block, place, layers, 0.0, Seconds(0.0, 0.0, 0.0)), mask[place]


def options(block):
    columns = (block.microbatches, block.repeats, block.policy, block.gather, block.tiles)
    return [*zip(*(column.tolist() for column in columns), strict=True)]


EXPERTS = {"model.moe.experts": 4, "model.moe.per_token": 2, "model.moe.mlp_dim": 32}


@pytest.mark.parametrize(
    ("count", "topology", "slices", "overrides"),
    [
        (400, "cpu:12", 1, {}),
        (300, "cpu:12", 1, {"pipeline.delay_activation_forwarding": True}),
        (300, "cpu:12", 1, EXPERTS | {"model.first_dense_layers": 2, "model.num_layers": 14}),
        (300, "v6e:2x2", 3, EXPERTS),
    ],
)
def test_random_candidates_pass_the_filter_exactly_if_they_pass_the_checks(
    count, topology, slices, overrides
):
    config = replace(Config(), **(SIZES | overrides))
    outcomes = []
    drawn = candidates(config, topology, slices, SEED)
    for candidate, is_legal in itertools.islice(drawn, count):
        try:
            resolve(candidate.config(config), 12, slices)
            passes, why = True, ""
        except ConfigError as error:
            passes, why = False, str(error)
        assert passes == is_legal, f"seed {SEED}: {candidate.updates()}: {why}"
        outcomes.append(passes)
    assert 20 < sum(outcomes) < count - 20  # both kinds are drawn


def test_a_batch_of_evaluations_that_the_devices_do_not_divide_is_a_reason_of_its_own():
    sizes = SIZES | {"eval.every": 10, "eval.global_batch_size": 3}
    config = replace(Config(), **sizes)
    legality, space = Legality(config), Space(config, 4, 1, {})
    reason = "eval.global_batch_size: no multiple of the devices that divide it"
    for grid in (grid for grid in space.grids() if grid.size("stage") == 1):
        fallen = Outcome().fallen
        block = block_of(space, grid, "sequential", "gpipe", 48)
        assert bool(len(only_legal(block, legality, fallen))) == (grid.batch_shards == 1)
        assert [*fallen] == [reason] * (grid.batch_shards > 1)


def test_layers_that_do_not_divide_run_outside_or_uneven_by_engine():
    assert layout_of("scheduled", 126, 8, 3).updates(126)["pipeline.parallel_layers"] == 120
    assert layout_of("mpmd", 126, 8, 1).is_uneven
    assert layout_of("mpmd", 126, 8, 16).chunk == 0
    assert layout_of("scheduled", 4, 8, 1).chunk == 0


def test_layers_are_unrolled_on_tpus_where_they_are_few_or_where_it_is_asked_for():
    for is_tpu, layers, choices, tried in (
        (True, MOST_UNROLLED, {}, [True, False]),
        (True, MOST_UNROLLED + 1, {}, [True]),
        (False, 8, {}, [True]),
        (False, MOST_UNROLLED + 1, {SCANS: [False]}, [False]),
    ):
        space = Space(replace(Config(), **{"model.num_layers": layers}), 4, 1, choices, is_tpu)
        assert space.scans("sequential") == tried, (is_tpu, layers)
        assert space.scans("scheduled") == [True], "it takes no other value"


def test_unkept_names_the_fixed_key_that_an_engine_or_a_schedule_cannot_have():
    config = replace(Config(), **{"model.num_layers": 8, "pipeline.num_repeats": 1})
    for key, value, engine, schedule, kept in (
        ("pipeline.schedule", "lockstep_1f1b", "sequential", "circular", False),
        ("pipeline.schedule", "lockstep_1f1b", "scheduled", "lockstep_1f1b", True),
        ("pipeline.num_repeats", 4, "sequential", "circular", False),
        ("pipeline.num_repeats", 1, "sequential", "circular", True),
        ("pipeline.num_repeats", 4, "mpmd", "1f1b", False),
        ("pipeline.fsdp_gather", "once", "sequential", "circular", False),
        ("pipeline.scan_layers", False, "circular", "circular", False),
    ):
        fixed, tried = (Space(config, 4, 1, {key: [value]}, fixed=f) for f in ((key,), ()))
        unkept = f"--fix {key}: not for {schedule if engine != 'sequential' else engine}"
        assert fixed.unkept(engine, schedule) == ("" if kept else unkept)
        assert tried.unkept(engine, schedule) == ""
    choices = {"pipeline.num_repeats": [4]}
    assert Space(config, 4, 1, choices, fixed=(*choices,)).repeats("1f1b", 2) == [1]
    assert Space(config, 4, 1, choices).repeats("1f1b", 2) == []

"""Every schedule of the mpmd engine: gradients of one device, units in its order."""

from operator import itemgetter

import pytest
from helpers.engines import MpmdUnderTest, assert_same, make_batch, reference, tiny

from maxpipe.config.catalog import SCHEDULES

STAGES, CHUNKS, MICROBATCHES = 2, 4, 5
ROWS = 2 * MICROBATCHES
NAMES = [name for name, schedule in SCHEDULES.items() if "mpmd" in schedule.engines]
# One chunk and several, whole and split backwards, stages in a loop and in a V.
FIRST = ("1f1b", "interleaved_1f1b", "zb_h1", "zb_v")
MARKED = [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.slow]) for n in NAMES]


def config_of(name):
    repeats = SCHEDULES[name].repeats_for(CHUNKS // STAGES)
    return tiny(
        f"engine=mpmd schedule={name} num_repeats={repeats} num_microbatches={MICROBATCHES} "
        f"num_layers={CHUNKS} remat_policy=minimal tie_embeddings=true stage={STAGES} "
        f"global_batch_size={ROWS}"
    )


def units_of(table, stage):
    units = []
    for kind in table.kinds:
        halves = ("I", "W") if kind == "B" and "W" in table.kinds else (kind,)
        for tick, s, microbatch, chunk in zip(*table.units(kind), strict=True):
            if s == stage:
                name = int(table.global_chunk(chunk, s))
                units += [(int(tick), ((half, name), int(microbatch))) for half in halves]
    return [unit for _, unit in sorted(units, key=itemgetter(0))]


@pytest.mark.parametrize("name", MARKED)
def test_schedule_on_the_mpmd_engine_equals_one_device_in_the_order_of_its_table(name):
    config = config_of(name)
    mpmd, ran = MpmdUnderTest(config), [[] for _ in range(STAGES)]

    def observe(stage, unit, microbatch):
        ran[stage].append((tuple(unit), microbatch))

    assert_same(mpmd.train(make_batch(ROWS), observe=observe), reference(config.model, ROWS))
    assert ran == [units_of(mpmd.engine.table, stage) for stage in range(STAGES)]

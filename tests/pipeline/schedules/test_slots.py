import numpy as np
import pytest
from helpers.random_tables import tables
from hypothesis import given

from maxpipe.config.catalog import SCHEDULES
from maxpipe.pipeline.schedules.load import load_schedule
from maxpipe.pipeline.schedules.slots import activation_slots
from maxpipe.pipeline.schedules.table import forward_only
from maxpipe.plan.simulate import simulate


@given(tables())
def test_slots_of_a_random_table_are_disjoint_and_none_is_spare(table):
    slots = activation_slots(table)
    for store in (slots.activations, slots.gradients, slots.residuals, slots.stash):
        owners = np.zeros((table.num_ticks, table.num_stages, store.size), int)
        for stage, first, last, slot in zip(
            store.stage, store.first, store.last, store.slot, strict=True
        ):
            owners[first : last + 1, stage, slot] += 1
        assert owners.max(initial=0) <= 1
        assert owners.sum(2).max(0).tolist() == store.peak.tolist()
        assert store.size == store.peak.max()


@given(tables())
def test_slots_of_a_random_table_hold_every_value_in_flight(table):
    slots = activation_slots(table)
    units = table.num_microbatches * table.num_chunks
    assert len(slots.residuals.slot) == units
    assert len(slots.stash.slot) == (units if "W" in table.kinds else 0)
    assert len(slots.activations.slot) == units - table.num_microbatches
    from_head = slots.gradients.global_chunk == table.num_chunks - 1
    same_tick = (table.ticks["F"][:, -1] == table.merged_ticks("BI")[:, -1]).sum()
    assert from_head.sum() == table.num_microbatches - same_tick
    assert (~from_head).sum() == units - table.num_microbatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_slots_of_residuals_and_stash_are_the_simulated_peaks(name):
    schedule = SCHEDULES[name]
    for S, M, V in ((1, 3, 1), (2, 5, 1), (4, 8, 2), (4, 11, 3), (5, 3, 2)):
        table = load_schedule(name, S, M, schedule.repeats_for(V))
        slots, run = activation_slots(table), simulate(table)
        assert slots.residuals.peak.tolist() == run.peak_in_flight.tolist()
        assert slots.stash.peak.tolist() == run.peak_stash.tolist()


def test_slots_of_gradients_of_the_head_live_from_the_tick_after_it():
    table = load_schedule("lockstep_1f1b", 2, 3, slack=1)
    gradients = activation_slots(table).gradients
    from_head = gradients.global_chunk == 1
    assert gradients.first[from_head].tolist() == (table.ticks["F"][:, 1] + 1).tolist()
    assert gradients.last[from_head].tolist() == table.ticks["B"][:, 1].tolist()


def test_slots_of_a_forward_table_have_no_residuals():
    slots = activation_slots(forward_only(load_schedule("circular", 4, 8, 2)))
    assert slots.residuals.size == slots.gradients.size == slots.stash.size == 0
    assert slots.activations.size == 5

"""What a step moves through memory: residuals, copies of weights, sums of gradients and zeros."""

import numpy as np
import pytest
from helpers.plan_blocks import sizes_of

from maxpipe.config import Config
from maxpipe.planning.search.machine import machine_of
from maxpipe.planning.search.memory import kept_columns
from maxpipe.planning.search.traffic import layer_traffic, once_seconds

MACHINE = machine_of("v5p:2x2x2", 1, Config())
WIDE = MACHINE.stream_rate(4)


def traffic_of(sizes, stored=0.0):
    """Return what a layer moves."""
    return layer_traffic(sizes, MACHINE, sizes.parameters, sizes.layer.key_values, stored)


def value(numbers):
    """Return the first of a block's numbers."""
    return float(np.asarray(numbers).reshape(-1)[0])


def copy_seconds(sizes):
    """Return how long the weights of a layer take to read and write once."""
    bytes_of = 2 * sizes.itemsize * sizes.parameters.layer_at_rest
    return bytes_of / MACHINE.stream_rate(sizes.itemsize)


@pytest.mark.parametrize("engine", ["scheduled", "mpmd"])
def test_residuals_are_written_to_a_store_and_copied_out_of_it_in_one_program(engine):
    schedule = {"scheduled": "lockstep_1f1b", "mpmd": "1f1b"}[engine]
    sizes = sizes_of(engine, schedule, remat_policy=["none"])
    traffic = traffic_of(sizes, stored=100.0)
    each = sizes.itemsize * sizes.tokens * 100.0 / MACHINE.stream_rate(sizes.itemsize)
    expected = value(each) if engine == "scheduled" else 0.0
    assert value(traffic.written) == pytest.approx(expected)
    assert value(traffic.read) == pytest.approx(2 * expected)


@pytest.mark.parametrize(
    ("repeats", "layers", "scan", "copies"),
    [(1, 4, False, 0), (2, 8, True, 1), (1, 8, True, 0), (1, 8, False, 1), (2, 16, False, 2)],
)
def test_circular_copies_a_chunk_out_of_its_stage_and_layers_out_of_a_chunk(
    repeats, layers, scan, copies
):
    fixed = {"model.num_layers": layers, "pipeline.scan_layers_per_stage": scan}
    choices = {"num_repeats": [repeats], "fsdp_gather": ["per_iteration"]}
    sizes = sizes_of("circular", "circular", fixed=fixed, **choices)
    traffic = traffic_of(sizes)
    assert value(traffic.forward) == pytest.approx(copies * copy_seconds(sizes))
    assert value(traffic.backward) == pytest.approx(copies * copy_seconds(sizes))


def test_sequential_backward_reads_weights_from_a_copy():
    sizes = sizes_of("sequential", "", mesh={"stage": 1})
    traffic = traffic_of(sizes)
    assert value(traffic.forward) == 0
    assert value(traffic.backward) == pytest.approx(copy_seconds(sizes))


def test_sequential_with_unrolled_layers_reads_weights_in_place():
    sizes = sizes_of("sequential", "", mesh={"stage": 1}, scan_layers=[False])
    assert value(traffic_of(sizes).backward) == 0


def test_keys_are_put_in_order_where_a_sequence_is_split():
    whole = sizes_of("sequential", "", mesh={"stage": 1})
    split = sizes_of("sequential", "", mesh={"stage": 1, "data": 1, "context": 2})
    assert value(traffic_of(whole).keys) == 0
    sequence = split.itemsize * split.tokens * 2 * split.layer.key_values
    expected = 4 * value(sequence) / MACHINE.stream_rate(split.itemsize)
    assert value(traffic_of(split).keys) == pytest.approx(expected)


def test_sequential_sums_gradients_of_several_microbatches_from_zeros():
    sizes = sizes_of("sequential", "", mesh={"stage": 1}, num_microbatches=[1, 2, 4])
    one, two, four = np.broadcast_to(once_seconds(sizes, MACHINE), (3, 1, 1, 1, 1)).reshape(-1)
    parameters = sizes.parameters.at_rest
    zeros, sums = parameters / MACHINE.zeros_rate, 12 * parameters / WIDE
    assert four - two == pytest.approx(2 * (sums + zeros))
    assert two - one == pytest.approx(2 * sums + 2 * zeros)


def test_stores_of_a_lockstep_engine_begin_with_zeros():
    choices = {"num_microbatches": [8], "remat_policy": ["minimal", "none"]}
    sizes = sizes_of("scheduled", "lockstep_1f1b", **choices)
    less, more = np.ravel(once_seconds(sizes, MACHINE)[..., 0, 0])
    fewer, many = np.ravel((sizes.tokens * kept_columns(sizes))[..., 0, 0])
    assert many > fewer
    assert more - less == pytest.approx((many - fewer) / MACHINE.zeros_rate)

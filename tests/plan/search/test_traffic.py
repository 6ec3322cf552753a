"""What a step moves through memory: residuals, copies of weights, sums of gradients and zeros."""

import numpy as np
import pytest
from helpers.plan_blocks import sizes_of

from maxpipe.config import Config
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.memory import kept_columns
from maxpipe.plan.search.traffic import layer_traffic, once_seconds

MACHINE = machine_of("v5p:2x2x2", 1, Config())
WIDE = MACHINE.stream_rate(4)


def traffic_of(sizes, stored=0.0):
    """Return what a layer moves."""
    return layer_traffic(sizes, MACHINE, sizes.parameters, sizes.layer, stored)


def value(numbers):
    """Return the first of a block's numbers."""
    return float(np.asarray(numbers).reshape(-1)[0])


def copy_seconds(sizes):
    """Return how long the weights of a layer take to read and write once."""
    bytes_of = 2 * sizes.itemsize * sizes.parameters.layer_at_rest
    return bytes_of / MACHINE.stream_rate(sizes.itemsize)


def test_residuals_are_written_to_a_store_and_copied_out_of_it_in_one_program():
    for engine in ("scheduled", "mpmd"):
        schedule = {"scheduled": "lockstep_1f1b", "mpmd": "1f1b"}[engine]
        sizes = sizes_of(engine, schedule, remat_policy=["none"])
        traffic = traffic_of(sizes, stored=100.0)
        each = sizes.itemsize * sizes.tokens * 100.0 / MACHINE.stream_rate(sizes.itemsize)
        expected = value(each) if engine == "scheduled" else 0.0
        assert value(traffic.written) == pytest.approx(expected), engine
        assert value(traffic.read) == pytest.approx(2 * expected), engine


def test_what_a_weight_gradient_needs_goes_through_a_store_in_one_program():
    for engine, schedule, is_stored in (
        ("scheduled", "lockstep_zb", 1),
        ("scheduled", "lockstep_1f1b", 0),
        ("mpmd", "zb_h1", 0),
    ):
        sizes = sizes_of(engine, schedule)
        traffic = traffic_of(sizes)
        each = (
            sizes.itemsize * sizes.tokens * sizes.saving.stash / MACHINE.stream_rate(sizes.itemsize)
        )
        assert value(each) > 0, (engine, schedule)
        assert value(traffic.stashed) == pytest.approx(is_stored * value(each)), (engine, schedule)
        assert value(traffic.unstashed) == pytest.approx(2 * is_stored * value(each))


def test_lockstep_casts_weights_where_they_are_gathered():
    for fsdp, is_cast in ((1, 0), (2, 1)):
        mesh = {"data": 1, "fsdp": fsdp}
        choices = {"mesh": mesh, "fsdp_gather": ["per_iteration"]}
        sizes = sizes_of("scheduled", "lockstep_1f1b", fixed={"model.dtype": "bfloat16"}, **choices)
        gathered = sizes.itemsize * sizes.parameters.layer_gathered * is_cast
        cast = is_cast * (4 + sizes.itemsize) * sizes.parameters.layer_at_rest / WIDE
        expected = gathered / MACHINE.stream_rate(sizes.itemsize) + cast
        assert value(traffic_of(sizes).forward) == pytest.approx(expected), (fsdp, is_cast)


def test_lockstep_casts_whole_layers_once_a_step_in_either_mode():
    def once(gather, stored):
        choices = {"mesh": {"data": 1, "fsdp": 1}, "fsdp_gather": [gather]}
        fixed = {"model.dtype": "bfloat16", "model.param_dtype": stored}
        sizes = sizes_of("scheduled", "lockstep_1f1b", fixed=fixed, **choices)
        return value(once_seconds(sizes, MACHINE)), sizes.parameters.at_rest

    wide, count = once("per_iteration", "float32")
    assert wide == once("once", "float32")[0]
    # Weights of the activations' dtype are not cast; those of the step before are read and written.
    narrow, _ = once("per_iteration", "bfloat16")
    assert narrow == once("once", "bfloat16")[0]
    assert wide - narrow == pytest.approx(((4 + 2) + 2 * (4 - 2)) * count / WIDE)


def test_units_of_mpmd_read_wide_weights_unless_they_are_cast_once_a_step():
    for gather, is_wide in (("per_iteration", 1), ("once", 0)):
        choices = {"mesh": {"data": 1, "fsdp": 1}, "fsdp_gather": [gather]}
        sizes = sizes_of("mpmd", "1f1b", fixed={"model.dtype": "bfloat16"}, **choices)
        wider = (4 - sizes.itemsize) * sizes.parameters.layer_at_rest / WIDE
        traffic = traffic_of(sizes)
        assert value(traffic.forward) == pytest.approx(is_wide * wider), (gather, is_wide)
        assert value(traffic.backward) == pytest.approx(is_wide * wider), (gather, is_wide)
        cast = (4 + sizes.itemsize) * sizes.parameters.at_rest / WIDE
        without = sizes_of(
            "mpmd",
            "1f1b",
            fixed={"model.dtype": "bfloat16"},
            **choices | {"fsdp_gather": ["per_iteration"]},
        )
        more = value(once_seconds(sizes, MACHINE)) - value(once_seconds(without, MACHINE))
        assert more == pytest.approx((1 - is_wide) * cast), (gather, is_wide)


def test_lockstep_adds_gradients_to_their_sums_where_they_are_made():
    sizes = sizes_of("scheduled", "lockstep_1f1b", fsdp_gather=["once"])
    expected = 8 * sizes.parameters.layer_gathered / WIDE  # a sum is read and written
    assert value(traffic_of(sizes).gradients) == pytest.approx(expected)


def test_residuals_of_layers_without_stages_are_in_a_store_where_they_are_a_loop():
    for scans in (True, False):
        choices = {"scan_layers": [scans], "remat_policy": ["none"]}
        traffic = traffic_of(sizes_of("sequential", "", mesh={"stage": 1}, **choices), stored=100.0)
        assert (value(traffic.written) > 0) == (value(traffic.read) > 0) == scans, scans


def test_circular_copies_a_chunk_out_of_its_stage_and_layers_out_of_a_chunk():
    for repeats, layers, scan, copies in (
        (1, 4, False, 0),
        (2, 8, True, 1),
        (1, 8, True, 0),
        (1, 8, False, 1),
        (2, 16, False, 2),
    ):
        fixed = {"model.num_layers": layers, "pipeline.scan_layers_per_stage": scan}
        choices = {"num_repeats": [repeats], "fsdp_gather": ["per_iteration"]}
        sizes = sizes_of("circular", "circular", fixed=fixed, **choices)
        traffic = traffic_of(sizes)
        assert value(traffic.forward) == pytest.approx(copies * copy_seconds(sizes))
        assert value(traffic.backward) == pytest.approx(copies * copy_seconds(sizes))


def test_sequential_reads_whole_weights_in_place():
    for scans in (True, False):
        traffic = traffic_of(sizes_of("sequential", "", mesh={"stage": 1}, scan_layers=[scans]))
        assert (value(traffic.forward), value(traffic.backward)) == (0, 0), scans


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


def test_gradients_of_unrolled_layers_go_from_products_to_the_sums_over_microbatches():
    choices = {"scan_layers": [False], "num_microbatches": [1, 2, 4]}
    sizes = sizes_of("sequential", "", mesh={"stage": 1}, **choices)
    one, two, four = np.broadcast_to(once_seconds(sizes, MACHINE), (3, 1, 1, 1, 1)).reshape(-1)
    parameters = sizes.parameters.at_rest
    zeros, sums = parameters / MACHINE.zeros_rate, 12 * parameters / WIDE
    assert four - two == pytest.approx(2 * sums)
    assert two - one == pytest.approx(2 * sums + zeros)
    gradients = np.broadcast_to(traffic_of(sizes).gradients, (3, 1, 1, 1, 1)).reshape(-1)
    assert gradients[0] > 0 == gradients[1] == gradients[2]


def test_stores_begin_with_zeros_where_the_partitioner_splits_them():
    for engine, schedule, gather, filled in (
        ("scheduled", "lockstep_1f1b", "per_iteration", True),
        ("circular", "circular", "once", True),
        ("circular", "circular", "per_iteration", False),
    ):
        choices = {"num_microbatches": [8], "remat_policy": ["full", "minimal"]}
        for tensor in (1, 2):
            mesh = {"data": 2, "stage": 2, "tensor": tensor}
            sizes = sizes_of(engine, schedule, mesh=mesh, fsdp_gather=[gather], **choices)
            seconds = np.broadcast_to(once_seconds(sizes, MACHINE), (1, 1, 2, 1, 1))
            less, more = np.ravel(seconds)
            fewer, many = np.ravel((sizes.tokens * kept_columns(sizes))[..., 0, 0])
            assert many > fewer, (engine, schedule)
            zeros = filled * (tensor > 1) * (many - fewer) / MACHINE.zeros_rate
            assert more - less == pytest.approx(zeros), (engine, schedule)


def test_circular_selects_weights_and_sums_of_gradients_in_switches():
    def of_step(repeats, gather):
        choices = {"num_repeats": [repeats], "fsdp_gather": [gather]}
        sizes = sizes_of("circular", "circular", mesh={"stage": 4, "data": 2}, **choices)
        return sizes, value(once_seconds(sizes, MACHINE))

    sizes, seconds = of_step(2, "once")
    switched = seconds - of_step(2, "per_iteration")[1]
    weights = value(sizes.layers) * sizes.parameters.layer_gathered
    each = 6 * sizes.itemsize / MACHINE.stream_rate(sizes.itemsize) + 12 / WIDE
    assert switched == pytest.approx(3 * weights * each)  # S - 1 iterations
    assert of_step(1, "once")[1] == pytest.approx(of_step(1, "per_iteration")[1])


EXPERTS = {"model.moe.experts": 4, "model.moe.per_token": 2, "model.moe.mlp_dim": 64}


def test_rows_of_experts_are_brought_into_order():
    sizes = sizes_of("scheduled", "lockstep_1f1b", fixed=EXPERTS)
    assert value(traffic_of(sizes_of("scheduled", "lockstep_1f1b")).rows) == 0
    assert sizes.layer.expert_flops == 2 * 2 * 3 * 64 * 64  # FLOPs, of a token, matrices
    # Rows, those of tokens again, and the weight of each.
    assert sizes.layer.rows == pytest.approx(2 * (64 + 64 + 1), rel=0.01)
    rows = sizes.itemsize * sizes.tokens * sizes.layer.rows / MACHINE.stream_rate(sizes.itemsize)
    traffic = traffic_of(sizes)
    assert value(traffic.row_gradients) > 2 * value(traffic.rows) > 2 * value(rows)
    # With another device it has those of twice as many tokens, and a free one.
    shared = sizes_of("scheduled", "lockstep_1f1b", fixed=EXPERTS, mesh={"data": 1, "expert": 2})
    assert shared.layer.rows == pytest.approx(2 * sizes.layer.rows, rel=0.1)


def test_experts_are_copied_unless_they_are_those_of_a_single_layer():
    for fsdp, layers, repeats, copies in (
        (1, 4, 1, 0),
        (1, 8, 1, 1),
        (1, 8, 2, 1),
        (2, 8, 2, 0),
        (2, 16, 2, 1),
    ):
        sizes = sizes_of(
            "scheduled",
            "lockstep_1f1b",
            mesh={"data": 1, "fsdp": fsdp},
            fixed=EXPERTS | {"model.num_layers": layers},
            num_repeats=[repeats],
            fsdp_gather=["per_iteration"],
        )
        assert sizes.layer.expert_weights == 4 * 3 * 64 * 64, (fsdp, layers)
        copied = (
            2 * sizes.itemsize * sizes.layer.expert_weights / MACHINE.stream_rate(sizes.itemsize)
        )
        # Whole weights are cast before the loop.
        cast = (4 + sizes.itemsize) * sizes.parameters.layer_at_rest * (fsdp > 1) / WIDE
        gathered = sizes.itemsize * sizes.parameters.layer_gathered * (fsdp > 1)
        before = cast + gathered / MACHINE.stream_rate(sizes.itemsize)
        traffic = traffic_of(sizes)
        assert value(traffic.forward) - before == pytest.approx(copies * copied), (fsdp, layers)
        assert value(traffic.backward) - before == pytest.approx(copies * copied), (fsdp, layers)


def test_circular_sums_whole_gradients_of_the_repeats_at_work():
    def gradients(gather):
        mesh = {"data": 1, "fsdp": 2}
        sizes = sizes_of("circular", "circular", mesh=mesh, fsdp_gather=[gather])
        return value(traffic_of(sizes).gradients), sizes.parameters

    (each, parameters), (repeat, _), (once, _) = map(
        gradients, ("per_iteration", "per_repeat", "once")
    )
    assert repeat == once
    assert repeat / each == pytest.approx(parameters.layer_gathered / parameters.layer_at_rest)


def test_rings_of_gradients_add_what_arrives_to_the_part_that_they_send_on():
    def gradients(prefetch, ring):
        fixed = {"pipeline.fsdp_prefetch": prefetch, "model.dtype": "bfloat16"}
        choices = {"mesh": {"data": 1, "fsdp": ring}, "fsdp_gather": ["per_iteration"]}
        sizes = sizes_of("scheduled", "lockstep_1f1b", fixed=fixed, **choices)
        return value(traffic_of(sizes).gradients), sizes.parameters.layer_at_rest

    for ring, moved in ((2, 3 * 2), (4, 3 * 2 + 2 * (2 + 2 * 4))):
        (rings, part), (collectives, _) = gradients("true", ring), gradients("false", ring)
        # A copy of a part, and the last that arrives; two are read for each that is sent on.
        assert rings - collectives == pytest.approx(moved * part / WIDE, rel=0.01)

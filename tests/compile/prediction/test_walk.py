"""The clocked walk and its prices, on a program whose times are worked out by hand, in ns."""

import json
from dataclasses import replace
from functools import partial, reduce
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.hand_timed import (
    BASIS,
    CONSTANTS,
    HLO,
    NANOSECOND,
    OUTSIDE_LOOPS,
    PROGRAM,
    TICK,
    walked,
)

from maxpipe.compile.hlo import parse
from maxpipe.compile.prediction.constants import constants_of
from maxpipe.compile.prediction.operations import Part, Prices
from maxpipe.compile.prediction.origins import ALL_ROWS, Origin
from maxpipe.compile.prediction.predict import collectives_of, guessed_seconds, parts_of, unknowns
from maxpipe.compile.prediction.prediction import Prediction
from maxpipe.compile.prediction.unit_times import times_taken
from maxpipe.compile.prediction.walk import OUTSIDE
from maxpipe.devices.chips import CHIPS, chip_of

ATTENTION = (HLO / "attention.hlo").read_text(encoding="utf-8")
CALL = 'custom-call(%q), custom_call_target="tpu_custom_call"'


def edited(text, edits):
    return reduce(lambda text, edit: text.replace(*edit), edits.items(), text)


def states(flops, moved):
    return (
        ', backend_config={"custom_call_config":{"body":"","cost_estimate":'
        f'{{"flops":"{flops:.0f}","transcendentals":"0","bytes_accessed":"{moved:.0f}"}}}}}}'
    )


def called(op_name):
    return f'metadata={{op_name="jit(train_step)/{op_name}"}}'


def gmm(rows):
    return f', metadata={{op_name="jit(sparse_rows_{rows})/jit(gmm)/pallas_call"}}'


def nanoseconds(seconds):
    return pytest.approx(seconds * NANOSECOND)


def test_rows_beyond_a_usual_share_take_no_time_and_stay_in_their_phase():
    # The partitioner renames the conditional; phases share what it runs, named after one of them.
    usual = "shard_map/jit(usual_rows)/cond"
    inside = called(f"phase_2/{usual}/branch_1_fun/jit(sparse_rows_1_of_2)/while/body/cond")
    rows = {
        called('phase_1/while/body/head/cond" stack_frame_id=2')[:-2]: called(
            "shard_map/conditional.3"
        ),
        "exponential(%x.1), ": f"exponential(%x.1), {inside}, ",
        "negate(%x.2), ": f"negate(%x.2), {inside.replace('branch_1', 'branch_0')}, ",
    }
    timeline = walked(edited(PROGRAM, rows), partial(times_taken, [], 1.0))
    assert timeline.seconds == nanoseconds(3 * (TICK + 2) + OUTSIDE_LOOPS)
    assert timeline.conditionals[0][:4] == (ALL_ROWS, "phase_1", 3, 0)
    (spent,) = (s for s in timeline.spent if s.name == "head.idle")
    assert (spent.place.phase, spent.place.runs) == ("phase_1", 3)
    # A conditional within the rows is taken.
    block = Origin(f"jit(train_step)/{usual}/branch_1_fun/while/body/cond")
    assert times_taken([], 1.0, block, 7) == 7


def test_walk_multiplies_loops_and_counts_only_what_computation_waits_for():
    timeline = walked()
    assert timeline.seconds == nanoseconds(3 * (TICK + 50) + OUTSIDE_LOOPS)
    assert parts_of(timeline) == {
        Part.MATRIX_PRODUCTS: nanoseconds(3 * 60),
        Part.ATTENTION: 0,
        Part.LOOP_FUSIONS: nanoseconds(3 * 50 + 90 + 300),
        Part.COPIES: nanoseconds(400 - 90),
        Part.COLLECTIVES: nanoseconds(3 * (40 + 100)),
    }
    assert collectives_of(timeline) == [
        ("all-gather", "fsdp", nanoseconds(300)),
        ("collective-permute", "stage", nanoseconds(120)),
    ]
    assert [(loop.phase, loop.iterations) for loop in timeline.loops] == [("phase_1", 3)]
    assert timeline.loops[0].seconds == nanoseconds(TICK + 50)
    assert unknowns(timeline) == []


def line_of(name):
    return next(line for line in PROGRAM.splitlines() if f"%{name} =" in line)


def test_walk_of_two_transfers_over_the_same_links_adds_their_times():
    first, done = line_of("send"), line_of("got")
    last = done.replace("%got", "%got.2").replace("%send", "%send.2")
    for pairs, exposed in (
        ("{{0,2},{1,3}}", 140),  # the same links: the second ends after 200 ns, 60 of them hidden
        ("{{2,0},{3,1}}", 40),  # the other direction has links of its own
    ):
        second = first.replace("%send", "%send.2").replace("{{0,2},{1,3}}", pairs)
        text = PROGRAM.replace(first, f"{first}\n{second}").replace(done, f"{done}\n{last}")
        assert walked(text).seconds == nanoseconds(3 * (60 + exposed + 100 + 50) + OUTSIDE_LOOPS)


def test_walk_of_two_copies_within_the_chip_adds_their_times():
    first, done = line_of("fetch"), line_of("fetched")
    last = done.replace("%fetched", "%fetched.2").replace("(%fetch)", "(%fetch.2)")
    for space, exposed in (
        ("", 710),  # the second copy ends after 800 ns, 90 of them hidden
        (":S(5)", 310),  # to the host: it waits for no other
    ):
        second = first.replace("%fetch", "%fetch.2")
        second = second.replace("f32[100],", f"f32[100]{{0{space}}},", 1)
        text = PROGRAM.replace(first, f"{first}\n{second}").replace(done, f"{done}\n{last}")
        assert parts_of(walked(text))[Part.COPIES] == nanoseconds(exposed)


def test_walk_hides_a_gather_in_the_product_that_it_is_fused_with():
    timeline = walked((HLO / "overlap.hlo").read_text(encoding="utf-8"))
    # 100 bytes are sent beneath a product of 70 cycles.
    assert timeline.seconds == nanoseconds(100)
    assert parts_of(timeline)[Part.MATRIX_PRODUCTS] == nanoseconds(70)
    assert collectives_of(timeline) == [("all-gather", "fsdp", nanoseconds(30))]


def test_walk_waits_for_what_other_slices_send():
    text = (HLO / "slices.hlo").read_text(encoding="utf-8")
    half = replace(CONSTANTS, dcn_bandwidth=0.5e9)
    timeline = walked(text, num_slices=2, constants=half)
    # 100 bytes at half a byte a ns, 50 of which are hidden.
    assert timeline.seconds == nanoseconds(200)
    assert collectives_of(timeline) == [("collective-permute", "stage", nanoseconds(150))]
    assert unknowns(walked(text, num_slices=2)) == [
        "transfers over a network of unknown bandwidth: give"
    ]


def test_walk_weighs_a_conditional_by_how_often_its_work_is_done():
    timeline = walked(times_taken=lambda origin, reached: 1 if origin.scope == "head" else reached)
    # Once the branch of 50 cycles, twice the other one.
    assert timeline.seconds == nanoseconds(3 * TICK + 50 + 2 * 2 + OUTSIDE_LOOPS)
    (conditional,) = timeline.conditionals
    assert conditional[:4] == ("head", "phase_1", 3, 1)
    assert conditional.seconds == nanoseconds(50)
    assert sum(s.total for s in timeline.spent) == pytest.approx(timeline.seconds)


def test_walk_names_phase_source_line_and_scope_of_an_operation():
    timeline = walked()
    spent = {s.name: s for s in timeline.spent}
    # The fusion's own line has no name; that of its matrix product counts.
    assert (spent["mlp"].origin.scope, spent["mlp"].place.phase) == ("mlp", "phase_1")
    # The call from the package counts, not the line of an installed library.
    sources = {spent[name].origin.source for name in ("mlp", "norm")}
    assert sources == {"maxpipe/model/layers.py:52"}
    assert spent["norm"].place.phase == OUTSIDE
    assert spent["head.work"].place.conditional == "head"


def test_origins_have_the_innermost_scope_of_the_model():
    scopes = {
        "phase_1/while/body/forward/layer/mlp/dot_general": ("mlp", False),
        "transpose(jvp(layer))/attention/mul": ("attention", True),
        "phase_2/while/body/backward/all_gather": ("backward", True),
        "phase_0/while/body/forward/embedding/cond": ("embedding", False),
        "sub": ("", False),
    }
    origins = {name: Origin(f"jit(train_step)/{name}") for name in scopes}
    assert {name: (o.scope, o.is_backward) for name, o in origins.items()} == scopes


def test_walk_says_what_it_cannot_price():
    config = ', backend_config={"window_config":{"estimated_cycles":"60"}}'
    assert config in PROGRAM
    edits = {config: "", '"known_trip_count":{"n":"3"}': '"other":{}'}
    edits |= {"direction=LT": "direction=NE"}
    edits["collective-permute-done(%send)"] = "collective-permute-done(%g)"
    assert {*unknowns(walked(edited(PROGRAM, edits)))} == {
        "matrix products without estimated_cycles: mlp",
        "loops of unknown length: loop",
        "transfers of which only the end is found: got",
    }


def test_operation_without_an_estimate_is_priced_by_its_bytes_and_counts_as_guessed():
    assert guessed_seconds(walked()) == 0
    estimate = ', backend_config={"window_config":{"estimated_cycles":"300"}}'
    for without in ("", estimate.replace("300", "-1")):
        timeline = walked(PROGRAM.replace(estimate, without))
        # It writes 400 bytes, and reads as many.
        assert guessed_seconds(timeline) == nanoseconds(800)
    guessed = guessed_seconds(timeline)
    prediction = Prediction(timeline.seconds, BASIS, parts_of(timeline), guessed=guessed)
    share = round(100 * 800 * NANOSECOND / timeline.seconds)
    assert f"  {share} % of the step has no estimate" in "\n".join(prediction.lines())


def test_transfers_of_sparse_cores_are_those_of_the_collectives_that_they_call():
    timeline = walked((HLO / "sparse_cores.hlo").read_text(encoding="utf-8"))
    (waited,) = collectives_of(timeline)
    # Of 100 bytes either device of a pair sends half twice, of which 60 ns are hidden.
    assert (waited.kind, waited.axes) == ("all-reduce", "fsdp")
    assert waited.seconds == pytest.approx(40 * NANOSECOND)
    assert timeline.seconds == pytest.approx(100 * NANOSECOND)


def test_prices_of_attention_kernels_come_from_causal_flops():
    timeline = walked(ATTENTION)
    # Two products for half of 1024 x 1024 scores and the masked half of the diagonal's blocks.
    flops = 2 * 2 * (2 * 4 * 128) * (1024 * 1024 / 2 + 1024 * 512 / 2)
    assert timeline.seconds == pytest.approx(flops / (0.5 * 1e12))
    assert unknowns(timeline) == ["kernels whose work is unknown: own.1"]


def test_price_of_a_custom_call_is_known_where_it_moves_nothing():
    first, without = "  %splash_mha_fwd.1", walked(ATTENTION)

    def with_call(target):
        call = f'  %joined = bf16[2,2,1024,128] custom-call(%k, %k), custom_call_target="{target}"'
        return walked(ATTENTION.replace(first, f"{call}\n{first}", 1))

    for target in ("ConcatBitcast", "AssumeGatherIndicesInBound"):
        assert with_call(target).seconds == without.seconds
        assert unknowns(with_call(target)) == unknowns(without)
    assert unknowns(with_call("Novel")) == ["kernels whose work is unknown: joined, own.1"]


HALF = 1024 * 1024 / 2  # pairs of a query and a key, without the masked half of blocks
SIZES = {"fwd": (128, 256), "dq": (1024, 512), "dkv": (128, 128)}
ALL_BLOCKS = {
    f"block_{side}{'' if kernel == 'fwd' else f'_{kernel}'}": size
    for kernel, pair in SIZES.items()
    for side, size in zip(("q", "kv"), pair, strict=True)
}
SMALL = dict.fromkeys(ALL_BLOCKS, 128)
WIDE_KEYS = {
    "1024,128]": "1024,192]",
    "m: s8": "v: bf16[2,2,1024,128], m: s8",
    "%m = ": "%v = bf16[2,2,1024,128] parameter(3)\n  %m = ",
    "%k, %k)": "%k, %v)",
}
# Between parts of a sequence, queries whose places the kernel does not read.
SEGMENTS = {"m: s8": "i: s32[2,1024], m: s8", "%m = ": "%i = s32[2,1024] parameter(3)\n  %m = "}
WHOLE, CUT = (SEGMENTS | {"%k, %k)": f"%k, %k{ids})"} for ids in (", %i, %i", ", %i, %i, %i"))
PART = {f"q{sign} bf16[2,4,1024,128]": f"q{sign} bf16[2,4,256,128]" for sign in (":", " =")}


@pytest.mark.parametrize(
    ("kernel", "mask", "blocks", "edits", "channels", "pairs"),
    [
        # The blocks that the kernel names; the default where it names none of its own.
        ("fwd", "s8[1,8,4]", ALL_BLOCKS, {}, 2 * 128, HALF + 1024 * 256 / 2),
        ("dq", "s8[1,1,2]", ALL_BLOCKS, {}, 3 * 128, HALF + 1024 * 1024 / 2),
        ("dkv", "s8[1,8,8]", ALL_BLOCKS, {}, 4 * 128, HALF + 1024 * 128 / 2),
        ("fwd", "s8[1,2,2]", {"block_q_dq": 1024}, {}, 2 * 128, HALF + 1024 * 512 / 2),
        # Queries and keys of 192 channels, which matrix units fill up to 256; values of 128.
        ("fwd", "s8[1,2,2]", {}, WIDE_KEYS, 256 + 128, HALF + 1024 * 512 / 2),
        ("dq", "s8[1,2,2]", {}, WIDE_KEYS, 2 * 256 + 128, HALF + 1024 * 512 / 2),
        ("dkv", "s8[1,2,2]", {}, WIDE_KEYS, 2 * 256 + 2 * 128, HALF + 1024 * 512 / 2),
        # A window: each of eight blocks of queries visits two of keys, the first one only its own.
        ("fwd", "s8[1,8,2]", SMALL, {}, 2 * 128, (1 + 7 * 2) * 128 * 128),
        ("dq", "s8[1,8,2]", SMALL, {}, 3 * 128, (1 + 7 * 2) * 128 * 128),
        ("dkv", "s8[1,2,8]", SMALL, {}, 4 * 128, (1 + 7 * 2) * 128 * 128),
        # A part of the queries visits a block of keys entirely, so that there is no window.
        ("dkv", "s8[1,2,8]", SMALL, PART, 4 * 128, 256 * (1024 + 128) / 2),
        ("fwd", "s8[1,2,2]", {}, WHOLE, 2 * 128, HALF),
        ("fwd", "s8[1,2,2]", {}, CUT, 2 * 128, HALF + 1024 * 512 / 2),
    ],
)
def test_prices_of_attention_kernels_count_the_blocks_that_they_visit(
    kernel, mask, blocks, edits, channels, pairs
):
    """Of 1024 queries and keys"""
    named = json.dumps({"xprof_metadata": json.dumps(blocks)}, indent=0)
    call = '%k, %k), custom_call_target="tpu_custom_call"'
    names = {"splash_mha_fwd": f"splash_mha_{kernel}", "s8[1,2,2]": mask}
    names |= {call: f"{call}, frontend_attributes={{kernel_metadata={named}}}"}
    text = edited(ATTENTION, names | edits)
    assert walked(text).seconds == pytest.approx(2 * channels * (2 * 4) * pairs / (0.5 * 1e12))


def test_kernel_with_a_name_like_those_of_attention_is_priced_by_what_it_states():
    text = ATTENTION.replace("own.1", "rmsnorm_fwd.1")
    text = text.replace("custom-call(%q), ", "custom-call(%q, %k), ")
    assert unknowns(walked(text)) == ["kernels whose work is unknown: rmsnorm_fwd.1"]
    call = '(%q, %k), custom_call_target="tpu_custom_call"'
    timeline = walked(text.replace(call, call + states(0, 1000)))
    assert unknowns(timeline) == []
    assert timeline.seconds - walked(text).seconds == pytest.approx(1000 / CONSTANTS.hbm_bandwidth)


def test_price_of_a_kernel_comes_from_the_flops_that_it_states_and_uses():
    for flops, used, seconds in ((8e9, 1, 16e-3), (8e9, 1 / 4, 4e-3)):
        stated = gmm(f"2_of_{round(2 / used)}") + states(flops, 64)
        timeline = walked(ATTENTION.replace(CALL, CALL + stated))
        assert unknowns(timeline) == [], used
        assert timeline.seconds - walked(ATTENTION).seconds == pytest.approx(seconds), used
        assert parts_of(timeline)[Part.MATRIX_PRODUCTS] == pytest.approx(seconds), used


def test_product_of_experts_multiplies_tiles_with_rows_of_two_experts_once_for_each():
    flops, moved = 8e9, 3e6

    def seconds(used=1.0, visits=11):
        """Price 8 tiles of rows, and at most 3 more visits, of 4 experts."""
        call = (
            "custom-call(%from, %expert, %tile, %rows, %weights), "
            f'custom_call_target="tpu_custom_call"{gmm(f"{round(100 * used)}_of_100")}'
        )
        text = (
            "HloModule step\n\nENTRY %main () -> bf16[4096,256] {\n"
            "  %from = s32[5]{0} parameter(0)\n"
            f"  %expert = s32[{visits}]{{0}} parameter(1)\n"
            f"  %tile = s32[{visits}]{{0}} parameter(2)\n"
            "  %rows = bf16[4096,128]{1,0} parameter(3)\n"
            "  %weights = bf16[4,128,256]{2,1,0} parameter(4)\n"
            f"  ROOT %p = bf16[4096,256]{{1,0}} {call}{states(flops, moved)}\n}}\n"
        )
        return walked(text).seconds

    peak = CONSTANTS.grouped_efficiency * CONSTANTS.peak_flops
    assert seconds() == pytest.approx(flops * 11 / 8 / peak)
    assert seconds(used=0.25) == pytest.approx(flops * (2 + 3) / 8 / peak)
    assert seconds(visits=5) == pytest.approx(flops * 5 / 2 / peak)
    moved = 3e9
    assert seconds(used=0.25) == pytest.approx(moved * (2 + 3) / 11 / CONSTANTS.hbm_bandwidth)


def test_kernels_whose_name_is_lost_skip_rows_as_others_with_as_many_do():
    other = '(%m, %q, %k, %k), custom_call_target="tpu_custom_call"'
    named = gmm("256_of_1024")

    def seconds(flops, moved, name, own=""):
        text = ATTENTION.replace(CALL, CALL + own + states(flops, moved))
        return walked(text.replace(other, other + name)).seconds - walked(ATTENTION).seconds

    assert seconds(8e9, 0, "") == pytest.approx(4 * seconds(8e9, 0, named))
    of_its_own = seconds(8e9, 0, gmm("512_of_1024"), own=gmm("128_of_1024"))
    assert of_its_own == pytest.approx(seconds(8e9, 0, "") / 8)
    # Operand and result have rows.
    skipped = 0.75 * 2 * (2 * 2 * 4 * 1024 * 128)
    difference = seconds(0, 1e9, "") - seconds(0, 1e9, named)
    assert difference == pytest.approx(skipped / CONSTANTS.hbm_bandwidth)


def test_constants_have_the_clocks_that_the_data_sheets_imply():
    clocks = {chip.name: constants_of(chip) for chip in CHIPS if chip.torus}
    expected = {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": None}
    assert {name: c and round(c.clock / 1e9, 2) for name, c in clocks.items()} == expected
    v5p = clocks["v5p"]
    assert (v5p.attention_efficiency, v5p.link_bandwidth) == (0.5, 90e9)


def test_gather_among_a_part_of_an_axis_is_priced_by_its_own_links():
    """Of a closed torus of 4 x 4 x 4: along a line, in a plane, and in all of it."""
    devices = np.empty((1, 64), object)
    devices[0] = [
        SimpleNamespace(coords=coords, slice_index=0, platform="tpu")
        for coords in product(range(4), repeat=3)
    ]
    torus = SimpleNamespace(devices=devices, axis_names=("stage", "fsdp"), size=64)
    for groups, links in (("[16,4]<=[64]", 2), ("[4,16]<=[16,4]T(1,0)", 4), ("[1,64]<=[64]", 6)):
        members = int(groups.partition("]")[0].split(",")[1])
        module = parse(
            "HloModule step\n\nENTRY %main (x: f32[25]) -> f32[25] {\n"
            "  %x = f32[25]{0} parameter(0)\n"
            f"  ROOT %g = f32[25]{{0}} all-gather(%x), replica_groups={groups}\n}}\n"
        )
        prices = Prices(module, torus, chip_of("v5p"), CONSTANTS)
        main = module.computations["main"]
        price = prices.of(main, main.instructions["g"])
        assert price.axes == "fsdp"
        assert price.seconds == pytest.approx((members - 1) * 100 / links * 1e-9), (groups, links)

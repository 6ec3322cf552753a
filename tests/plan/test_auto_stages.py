"""The choice of stages: the best cut under a memory limit, never slower than uniform stages."""

import re
from itertools import combinations
from math import inf

import numpy as np
import pytest
from helpers.engines import tiny
from helpers.stage_configs import config_of
from hypothesis import given, settings
from hypothesis import strategies as st

from maxpipe import load_config
from maxpipe.config import ConfigError
from maxpipe.config.load import derive_known
from maxpipe.config.options import update
from maxpipe.pipeline.layout import build_layout
from maxpipe.pipeline.schedules.csv_files import to_csv
from maxpipe.pipeline.schedules.load import build_table, load_schedule, times_of_chunks
from maxpipe.plan.auto_stages import (
    bubble_fraction,
    choose_stages,
    plan_stages,
    predict,
    slowest_stage,
    uniform_sizes,
)
from maxpipe.plan.layer_times import layer_times

LARGE_HEAD = {"model.vocab_size": 8192}


def every_cut(total, chunks):
    for cuts in combinations(range(1, total), chunks - 1):
        ends = [*cuts, total]
        yield [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("schedule", ["zb_v", "zb_h2"])
def test_order_follows_unit_times_of_the_configuration(schedule):
    """Given, or by FLOPs; transfers of a quarter of a forward make the published order wait."""
    sizes = {"pipeline.schedule": schedule, "pipeline.remat_policy": "minimal"}
    published = config_of(**sizes)
    assert choose_stages(published, None, [].append).pipeline.unit_times == []
    given = config_of(**sizes, **{"pipeline.unit_times": [1.0, 1.4, 0.9, 1.0]})
    assert to_csv(build_table(given)) != to_csv(build_table(published))
    lines = []
    auto = config_of(**sizes, **LARGE_HEAD, **{"pipeline.unit_times": [-1]})
    chosen = choose_stages(auto, None, lines.append)
    times = layer_times(chosen)
    assert chosen.pipeline.unit_times == pytest.approx(
        [1, times.input_gradient, times.weight_gradient, 0, times.head], rel=1e-3
    )
    (line,) = [line for line in lines if line.startswith("pipeline.unit_times=[1.0,")]
    assert line.endswith(f"the order of {schedule} follows these times")
    sizes = chosen.pipeline.layers_per_stage
    now = predict(chosen, sizes).run
    before = predict(update(chosen, {"pipeline.unit_times": []}), sizes).run
    assert now.makespan < before.makespan or now.bubble < before.bubble


def test_unit_times_count_layers_outside_the_pipeline_once_with_their_chunk():
    values = {"model.num_layers": 5, "pipeline.parallel_layers": 4, "pipeline.schedule": "zb_v"}
    values |= {"mesh.ici.stage": 2, "pipeline.num_microbatches": 4}
    for place, expected in (("before", (2, 1, 1, 1)), ("after", (1, 1, 1, 2))):
        outside = {"pipeline.outside_layers": place, "pipeline.unit_times": [1.0, 2.0, 0.5]}
        config = tiny(**values, **outside)
        times = times_of_chunks(config)
        assert times.forward == expected
        assert times.weight_gradient == tuple(n / 2 for n in expected)
        # The simulation of the sizes follows the same order as the run.
        table = predict(config, build_layout(config).chunk_sizes).run.table
        assert to_csv(table) == to_csv(build_table(config)), place


# As many FLOPs in a first dense layer as in another: two experts of half the width, and a router.
FIRST = {
    "model.num_layers": 20,
    "model.first_dense_layers": 4,
    "model.vocab_size": 64,
    "model.moe.experts": 2,
    "model.moe.mlp_dim": 96,
    "pipeline.remat_policy": "none",
}


def test_first_dense_layers_belong_to_the_first_chunk():
    """Which has fewer of the others, and the chunk's unit times count them."""
    assert plan_stages(config_of(**FIRST), inf).sizes == [1, 5, 5, 5]
    none = FIRST | {"model.first_dense_layers": 0}
    assert plan_stages(config_of(**none), inf).sizes == [5, 5, 5, 5]
    values = {"pipeline.schedule": "zb_v", "model.num_layers": 18, "model.first_dense_layers": 2}
    sizes = plan_stages(config_of(2, **FIRST | values), inf).sizes
    # Seven layers and the two dense ones, then nine: the stage's second chunk is the model's last.
    assert (sizes[0] + sizes[3], sizes[1] + sizes[2]) == (7, 9)
    assert sizes[3] - sizes[0] in (1, 3)
    timed = {"pipeline.layers_per_stage": [2, 4, 5, 5], "pipeline.unit_times": [1.0, 1.0, 0.5]}
    assert times_of_chunks(config_of(**FIRST | timed)).forward == (6, 4, 5, 5)


@settings(max_examples=15, deadline=None)
@given(
    layers=st.integers(4, 9),
    S=st.sampled_from([2, 4]),
    vocabulary=st.sampled_from([64, 2048, 16384]),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb_h2", "eager_1f1b"]),
    share=st.floats(0, 1),
)
def test_no_cut_that_fits_has_a_faster_slowest_stage(layers, S, vocabulary, schedule, share):
    values = {"model.num_layers": layers, "model.vocab_size": vocabulary}
    config = config_of(S, **values, **{"pipeline.schedule": schedule})
    cuts = [predict(config, sizes) for sizes in every_cut(layers, S)]
    needed = sorted(max(cut.memory) for cut in cuts)
    limit = needed[round(share * (len(needed) - 1))]
    fitting = [cut for cut in cuts if max(cut.memory) <= limit]
    least = min(cut.slowest for cut in fitting) * (1 + 1e-9)
    chosen = plan_stages(config, limit)
    assert max(chosen.memory) <= limit
    if chosen.sizes == uniform_sizes(config):
        assert chosen.run.makespan <= max(
            cut.run.makespan for cut in fitting if cut.slowest <= least
        ) * (1 + 1e-9)
    else:
        assert chosen.slowest <= least


def test_a_stage_is_all_its_chunks():
    """What is in flight of each chunk differs: within a limit it matters which has a layer."""
    values = {"pipeline.num_repeats": 2, "model.num_layers": 9, **LARGE_HEAD}
    for schedule in ("interleaved_1f1b", "zb_v"):
        config = config_of(2, **values, **{"pipeline.schedule": schedule})
        least = min(predict(config, cut).slowest for cut in every_cut(9, 4))
        assert plan_stages(config, inf).slowest == pytest.approx(least), schedule
    for policy in ("none", "full"):
        values = {"pipeline.schedule": "zb_v", "model.num_layers": 8, "pipeline.num_repeats": 2}
        config = config_of(2, **values, **{"pipeline.remat_policy": policy})
        cuts = [predict(config, cut) for cut in every_cut(8, 4)]
        for limit in sorted({max(cut.memory) for cut in cuts})[:4]:
            chosen = plan_stages(config, limit)
            assert max(chosen.memory) <= limit
            least = min(cut.slowest for cut in cuts if max(cut.memory) <= limit)
            assert chosen.slowest == pytest.approx(least), policy


def test_a_smaller_limit_moves_layers_to_later_stages():
    """Eager 1F1B, M=8: seven microbatches in flight on the first stage of four, one on the last."""
    values = {"pipeline.schedule": "eager_1f1b", "pipeline.remat_policy": "none"}
    config = config_of(**values, **{"model.vocab_size": 64})
    needs = max(plan_stages(config, inf).memory)
    assert [plan_stages(config, share * needs).sizes for share in (1.0, 0.95, 0.8)] == [
        [4, 4, 4, 4],
        [3, 5, 4, 4],
        [3, 4, 5, 4],
    ]


def test_bubble_is_that_of_the_chunks_that_stages_hold():
    """1F1B with the times of real stages: the head counts, and what a short stage waits."""
    small = {"model.num_layers": 6, "model.vocab_size": 64}

    def of(*sizes, **values):
        return config_of(2, **small, **{"pipeline.layers_per_stage": [*sizes]}, **values)

    times = layer_times(of(1, 5))
    work = 8 * (6 * times.layer + times.head)  # of both stages
    step = times.layer + 8 * (5 * times.layer + times.head)  # the last stage never waits
    assert bubble_fraction(of(1, 5)) == pytest.approx(1 - work / (2 * step))
    # One program computes five layers on either stage, in 8 + 1 ticks, and shares the head.
    program = {"pipeline.engine": "scheduled", "pipeline.schedule": "lockstep_1f1b"}
    step = 9 * 5 * times.layer + 8 * times.head / 2
    assert bubble_fraction(of(5, 1, **program)) == pytest.approx(1 - work / (2 * step))


def test_bubble_of_columns_that_one_program_computes_as_ticks(tmp_path):
    """1F1B of 2 stages and 4 microbatches has 2 columns with F, 6 with F and B, and 2 with B."""
    path = tmp_path / "own.csv"
    path.write_text(to_csv(load_schedule("1f1b", 2, 4)))
    sizes = {"model.num_layers": 6, "pipeline.layers_per_stage": [3, 3]}
    values = {"pipeline.num_microbatches": 4, "pipeline.schedule": str(path)}
    config = config_of(2, **sizes, **values)
    times = layer_times(config)
    work = 4 * (6 * times.layer + times.head)  # of both stages
    one_program = update(config, {"pipeline.engine": "scheduled"})
    step = 8 * 3 * times.layer + 4 * times.head / 2
    assert bubble_fraction(one_program) == pytest.approx(1 - work / (2 * step))
    assert bubble_fraction(config) < bubble_fraction(one_program)


def test_bubble_of_the_first_run():
    # In forwards of a layer, a stage has 4 of 1 and 4 backwards of 3, and waits for 4; the head,
    # which both stages share, takes as many as it has multiplications for each layer's one.
    head = 3 * 128 * 320 / (4 * 128**2 + 3 * 128 * 384 + 128 * 128)
    bubble = bubble_fraction(derive_known(load_config("base")))
    assert bubble == pytest.approx(4 / (4 * (1 + 3) + head + 4)) == pytest.approx(0.195, abs=5e-4)


def test_slowest_stage_is_named_with_what_helps():
    def line(sizes, **values):
        small = {"model.num_layers": sum(sizes), "model.vocab_size": 64, **values}
        return slowest_stage(config_of(2, **small, **{"pipeline.layers_per_stage": sizes}))

    assert line([3, 3]) == ""
    with_head = "stage 1 with the head, .* above the mean; pipeline.layers_per_stage=auto, "
    assert re.match(with_head, line([1, 5]))


def chosen(config, chip_bytes=None):
    said = []
    return choose_stages(config, chip_bytes, said.append), said


def test_the_choice_is_said_with_its_reason():
    config, (choice, prediction) = chosen(config_of(**LARGE_HEAD), 16e9)
    sizes = config.pipeline.layers_per_stage
    assert sizes == plan_stages(config_of(**LARGE_HEAD), inf).sizes
    assert config.pipeline.num_layers_per_stage == max(sizes)
    assert choice.startswith(
        f"pipeline.layers_per_stage={str(sizes).replace(' ', '')}: the slowest stage takes "
    )
    assert re.search(r" forwards of a layer; a step of uniform ones \+[0-9.]+%$", choice)
    assert f"F {' '.join(map(str, sizes))}, B " in prediction
    assert "of 14.9 GiB a device" in prediction
    assert chosen(config) == (config, [])
    assert chosen(config_of(**{"model.vocab_size": 64}))[1][0].endswith(" forwards of a layer")


def test_what_fits_nowhere_is_refused_with_how_much_is_missing_and_what_would_help():
    config = config_of(
        **{"pipeline.remat_policy": "none", "pipeline.schedule": "gpipe", "pipeline.engine": "mpmd"}
    )
    least = max(plan_stages(config, inf).memory)
    with pytest.raises(ConfigError) as error:
        choose_stages(config, 0.6 * least, print)
    (problem,) = error.value.problems
    assert problem.key == "pipeline.layers_per_stage"
    assert "(the chip's memory): with [" in problem.message
    assert "GiB too much; what may help: pipeline.remat_policy=full, " in problem.message
    full = update(config, {"pipeline.remat_policy": "full"})
    assert max(plan_stages(full, 0.6 * least).memory) <= 0.6 * least


WINDOWS = {
    "model.attention_window": 32,
    "model.layer_pattern": ["global"] * 4 + ["local"] * 4,
    "model.num_layers": 8,
    "data.sequence_length": 4096,
}


def test_layers_with_a_window_are_more_on_a_stage():
    config = config_of(2, **WINDOWS)
    plan = plan_stages(config, inf)
    cuts = (predict(config, [n, 8 - n]) for n in range(1, 8))
    assert plan.sizes == min(cuts, key=lambda cut: cut.slowest).sizes
    assert plan.sizes[0] < 4
    _, (_, prediction) = chosen(config)
    forward = [float(x) for x in prediction.partition("F ")[2].partition(",")[0].split()]
    assert sum(forward) == pytest.approx(8, rel=1e-3)  # the average layer takes 1
    assert forward[0] / plan.sizes[0] > 1.5 * forward[1] / plan.sizes[1]


def test_times_of_layers_are_those_of_their_kinds_and_of_their_places():
    times = layer_times(config_of(2, **WINDOWS))
    only_local = layer_times(config_of(2, **WINDOWS | {"model.layer_pattern": ["local"]}))
    local, of_all = times.extras[-1], times.extras[0]
    assert 1 + local[0] == pytest.approx(times.weight_gradient / only_local.weight_gradient)
    assert np.add(local, of_all) == pytest.approx(0)
    assert times.of_layers(2, 4) == pytest.approx(4 * times.layer)
    inside = {"pipeline.parallel_layers": 4, "pipeline.layers_per_stage": [2, 2]}
    for place, extra in (("after", of_all), ("before", local)):
        inside |= {"pipeline.outside_layers": place}
        spmd = {"pipeline.engine": "circular", "pipeline.schedule": "gpipe"}
        assert layer_times(config_of(2, **WINDOWS, **inside, **spmd)).extras == (extra,) * 4
        # There the layers outside are part of a chunk.
        assert layer_times(config_of(2, **WINDOWS, **inside)).extras == times.extras

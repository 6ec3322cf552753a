"""Options that an engine does not have are refused with the reason and a remedy."""

import pytest
from helpers.engines import tiny

from maxpipe.config import ConfigError, catalog, notes
from maxpipe.config.values import AUTO

CIRCULAR = {
    "pipeline.schedule": "circular",
    "mesh.ici.stage": 2,
    "model.num_layers": 8,
    "pipeline.num_microbatches": 4,
}
SCHEDULED = CIRCULAR | {"pipeline.schedule": "lockstep_1f1b"}
MPMD = CIRCULAR | {"pipeline.schedule": "zb_h1"}
SPLIT = CIRCULAR | {"pipeline.schedule": "lockstep_zb"}


def refusal(**values):
    with pytest.raises(ConfigError) as caught:
        tiny(**values)
    return {problem.key: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("values", "key", "expected"),
    [
        (CIRCULAR | {"pipeline.overlap_slots": True}, "pipeline.overlap_slots", "lockstep_1f1b"),
        (CIRCULAR | {"pipeline.skip_idle": "true"}, "pipeline.skip_idle", "lockstep_1f1b"),
        (
            CIRCULAR | {"pipeline.remat_tensors.mlp_up": "device"},
            "pipeline.remat_tensors.mlp_up",
            "remat_policy=custom",
        ),
        (
            CIRCULAR | {"pipeline.remat_layers": True, "pipeline.remat_policy": "none"},
            "pipeline.remat_layers",
            "nothing to recompute",
        ),
        (
            CIRCULAR | {"pipeline.scan_repeats": False},
            "pipeline.scan_repeats",
            "fsdp_gather=per_repeat or once",
        ),
        (
            SCHEDULED | {"pipeline.scan_iterations": False},
            "pipeline.scan_iterations",
            "loops over the ticks of a phase; use true",
        ),
        (
            SCHEDULED | {"pipeline.scan_repeats": False},
            "pipeline.scan_repeats",
            "loops over the ticks of a phase; use true",
        ),
        (
            SCHEDULED | {"pipeline.scan_layers": False},
            "pipeline.scan_layers",
            "use pipeline.scan_layers_per_stage=false",
        ),
        (
            CIRCULAR | {"pipeline.fsdp_prefetch": "true"},
            "pipeline.fsdp_prefetch",
            "use pipeline.fsdp_gather=per_repeat",
        ),
        (
            SCHEDULED | {"pipeline.fsdp_prefetch": "true", "pipeline.fsdp_gather": "once"},
            "pipeline.fsdp_prefetch",
            "needs pipeline.fsdp_gather=per_iteration",
        ),
        (
            SCHEDULED | {"pipeline.fsdp_prefetch": "true", "pipeline.scan_layers_per_stage": True},
            "pipeline.fsdp_prefetch",
            "needs pipeline.scan_layers_per_stage=false",
        ),
        (
            SCHEDULED | {"pipeline.remat_policy": "minimal_offloaded"},
            "pipeline.remat_policy",
            "use minimal, or pipeline.schedule=circular or 1f1b",
        ),
        (
            SCHEDULED | {"pipeline.remat_policy": "qkv_proj_offloaded"},
            "pipeline.remat_policy",
            "use save_qkv_proj",
        ),
        (
            SCHEDULED
            | {"pipeline.remat_policy": "custom", "pipeline.remat_tensors.context": "offload"},
            "pipeline.remat_tensors.context",
            "use device or remat",
        ),
        (SCHEDULED | {"pipeline.fsdp_gather": "per_repeat"}, "pipeline.fsdp_gather", "use once"),
        (
            SCHEDULED | {"pipeline.fsdp_gather": "per_repeat", "model.num_layers": 16},
            "pipeline.fsdp_gather",
            "use per_iteration",
        ),
        (
            MPMD | {"pipeline.parallel_layers": 4, "pipeline.layers_per_stage": AUTO},
            "pipeline.layers_per_stage",
            "gives one stage 4 more; use pipeline.parallel_layers=-1",
        ),
        (MPMD | {"pipeline.overlap_slots": True}, "pipeline.overlap_slots", "lockstep_1f1b"),
        (MPMD | {"pipeline.fsdp_gather": "per_repeat"}, "pipeline.fsdp_gather", "use once"),
        (
            MPMD | {"pipeline.scan_iterations": False},
            "pipeline.scan_iterations",
            "units one by one; use true",
        ),
        (
            MPMD | {"pipeline.scan_layers_per_stage": True},
            "pipeline.scan_layers_per_stage",
            "use false",
        ),
        (
            SPLIT | {"pipeline.scan_layers_per_stage": True, "pipeline.remat_policy": "minimal"},
            "pipeline.scan_layers_per_stage",
            "use false",
        ),
        (
            SPLIT | {"pipeline.remat_policy": "full"},
            "pipeline.remat_policy",
            "use minimal, none, save_",
        ),
        (
            SPLIT | {"pipeline.remat_policy": "custom"},
            "pipeline.remat_policy",
            "give some pipeline.remat_tensors",
        ),
        (
            SPLIT | {"pipeline.remat_iterations": False, "pipeline.remat_layers": True},
            "pipeline.remat_policy",
            "lockstep_1f1b",
        ),
        (
            MPMD | {"pipeline.delay_activation_forwarding": True},
            "pipeline.delay_activation_forwarding",
            "use false",
        ),
        (MPMD | {"compile.load": "step"}, "compile.load", "leave it empty"),
        (
            CIRCULAR | {"pipeline.outside_layers": "before"},
            "pipeline.outside_layers",
            "parallel_layers",
        ),
    ],
    ids=lambda value: value.rpartition(".")[2] if isinstance(value, str) else "",
)
def test_option_without_meaning_is_refused(values, key, expected):
    problems = refusal(**values)
    assert list(problems) == [key]
    assert expected in problems[key]


@pytest.mark.parametrize("times", [[1.0, 1.4], [1.0, 0.0, 0.9], [1.0, 1.4, 0.9, -0.1], [1.0] * 6])
def test_unit_times_that_are_not_of_f_i_and_w_are_refused(times):
    message = refusal(**MPMD, **{"pipeline.unit_times": times})["pipeline.unit_times"]
    assert "such as [1, 1.4, 0.9, 0.1], or auto" in message


@pytest.mark.parametrize(
    "values",
    [
        SPLIT | {"pipeline.remat_policy": "save_qkv_proj"},
        SPLIT | {"pipeline.remat_policy": "custom", "pipeline.remat_tensors.mlp_up": "device"},
        SPLIT | {"pipeline.remat_iterations": False},
        MPMD | {"pipeline.remat_policy": "full"},
    ],
    ids=["save_qkv_proj", "custom", "no remat", "mpmd"],
)
def test_split_backward_with_saved_products_is_accepted(values):
    assert tiny(**values).pipeline.engine in ("scheduled", "mpmd")


@pytest.mark.parametrize("engine", [CIRCULAR, MPMD])
@pytest.mark.parametrize(
    "values",
    [
        {"pipeline.remat_policy": "minimal_offloaded"},
        {"pipeline.remat_policy": "custom", "pipeline.remat_tensors.context": "offload"},
    ],
)
def test_offloading_is_accepted_by_engines_that_move_residuals(engine, values):
    tiny(**engine | values)


def test_gathers_per_repeat_on_mpmd_are_refused_next_to_wrong_repeats():
    wrong = MPMD | {"pipeline.fsdp_gather": "per_repeat", "pipeline.num_repeats": 3}
    assert list(refusal(**wrong)) == ["pipeline.num_repeats", "pipeline.fsdp_gather"]


# What MaxText 0.2.5 accepts and then builds another model from, or fails on while tracing.


@pytest.mark.parametrize("layers", [12, 9])
def test_parallel_layers_more_than_the_model_are_refused(layers):
    assert (
        "nearest legal: 8"
        in refusal(**CIRCULAR | {"pipeline.parallel_layers": layers})["pipeline.parallel_layers"]
    )


@pytest.mark.parametrize("layers", [0, -2])
def test_parallel_layers_below_one_are_refused(layers):
    message = refusal(**CIRCULAR | {"pipeline.parallel_layers": layers})["pipeline.parallel_layers"]
    assert "at least 1, or -1" in message


def test_layers_indivisible_propose_layers_outside():
    message = refusal(**CIRCULAR | {"model.num_layers": 7})["model.num_layers"]
    assert "model.num_layers=6 or 8" in message
    assert "pipeline.parallel_layers=6 (the others run outside the pipeline)" in message


def test_layers_indivisible_on_mpmd_propose_uneven_stages_alone():
    message = refusal(**MPMD | {"model.num_layers": 7})["model.num_layers"]
    assert "pipeline.layers_per_stage=[4,3]" in message
    assert "pipeline.parallel_layers" not in message


def test_layers_outside_on_an_engine_that_does_not_read_them_are_refused(monkeypatch):
    entry = catalog.Engine("another.package:Engine", "new", unused=("parallel_layers",))
    monkeypatch.setitem(catalog.ENGINES, "new", entry)
    monkeypatch.setitem(catalog.SCHEDULES, "new", catalog.Schedule("module:new", engines=("new",)))
    values = CIRCULAR | {"pipeline.schedule": "new", "pipeline.parallel_layers": 4}
    message = refusal(**values)["pipeline.parallel_layers"]
    assert "4 is not for the new engine, which has no layers outside the pipeline; use 8" in message


def test_parallel_layers_indivisible_are_refused():
    message = refusal(**CIRCULAR | {"pipeline.parallel_layers": 5})["pipeline.parallel_layers"]
    assert "pipeline.parallel_layers=5 does not divide" in message
    assert "pipeline.parallel_layers=4 or 6" in message


def test_fsdp_gather_two_modes_are_refused():
    message = refusal(**CIRCULAR | {"pipeline.fsdp_gather": "once,per_repeat"})[
        "pipeline.fsdp_gather"
    ]
    assert "is not one of auto, per_iteration, per_repeat, once" in message


def test_eval_batch_indivisible_is_refused():
    values = {
        "mesh.ici.fsdp": 4,
        "eval.every": 1,
        "eval.global_batch_size": 6,
        "pipeline.num_microbatches": 2,
    }
    assert "nearest legal: 4 or 8" in refusal(**CIRCULAR | values)["eval.global_batch_size"]


@pytest.mark.parametrize(
    ("microbatches", "delayed", "expected"), [(2, False, True), (4, False, False), (4, True, True)]
)
def test_notes_name_a_third_gathered_repeat(microbatches, delayed, expected):
    config = tiny(
        **CIRCULAR
        | {
            "pipeline.fsdp_gather": "per_repeat",
            "pipeline.num_microbatches": microbatches,
            "pipeline.delay_activation_forwarding": delayed,
        }
    )
    assert any("three gathered repeats" in line for line in notes(config)) == expected


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        (CIRCULAR, "the stages as data parallelism"),
        (SCHEDULED, "the stages as data parallelism"),
        (MPMD, "the last chunk, on its stage alone"),
    ],
    ids=["circular", "scheduled", "mpmd"],
)
@pytest.mark.parametrize(("layers", "expected"), [(4, True), (-1, False)])
def test_notes_name_layers_outside_the_pipeline(engine, how, layers, expected):
    lines = notes(tiny(**engine | {"pipeline.parallel_layers": layers}))
    line = f"4 of 8 layers run after the pipeline, with {how}"
    assert any(line in of_run for of_run in lines) == expected


@pytest.mark.parametrize(("rows", "expected"), [(1, True), (3, True), (2, False), (4, False)])
def test_notes_say_where_stages_idle_in_layers_outside_of_lockstep(rows, expected):
    """A stage's share of a microbatch are whole rows."""
    values = {
        "pipeline.parallel_layers": 4,
        "pipeline.num_microbatches": 2,
        "data.global_batch_size": 2 * rows,
    }
    (line,) = (line for line in notes(tiny(**SCHEDULED | values)) if "layers run after" in line)
    assert (f"{rows} row" in line) == expected


def test_remat_tensors_and_layers_are_refused_at_once():
    problems = refusal(
        **CIRCULAR
        | {
            "pipeline.remat_policy": "none",
            "pipeline.remat_layers": True,
            "pipeline.remat_tensors.context": "device",
        }
    )
    assert set(problems) == {"pipeline.remat_layers", "pipeline.remat_tensors.context"}

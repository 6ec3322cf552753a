"""Engine for a schedule; layers split into stages x repeats x layers per stage."""

import pytest

from maxpipe.config import load, notes, print_config, resolve, values

SEQUENTIAL = ("mesh.ici.stage=1", "mesh.ici.fsdp=4")


@pytest.mark.parametrize(
    ("words", "engine"),
    [
        ((), "circular"),
        (("pipeline.schedule=gpipe",), "circular"),
        (("pipeline.schedule=lockstep_1f1b",), "scheduled"),
        (SEQUENTIAL, "sequential"),
        ((*SEQUENTIAL, "pipeline.engine=circular"), "circular"),
        (("pipeline.schedule=1f1b",), "mpmd"),
        (("pipeline.schedule=gpipe", "pipeline.engine=mpmd"), "mpmd"),
        ((*SEQUENTIAL, "pipeline.schedule=1f1b"), "sequential"),
    ],
)
def test_engine_auto_is_derived(resolved, words, engine):
    assert resolved(*words).pipeline.engine == engine


def test_notes_one_stage_names_unused_pipeline_options(base):
    words = (
        "pipeline.schedule=1f1b",
        "pipeline.num_repeats=7",
        "pipeline.delay_activation_forwarding=true",
    )

    def lines(*words):
        loaded = load(base, words)
        return [
            line
            for line in notes(resolve(loaded, 4), loaded)
            if "there is one stage; mesh.ici.stage" in line
        ]

    (line,) = lines(*SEQUENTIAL, *words)
    named = (
        "pipeline.schedule=1f1b, pipeline.num_repeats=7, "
        "pipeline.delay_activation_forwarding=true have no effect"
    )
    assert line.startswith(named)
    assert lines(*SEQUENTIAL) == lines(words[0]) == []


def test_schedule_csv_runs_on_the_scheduled_engine(resolved, problems, tmp_path):
    path = tmp_path / "own.csv"
    assert problems(f"pipeline.schedule={path}") == {
        "pipeline.schedule": f"there is no file {path}"
    }
    path.write_text("0F0,0B0\n")
    assert resolved(f"pipeline.schedule={path}").pipeline.engine == "scheduled"


def test_schedule_in_a_file_of_another_name_is_refused_but_none_of_a_schedule(
    problems, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.txt", "lockstep_zb"):
        (tmp_path / name).touch()
    refusals = problems("pipeline.schedule=mine.txt")
    assert refusals["pipeline.schedule"].endswith("the name of a table's file ends in .csv")
    assert problems("pipeline.schedule=lockstep_zb", "pipeline.remat_policy=none") == {}


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (("pipeline.engine=sequential",), "pipeline.engine", "mesh.*.stage makes 2"),
        (("pipeline.engine=circul",), "pipeline.engine", "did you mean circular?"),
        (
            ("pipeline.engine=scheduled", "pipeline.schedule=1f1b"),
            "pipeline.engine",
            "schedule 1f1b (mpmd does)",
        ),
        (
            ("pipeline.schedule=zb_h1", "pipeline.num_repeats=2"),
            "pipeline.num_repeats",
            "one chunk per stage",
        ),
        (("pipeline.schedule=lockstep1f1b",), "pipeline.schedule", "did you mean lockstep_1f1b?"),
        (
            ("pipeline.engine=scheduled",),
            "pipeline.engine",
            "scheduled does not run schedule circular (circular does)",
        ),
        (("pipeline.skip_idle=true",), "pipeline.skip_idle", "pipeline.schedule=lockstep_1f1b"),
        (
            ("pipeline.overlap_slots=true",),
            "pipeline.overlap_slots",
            "its backwards begin after all forwards; use it with pipeline.schedule=lockstep_1f1b",
        ),
        (
            ("pipeline.schedule=gpipe", "pipeline.num_repeats=2"),
            "pipeline.num_repeats",
            "pipeline.num_repeats=1",
        ),
    ],
)
def test_engine_that_does_not_fit_the_schedule_is_refused(problems, words, key, message):
    refusals = problems(*words)
    assert list(refusals) == [key]
    assert message in refusals[key]


@pytest.mark.parametrize(
    ("words", "repeats", "per_stage"),
    [
        ((), 4, 1),
        (("pipeline.num_repeats=2",), 2, 2),
        (("pipeline.num_layers_per_stage=4",), 1, 4),
        (("pipeline.num_repeats=1", "pipeline.num_layers_per_stage=4"), 1, 4),
        (("pipeline.schedule=gpipe",), 1, 4),
        (("pipeline.layers_per_stage=[5,3]",), 1, 5),
        (("pipeline.layers_per_stage=[3,2,2,1]", "pipeline.num_repeats=1"), 2, 3),
        (SEQUENTIAL, 1, 8),
        ((*SEQUENTIAL, "pipeline.num_repeats=3", "pipeline.layers_per_stage=[1]"), 1, 8),
    ],
)
def test_layout_is_derived(resolved, words, repeats, per_stage):
    pipeline = resolved(*words).pipeline
    assert (pipeline.num_repeats, pipeline.num_layers_per_stage) == (repeats, per_stage)


AUTO = "pipeline.layers_per_stage=auto"


@pytest.mark.parametrize(
    ("words", "repeats"),
    [
        (("pipeline.schedule=1f1b",), 1),
        (("pipeline.schedule=interleaved_1f1b", "pipeline.num_repeats=2"), 2),
        (("pipeline.schedule=zb_v",), 2),
    ],
)
def test_layout_auto_stays_after_resolve(base, resolved, words, repeats):
    pipeline = resolved(AUTO, *words).pipeline
    assert (pipeline.layers_per_stage, pipeline.num_repeats) == (values.AUTO, repeats)
    assert "  layers_per_stage: auto " in print_config(load(base, [AUTO, *words]))


def test_layout_auto_without_a_layer_per_chunk_is_refused(problems):
    refusals = problems(AUTO, "pipeline.schedule=zb_v", "model.num_layers=3")
    assert refusals == {"model.num_layers": "3 layers are too few for 2 stages x 2 repeats"}


def test_notes_memory_limit_needs_auto_stages(base):
    line = "pipeline.memory_limit_gib has no effect without pipeline.layers_per_stage=auto"
    for words, expected in (((), True), ((AUTO,), False)):
        loaded = load(base, ["pipeline.schedule=1f1b", "pipeline.memory_limit_gib=16", *words])
        assert (line in notes(resolve(loaded, 4), loaded)) is expected


def test_notes_unit_times_need_a_schedule_that_follows_them(base):
    for schedule, has_effect in (("zb_h1", False), ("zb_h2", True)):
        words = [f"pipeline.schedule={schedule}", "pipeline.unit_times=auto"]
        loaded = load(base, words)
        line = f"pipeline.unit_times has no effect with pipeline.schedule={schedule}; "
        line += "the orders of zb_h2 and zb_v follow it"
        assert (line in notes(resolve(loaded, 4), loaded)) is not has_effect


def test_layout_auto_is_refused_by_circular(problems):
    refusals = problems(AUTO)
    assert list(refusals) == ["pipeline.layers_per_stage"]
    assert "auto is for the mpmd engine" in refusals["pipeline.layers_per_stage"]


@pytest.mark.parametrize(
    ("words", "key", "choices"),
    [
        (
            ("model.num_layers=9",),
            "model.num_layers",
            ["model.num_layers=8 or 10", "layers_per_stage=[5,4]"],
        ),
        (
            ("pipeline.num_repeats=3",),
            "pipeline.num_repeats",
            [
                "pipeline.num_repeats=4 pipeline.num_layers_per_stage=1",
                "pipeline.num_repeats=2 pipeline.num_layers_per_stage=2",
                "model.num_layers=6 or 12",
                "pipeline.layers_per_stage=[2,2,1,1,1,1]",
            ],
        ),
        (
            ("pipeline.num_layers_per_stage=3",),
            "pipeline.num_layers_per_stage",
            ["pipeline.num_layers_per_stage=4"],
        ),
        (
            ("pipeline.num_repeats=2", "pipeline.num_layers_per_stage=4"),
            "pipeline.num_repeats",
            ["pipeline.num_repeats=2 pipeline.num_layers_per_stage=2", "model.num_layers=16"],
        ),
        (
            ("pipeline.schedule=gpipe", "pipeline.num_layers_per_stage=3"),
            "pipeline.num_layers_per_stage",
            ["pipeline.num_repeats=1 pipeline.num_layers_per_stage=4", "model.num_layers=6 or 12"],
        ),
        (("model.num_layers=1",), "model.num_layers", ["model.num_layers=2"]),
    ],
)
def test_layers_indivisible_propose_the_nearest_choices(problems, words, key, choices):
    refusals = problems(*words)
    assert list(refusals) == [key]
    for choice in choices:
        assert choice in refusals[key]


@pytest.mark.parametrize(
    ("words", "paste"),
    [
        (("model.num_layers=9",), "model.num_layers=10"),
        (("model.num_layers=9",), "pipeline.layers_per_stage=[5,4]"),
        (("pipeline.num_repeats=3",), "pipeline.num_repeats=2 pipeline.num_layers_per_stage=2"),
        (("pipeline.num_repeats=3",), "pipeline.layers_per_stage=[2,2,1,1,1,1]"),
        (("pipeline.layers_per_stage=[4,3,1]",), "pipeline.layers_per_stage=[2,2,2,2]"),
    ],
)
def test_layers_indivisible_proposals_are_legal(problems, words, paste):
    assert any(
        paste.partition(" ")[0].partition("=")[2][:4] in message
        for message in problems(*words).values()
    )
    assert problems(*words, *paste.split()) == {}


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ("[3,3,2]", "3 chunks do not divide into 2 stages"),
        (
            "[4,3]",
            "adds up to 7, but model.num_layers=8; "
            "a split that fits: pipeline.layers_per_stage=[4,4]",
        ),
        ("[8,0]", "every chunk needs at least one layer"),
        ("[9,-1]", "every chunk needs at least one layer"),
    ],
)
def test_layout_uneven_that_does_not_add_up_is_refused(problems, chunks, message):
    assert message in problems(f"pipeline.layers_per_stage={chunks}")["pipeline.layers_per_stage"]


def test_layout_uneven_gpipe_has_one_chunk_per_stage(problems, resolved):
    words = ("pipeline.schedule=gpipe", "pipeline.layers_per_stage=[2,2,2,2]")
    assert "one chunk per stage" in problems(*words)["pipeline.layers_per_stage"]
    assert (
        resolved("pipeline.schedule=gpipe", "pipeline.layers_per_stage=[5,3]").pipeline.num_repeats
        == 1
    )


def test_num_stages_multiplies_over_slices(resolved):
    config = resolved("mesh.dcn.stage=2", "model.num_layers=12", devices=8, slices=2)
    assert config.pipeline.num_repeats == 3
    assert config.pipeline.num_microbatches == 4

"""Engine for a schedule; layers over stages, batches over microbatches and devices."""

SEQUENTIAL = "mesh.ici.stage=1 mesh.ici.fsdp=4"


def test_engine_auto_is_derived(resolved):
    engines = {
        "": "circular",
        "pipeline.schedule=gpipe": "circular",
        "pipeline.schedule=lockstep_1f1b": "scheduled",
        SEQUENTIAL: "sequential",
        f"{SEQUENTIAL} pipeline.engine=circular": "circular",
        "pipeline.schedule=1f1b": "mpmd",
        "pipeline.schedule=gpipe pipeline.engine=mpmd": "mpmd",
        f"{SEQUENTIAL} pipeline.schedule=1f1b": "sequential",
    }
    assert {words: resolved(*words.split()).pipeline.engine for words in engines} == engines


def test_schedule_csv_runs_on_the_engine_that_has_its_ticks(resolved, problems, tmp_path):
    path = tmp_path / "own.csv"
    assert problems(f"pipeline.schedule={path}") == {
        "pipeline.schedule": f"there is no file {path}"
    }
    for units, engine in {
        "0F0,0B0\n": "scheduled",
        "0F0,,0F1,0B0,,0B1\n,1F0,,,1F1\n": "mpmd",
        "0F0,0I0,0W0\n": "scheduled",
        "0F0,0F1,0B0,0B1\n": "mpmd",
    }.items():
        path.write_text(units)
        assert resolved(f"pipeline.schedule={path}").pipeline.engine == engine, units


SPLIT = "pipeline.layers_per_stage"
# Words -> key: remedies or reasons.
REFUSED = """\
pipeline.engine=sequential -> pipeline.engine: mesh.*.stage makes 2
pipeline.engine=circul -> pipeline.engine: did you mean circular?
pipeline.engine=scheduled pipeline.schedule=1f1b -> pipeline.engine: schedule 1f1b (mpmd does)
pipeline.schedule=zb_h1 pipeline.num_repeats=2 -> pipeline.num_repeats: must be 1 with schedule
    zb_h1
pipeline.schedule=lockstep1f1b -> pipeline.schedule: did you mean lockstep_1f1b?
model.num_layers=9 -> model.num_layers: model.num_layers=8 or 10 | pipeline.layers_per_stage=[5,4]
model.num_layers=1 -> model.num_layers: model.num_layers=2
pipeline.num_repeats=3 -> pipeline.num_repeats: pipeline.num_repeats=4
    pipeline.num_layers_per_stage=1 | pipeline.num_repeats=2 pipeline.num_layers_per_stage=2 |
    model.num_layers=6 or 12 | pipeline.layers_per_stage=[2,2,1,1,1,1]
pipeline.num_layers_per_stage=3 -> pipeline.num_layers_per_stage: pipeline.num_layers_per_stage=4
pipeline.layers_per_stage=[3,3,2] -> pipeline.layers_per_stage: has 3 chunks, not 2 for each of 2
    stages
pipeline.layers_per_stage=[4,3] -> pipeline.layers_per_stage: adds up to 7, but model.num_layers=8 |
    pipeline.layers_per_stage=[4,4]
pipeline.layers_per_stage=[8,0] -> pipeline.layers_per_stage: has a chunk without a layer
pipeline.schedule=gpipe pipeline.layers_per_stage=[2,2,2,2] -> pipeline.layers_per_stage: not 1 for
    each
pipeline.layers_per_stage=auto -> pipeline.layers_per_stage: auto is for the mpmd engine
pipeline.layers_per_stage=auto pipeline.schedule=zb_v model.num_layers=3 -> model.num_layers: 3
    layers are too few for 2 stages x 2 repeats
"""


def test_rules_of_stages_refuse_one_key_with_remedies(unlike):
    assert unlike(REFUSED, alone=True) == {}


def test_layout_is_derived(resolved):
    across = resolved("mesh.dcn.stage=2", "model.num_layers=12", devices=8, slices=2).pipeline
    assert (across.num_repeats, across.num_microbatches) == (3, 4)
    layouts = {  # repeats and layers per stage
        "": (4, 1),
        "pipeline.num_repeats=2": (2, 2),
        "pipeline.num_layers_per_stage=4": (1, 4),
        "pipeline.num_repeats=1 pipeline.num_layers_per_stage=4": (1, 4),
        "pipeline.schedule=gpipe": (1, 4),
        f"pipeline.schedule=gpipe {SPLIT}=[5,3]": (1, 5),
        f"{SPLIT}=[5,3]": (1, 5),
        f"{SPLIT}=[3,2,2,1] pipeline.num_repeats=1": (2, 3),
        SEQUENTIAL: (1, 8),
        f"{SEQUENTIAL} pipeline.num_repeats=3 {SPLIT}=[1]": (1, 8),
    }
    pipelines = {words: resolved(*words.split()).pipeline for words in layouts}
    assert {w: (p.num_repeats, p.num_layers_per_stage) for w, p in pipelines.items()} == layouts


def test_layers_indivisible_proposals_are_legal(problems):
    proposals = [
        ("model.num_layers=9", "model.num_layers=10"),
        ("model.num_layers=9", f"{SPLIT}=[5,4]"),
        ("pipeline.num_repeats=3", "pipeline.num_repeats=2 pipeline.num_layers_per_stage=2"),
        ("pipeline.num_repeats=3", f"{SPLIT}=[2,2,1,1,1,1]"),
        (f"{SPLIT}=[4,3,1]", f"{SPLIT}=[2,2,2,2]"),
    ]
    for words, paste in proposals:
        assert problems(words, *paste.split()) == {}, paste
    assert f"{SPLIT}=[2,2,2,2]" in problems(f"{SPLIT}=[4,3,1]")[SPLIT]


def test_num_microbatches_is_derived(resolved):
    sequential = "mesh.ici.stage=1 mesh.ici.fsdp=4"
    lockstep = "pipeline.schedule=lockstep_1f1b"
    counts = {
        "": 2,
        "pipeline.delay_activation_forwarding=true": 4,
        sequential: 1,
        f"{sequential} pipeline.num_microbatches=4": 4,
        "pipeline.num_microbatches=8": 8,
        f"pipeline.num_microbatches=1 {lockstep}": 1,
        f"pipeline.num_microbatches=5 {lockstep} data.global_batch_size=10": 5,
    }
    assert {w: resolved(*w.split()).pipeline.num_microbatches for w in counts} == counts


def test_num_microbatches_no_multiple_of_the_stages_is_refused_by_circular(unlike):
    key = "pipeline.num_microbatches"
    table = {
        f"{key}=3": (key, "at least 2; got 3, nearest legal: 2 or 4"),
        f"{key}=1": (key, "got 1, nearest legal: 2"),
        f"{key}=2 pipeline.delay_activation_forwarding=true": (key, "at least 4 with delay"),
    }
    assert unlike(table) == {}


def test_train_batch_indivisible_proposes_sizes_and_counts(problems):
    refusals = problems("pipeline.num_microbatches=6")
    assert refusals == {
        "data.global_batch_size": "16 is not divisible by num_microbatches x fsdp = "
        "6 x 2 = 12; nearest legal: 12 or 24, or pipeline.num_microbatches=4 or 8"
    }
    for word in ("data.global_batch_size=12", "data.global_batch_size=24"):
        assert problems("pipeline.num_microbatches=6", word) == {}
    for count in (4, 8):
        assert problems(f"pipeline.num_microbatches={count}") == {}
    # Devices alone do not divide it: no number of microbatches helps.
    message = problems("data.global_batch_size=15")["data.global_batch_size"]
    assert message.endswith("= 4; nearest legal: 12 or 16")


def test_batch_ramp_that_does_not_fit_is_refused(unlike):
    key, lockstep = "data.batch_ramp", "pipeline.schedule=lockstep_1f1b"
    form = (key, r"[[0, sequences], ..., [after step, 16]], rising")
    table = {
        f"{key}=[[0,4],[9,8]]": form,
        f"{key}=[[1,8],[9,16]]": form,
        f"{key}=[[0,8],[0,16]]": form,
        f"{key}=[[0,6],[9,16]]": form,
        f"{key}=[[0],[9,16]]": form,
        f"{key}=[8,16]": (key, "expected a list such as [[0, 16], [1000, 32]], got '8'"),
        f"{key}=[[0,1],[9,16]] {lockstep}": (key, "fsdp = 1 x 2 = 2; nearest legal: 2"),
        f"{key}=[[0,2],[9,16]]": (key, "2 is not divisible by num_microbatches x fsdp = 2 x 2"),
        f"{key}=[[0,8],[9,16]] mesh.elastic.axes=[fsdp]": ("mesh.elastic.axes", f"out, or {key}"),
        f"{key}=[[0,8],[9,16]] epochs=1": ("epochs", "give steps instead"),
    }
    assert unlike(table) == {}


def test_eval_batch_is_the_train_batch_unless_given_and_divides_over_devices_only(
    problems, resolved
):
    assert resolved().eval.global_batch_size == 16
    assert resolved("eval.global_batch_size=4").eval.global_batch_size == 4
    assert problems("eval.global_batch_size=6", "pipeline.num_microbatches=4") == {}
    assert "nearest legal: 2 or 4" in problems("eval.global_batch_size=3")["eval.global_batch_size"]
    assert problems("eval.global_batch_size=3", "eval.every=0") == {}

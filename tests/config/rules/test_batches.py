"""Number of microbatches, and batches that microbatches and devices divide."""


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
        "data.global_batch_size": "16 is not divisible by num_microbatches x data x fsdp = "
        "6 x 1 x 2 = 12; nearest legal: 12 or 24, or pipeline.num_microbatches=4 or 8"
    }
    for word in ("data.global_batch_size=12", "data.global_batch_size=24"):
        assert problems("pipeline.num_microbatches=6", word) == {}
    for count in (4, 8):
        assert problems(f"pipeline.num_microbatches={count}") == {}
    # Devices alone do not divide it: no number of microbatches helps.
    message = problems("data.global_batch_size=15")["data.global_batch_size"]
    assert message.endswith("= 4; nearest legal: 12 or 16")


def test_train_batch_divides_over_slices(problems):
    words = ("mesh.dcn.data=2", "data.global_batch_size=12")
    assert "2 x 2 x 2 = 8" in problems(*words, devices=8, slices=2)["data.global_batch_size"]


def test_eval_batch_is_the_train_batch_unless_given_and_divides_over_devices_only(
    problems, resolved
):
    assert resolved().eval.global_batch_size == 16
    assert resolved("eval.global_batch_size=4").eval.global_batch_size == 4
    assert problems("eval.global_batch_size=6", "pipeline.num_microbatches=4") == {}
    assert "nearest legal: 2 or 4" in problems("eval.global_batch_size=3")["eval.global_batch_size"]
    assert problems("eval.global_batch_size=3", "eval.every=0") == {}

"""Rules across keys, and the two derivations that need neither mesh nor pipeline."""

import pytest


@pytest.mark.parametrize("name", ["a/b", "../x", "..", ".hidden", "", "a b", "-x", "x\n"])
def test_a_run_name_is_no_path(problems, name):
    assert "is not a name without a path" in problems(f"run_name={name}")["run_name"]


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (
            ("model.num_query_heads=6",),
            "model.num_kv_heads",
            "does not divide model.num_query_heads=6; legal are 1, 2, 3, 6",
        ),
        (
            ("model.embed_dim=66",),
            "model.embed_dim",
            "not divisible by model.num_query_heads=4; nearest legal: 64 or 68",
        ),
        (("model.head_dim=15",), "model.head_dim", "must be even"),
        (("model.embed_dim=4",), "model.head_dim", "must be even"),
        (
            ("optimizer.warmup_steps=101",),
            "optimizer.warmup_steps",
            "101 is more than optimizer.decay_steps=100",
        ),
        (("telemetry.profile_steps=[5]",), "telemetry.profile_steps", "[first, last]"),
        (("telemetry.profile_steps=[7,5]",), "telemetry.profile_steps", "first <= last"),
        (("telemetry.profile_steps=[99,101]",), "telemetry.profile_steps", "last <= steps=100"),
        (("telemetry.profile_steps=[0,5]",), "telemetry.profile_steps", "1 <= first"),
        (("checkpoint.resume=mist",), "checkpoint.resume", "did you mean must?"),
        (("checkpoint.resume=-3",), "checkpoint.resume", "the number of a step"),
        (
            ("checkpoint.keep_every=75",),
            "checkpoint.keep_every",
            "a multiple of checkpoint.every=100",
        ),
        (
            ("checkpoint.keep_every=9", "checkpoint.every=0"),
            "checkpoint.keep_every",
            "expected 0, since",
        ),
        (
            ("checkpoint.keep_best=1", "eval.every=0"),
            "checkpoint.keep_best",
            "give eval.every, which is 0",
        ),
        (
            ("checkpoint.keep_best=1", "checkpoint.every=0"),
            "checkpoint.keep_best",
            "give checkpoint.every, which is 0",
        ),
        (
            ("checkpoint.keep_best=1", "eval.every=30"),
            "checkpoint.keep_best",
            "make one of them a multiple",
        ),
        (("data.tokenizer=bytes",), "data.tokenizer", "did you mean byte?"),
        (
            ("data.path=a.txt",),
            "data.path",
            "data.source=python_stdlib reads no path: set data.source=text (or ",
        ),
        (
            ("data.path=a.txt", "data.source=synthetic"),
            "data.path",
            "data.source=synthetic reads no path",
        ),
        (("mesh.ici.expert=2",), "mesh.ici.expert", "must be 1: the axis splits the experts"),
        (
            ("mesh.ici.context=2", "mesh.dcn.context=3", "data.sequence_length=100"),
            "data.sequence_length",
            "100 is not divisible by 2 x mesh.*.context = 12; nearest legal: 96 or 108",
        ),
        (
            (
                "mesh.ici.context=2",
                "sharding.logical_axis_rules=[[activation_length, [context, tensor]]]",
            ),
            "sharding.logical_axis_rules",
            "activation_length lies over ['context', 'tensor']; use [activation_length, [context]]",
        ),
        (("mesh.dcn.expert=2",), "mesh.dcn.expert", "must be 1"),
        (
            ("model.rope_scaling.factor=8", "model.rope_scaling.low_freq_factor=4"),
            "model.rope_scaling.low_freq_factor",
            "less than model.rope_scaling.high_freq_factor=4.0",
        ),
    ],
)
def test_what_is_refused(problems, words, key, message):
    assert message in problems(*words)[key]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[[embed, [fsdp, fsdp]]]", "uses a mesh axis twice"),
        ("[[embed, [fsdp]], [embed, []]]", "'embed' has more than one rule"),
        ("[[embed, [fdsp]]]", "there is no mesh axis 'fdsp'; did you mean fsdp?"),
        ("[[embed]]", "is not of the form [logical axis, [mesh axes]]"),
        ("[embed]", "is not of the form"),
        ("[[embed, fsdp]]", "is not of the form"),
        ("[[[embed], [fsdp]]]", "is not of the form"),
    ],
)
def test_logical_axis_rules(problems, rules, message):
    assert (
        message in problems(f"sharding.logical_axis_rules={rules}")["sharding.logical_axis_rules"]
    )


@pytest.mark.parametrize("value", ["auto", "never", "must", "0", "1200"])
def test_ways_to_resume(resolved, value):
    assert resolved(f"checkpoint.resume={value}").checkpoint.resume == value


@pytest.mark.parametrize("evaluated", [50, 100, 300])
def test_ways_to_keep(resolved, evaluated):
    config = resolved(
        "checkpoint.keep_every=200", "checkpoint.keep_best=2", f"eval.every={evaluated}"
    ).checkpoint
    assert (config.keep_every, config.keep_best) == (200, 2)


@pytest.mark.parametrize("value", ["byte", "tokenizer.json", "some/directory"])
def test_tokenizers(resolved, value):
    assert resolved(f"data.tokenizer={value}").data.tokenizer == value


def test_head_dim_is_derived_or_free(resolved):
    assert resolved().model.head_dim == 16
    assert resolved("model.embed_dim=66", "model.head_dim=32").model.head_dim == 32


@pytest.mark.parametrize(
    ("words", "warmup", "decay"),
    [
        ((), 5, 100),
        (("steps=10",), 0, 10),
        (("optimizer.decay_steps=400",), 20, 400),
        (("optimizer.warmup_steps=30",), 30, 100),
    ],
)
def test_learning_rate_steps_follow_steps(resolved, words, warmup, decay):
    optimizer = resolved(*words).optimizer
    assert (optimizer.warmup_steps, optimizer.decay_steps) == (warmup, decay)


@pytest.mark.parametrize("key", ["output_dir", "data.cache_dir"])
def test_an_object_store_is_no_directory(problems, key):
    """As a path, it would become a local directory of that name."""
    assert "'gs://bucket/runs' is not a directory" in problems(f"{key}=gs://bucket/runs")[key]

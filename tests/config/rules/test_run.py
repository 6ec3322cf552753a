"""Rules about the run: its name, directories, data, checkpoints and learning rate."""

import pytest

from maxpipe.config import resolve


@pytest.mark.parametrize("name", ["a/b", "../x", "..", ".hidden", "", "a b", "-x", "x\n"])
def test_run_name_with_path_is_refused(problems, name):
    assert "is not a name without a path" in problems(f"run_name={name}")["run_name"]


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (
            ("optimizer.warmup_steps=101",),
            "optimizer.warmup_steps",
            "101 is more than optimizer.decay_steps=100",
        ),
        (("telemetry.profile_steps=[5]",), "telemetry.profile_steps", "[first, last]"),
        (("telemetry.profile_steps=[7,5]",), "telemetry.profile_steps", "first <= last"),
        (("telemetry.profile_steps=[99,101]",), "telemetry.profile_steps", "last <= steps=100"),
        (("telemetry.profile_steps=[0,5]",), "telemetry.profile_steps", "1 <= first"),
        (
            ("telemetry.wandb=p", "telemetry.log_every=0"),
            "telemetry.wandb",
            "gets every telemetry.log_every-th step, which is 0",
        ),
        (
            ("telemetry.mlflow=e", "telemetry.log_every=0"),
            "telemetry.mlflow",
            "gets every telemetry.log_every-th step, which is 0",
        ),
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
        (("checkpoint.mirror=s3://bucket/r[12]",), "checkpoint.mirror", "take for a pattern"),
        (("checkpoint.mirror=s3://bucket/runs/*",), "checkpoint.mirror", "take for a pattern"),
        (("checkpoint.mirror=gs://b?/runs",), "checkpoint.mirror", "take for a pattern"),
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
    ],
)
def test_rule_refuses(problems, words, key, message):
    assert message in problems(*words)[key]


@pytest.mark.parametrize("value", ["auto", "never", "must", "0", "1200"])
def test_resume_takes_words_and_steps(resolved, value):
    assert resolved(f"checkpoint.resume={value}").checkpoint.resume == value


@pytest.mark.parametrize("evaluated", [50, 100, 300])
def test_keep_takes_multiples_of_the_interval(resolved, evaluated):
    config = resolved(
        "checkpoint.keep_every=200", "checkpoint.keep_best=2", f"eval.every={evaluated}"
    ).checkpoint
    assert (config.keep_every, config.keep_best) == (200, 2)


@pytest.mark.parametrize("value", ["byte", "tokenizer.json", "some/directory"])
def test_tokenizer_takes_names_and_paths(resolved, value):
    assert resolved(f"data.tokenizer={value}").data.tokenizer == value


def test_tokenizer_of_a_folder_must_be_there(problems, resolved, tmp_path):
    words = f"data.tokenizer=hf:{tmp_path}"
    remedy = "give hf:DIR with a downloaded folder that has a tokenizer.json"
    expected = f"there is no {tmp_path}/tokenizer.json; {remedy}"
    assert problems(words)["data.tokenizer"] == expected
    (tmp_path / "tokenizer.model").touch()
    remedy = f"data.tokenizer={tmp_path}/tokenizer.model takes the SentencePiece model"
    assert remedy in problems(words)["data.tokenizer"]
    (tmp_path / "tokenizer.json").touch()
    assert resolved(words).data.tokenizer == f"hf:{tmp_path}"


@pytest.mark.parametrize(
    ("words", "warmup", "decay"),
    [
        ((), 5, 100),
        (("steps=10",), 0, 10),
        (("optimizer.decay_steps=400",), 20, 400),
        (("optimizer.warmup_steps=30",), 30, 100),
    ],
)
def test_learning_rate_steps_are_derived_from_steps(resolved, words, warmup, decay):
    optimizer = resolved(*words).optimizer
    assert (optimizer.warmup_steps, optimizer.decay_steps) == (warmup, decay)


@pytest.mark.parametrize("key", ["output_dir", "data.cache_dir", "compile.cache_dir"])
def test_directory_in_an_object_store_is_refused(problems, key):
    """As a path, it would become a local directory of that name."""
    assert "'gs://bucket/runs' is not a directory" in problems(f"{key}=gs://bucket/runs")[key]


def test_output_directory_without_a_name_is_refused(problems):
    """Such as that of a variable which is not set."""
    assert "is empty; name a directory" in problems("output_dir=")["output_dir"]
    assert problems("output_dir=.") == {}


def test_keep_best_names_all_that_it_lacks(problems):
    refusals = problems("checkpoint.keep_best=1", "eval.every=0", "checkpoint.every=0")
    assert "give eval.every and checkpoint.every, which is 0" in refusals["checkpoint.keep_best"]


RANDOM = "data.source=synthetic"
_MIXTURES = {
    "random": "data.mixture=[{source: synthetic, weight: 1}]",
    "text": "data.mixture=[{source: synthetic, weight: 1}, {source: python_stdlib, weight: 1}]",
}


@pytest.mark.parametrize(
    ("words", "tokenizer"),
    [
        ((RANDOM, "model.vocab_size=32"), "ids:32"),
        ((RANDOM, "model.vocab_size=320", "model.unpadded_vocab_size=32"), "ids:32"),
        ((_MIXTURES["random"], "model.vocab_size=32"), "ids:32"),
        ((RANDOM, "model.vocab_size=258"), "ids:258"),
        ((RANDOM, "model.vocab_size=259"), "byte"),
        ((RANDOM, "model.vocab_size=32", "data.tokenizer=ids:16"), "ids:16"),
        (("model.vocab_size=32",), "byte"),
        ((_MIXTURES["text"], "model.vocab_size=32"), "byte"),
    ],
)
def test_random_ids_of_a_small_vocabulary_need_no_tokenizer(resolved, words, tokenizer):
    config = resolved(*words)
    assert config.data.tokenizer == tokenizer
    assert resolve(config, 4) == config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.tokenizer=ids:64", "model.vocab_size=32"), "ids:64 has ids that model.vocab_size"),
        (("data.tokenizer=ids:1",), "is not of the form ids:N"),
        (("data.tokenizer=ids:many",), "is not of the form ids:N"),
        (("data.tokenizer=ids:" + "9" * 5000,), "is not of the form ids:N"),
    ],
)
def test_plain_ids_that_the_model_has_not_are_refused(problems, words, message):
    assert message in problems(RANDOM, *words)["data.tokenizer"]


def test_column_is_refused_for_sources_that_have_none_to_choose(problems, resolved):
    refused = problems("data.source=text", "data.path=a", "data.column=body")
    assert "only datasets, datasets_chat do" in refused["data.column"]
    words = ("data.source=datasets", "data.path=a", "data.column=body")
    assert resolved(*words).data.column == "body"
    mixed = (
        "data.mixture=[{source: python_stdlib, weight: 1}, {source: datasets, path: a, weight: 1}]"
    )
    assert resolved(mixed, "data.column=body").data.column == "body"
    # The validation set is read with data.source, next to a mixture as well.
    words = ("data.mixture=[{source: text, path: a, weight: 1}]", "data.column=body")
    assert "data.column" in problems(*words, "data.source=datasets")
    words = (*words, "data.source=datasets", "data.eval_path=b")
    assert resolved(*words).data.column == "body"

"""Rules about the run: its name, directories, data, checkpoints and learning rate."""

from maxpipe.config import resolve

RANDOM = "data.source=synthetic"
MIXED = 'data.mixture=[{"source":"text","path":"a","weight":1}]'
BEST = "checkpoint.keep_best"
# Words -> key: remedies or reasons.
REFUSED = """\
mesh.elastic.axes=[stage] -> mesh.elastic.axes: 'stage' is not one of data, fsdp
mesh.elastic.axes=[data] checkpoint.every=0 -> mesh.elastic.axes: needs checkpoint.every or
mesh.elastic.axes=[data] compile.load=step -> mesh.elastic.axes: leave out one of the two keys
optimizer.warmup_steps=101 -> optimizer.warmup_steps: than optimizer.decay_steps=100
optimizer.moment_dtype=bfloat16 optimizer.name=adafactor -> optimizer.moment_dtype: no effect with
    optimizer.name=adafactor, only with adamw, lion, muon, sgd
optimizer.moment_dtype=bfloat16 optimizer.name=sgd optimizer.beta1=0 -> optimizer.moment_dtype:
    keeps no moments; leave it out
telemetry.profile_steps=[7,5] -> telemetry.profile_steps: first <= last
telemetry.profile_steps=[99,101] -> telemetry.profile_steps: last <= steps=100
telemetry.wandb=p telemetry.log_every=0 -> telemetry.wandb: needs telemetry.log_every
checkpoint.resume=mist -> checkpoint.resume: must or the number of a step
checkpoint.keep_every=75 -> checkpoint.keep_every: a multiple of checkpoint.every=100
checkpoint.keep_every=9 checkpoint.every=0 -> checkpoint.keep_every: needs checkpoint.eve
checkpoint.mirror=s3://bucket/r[12] -> checkpoint.mirror: take as a pattern
checkpoint.mirror=/a/directory -> checkpoint.mirror: such as s3://bucket/runs
checkpoint.keep_best=1 eval.every=0 -> checkpoint.keep_best: needs eval.every
checkpoint.keep_best=1 checkpoint.every=0 -> checkpoint.keep_best: needs checkpoint.every
checkpoint.keep_best=1 eval.every=30 -> checkpoint.keep_best: make one of them a multiple
data.path=a.txt -> data.path: no effect with data.source=python_stdlib, only with array_
data.mixture=[{"source":"text","path":"a","weight":1}] data.path=a.txt -> data.mixture: put the path
    into an entry
data.mixture=[{"source":"text","path":"a","weight":1}] data.mixture_by=tokens -> data.mixture_by:
    documents are, not text; python -m maxpipe.tokenize encode
data.source=text data.path=a data.column=body -> data.column: only with datasets, datasets
data.mixture=[{"source":"text","path":"a","weight":1}] data.column=body data.source=datasets ->
    data.column: with data.source=text, only
data.chat_template=chatml -> data.chat_template: only with chat, datasets_chat, python_he
data.tokenizer=bytes -> data.tokenizer: did you mean byte?
data.source=synthetic data.tokenizer=ids:64 model.vocab_size=32 -> data.tokenizer: model.vocab_size
output_dir=gs://bucket/runs -> output_dir: 'gs://bucket/runs' is not a directory
data.cache_dir=gs://bucket/runs -> data.cache_dir: 'gs://bucket/runs' is not a directory
compile.cache_dir=gs://bucket/runs -> compile.cache_dir: 'gs://bucket/runs' is not a directory
"""
LONG = {
    f"{RANDOM} data.tokenizer=ids:{'9' * 5000}": ("data.tokenizer", "is not of the form ids:N"),
    "output_dir=": ("output_dir", "is not a directory"),  # such as that of a variable not set
    f"output_dir={128 * chr(233)}": ("output_dir", "is not a directory"),  # of 256 bytes
}
NAMES = ("a/b", "../x", ".", ".hidden", "/tmp/x", "", "a b", "-x", "x\n", "caf\u00e9", "x" * 256)
ACCEPTED = (
    "output_dir=.",
    "mesh.elastic.axes=[fsdp] checkpoint.every=0 checkpoint.every_minutes=5",
    *(f"checkpoint.resume={value}" for value in ("auto", "never", "must", "0", "1200")),
    *(f"checkpoint.keep_every=200 {BEST}=2 eval.every={evaluated}" for evaluated in (50, 300)),
    *(f"data.tokenizer={name}" for name in ("byte", "tokenizer.json", "a/directory")),
    "data.source=datasets data.path=a data.column=body",
    'data.mixture_by=tokens data.mixture=[{"source":"megatron","path":"a","weight":1},'
    '{"source":"token_bin","path":"b","weight":1e-4}]',
    # The validation set is read with data.source, next to a mixture as well.
    f"{MIXED} data.column=body data.source=datasets data.eval_path=b",
    f'{MIXED[:-1]},{{"source":"datasets","path":"a","weight":1}}] data.column=body',
)


def test_rules_of_the_run_refuse_with_key_and_remedy(unlike, problems):
    assert unlike(REFUSED) == unlike(LONG) == {}
    assert [name for name in NAMES if "run_name" not in problems(f"run_name={name}")] == []
    assert [words for words in ACCEPTED if problems(*words.split())] == []


def test_tokenizer_of_a_folder_must_be_there(problems, resolved, tmp_path):
    words = f"data.tokenizer=hf:{tmp_path}"
    expected = f"there is no {tmp_path}/tokenizer.json; give a folder that has a tokenizer.json"
    assert problems(words)["data.tokenizer"].startswith(expected)
    (tmp_path / "tokenizer.json").touch()
    assert resolved(words).data.tokenizer == f"hf:{tmp_path}"


def test_learning_rate_steps_are_derived_from_steps(resolved):
    table = {
        "": (5, 100),
        "steps=10": (0, 10),
        "optimizer.decay_steps=400": (20, 400),
        "optimizer.warmup_steps=30": (30, 100),
    }
    optimizers = {words: resolved(*words.split()).optimizer for words in table}
    assert {words: (o.warmup_steps, o.decay_steps) for words, o in optimizers.items()} == table


def test_random_ids_of_a_small_vocabulary_need_no_tokenizer(resolved):
    mixture = "data.mixture=[{source: synthetic, weight: 1}]"
    with_text = mixture.replace("]", ", {source: python_stdlib, weight: 1}]")
    table = {
        (RANDOM, "model.vocab_size=32"): "ids:32",
        (RANDOM, "model.vocab_size=320", "model.unpadded_vocab_size=32"): "ids:32",
        (mixture, "model.vocab_size=32"): "ids:32",
        (RANDOM, "model.vocab_size=259"): "byte",
        (RANDOM, "model.vocab_size=32", "data.tokenizer=ids:16"): "ids:16",
        (with_text, "model.vocab_size=32"): "byte",
    }
    configs = {words: resolved(*words) for words in table}
    assert {words: config.data.tokenizer for words, config in configs.items()} == table
    assert [config for config in configs.values() if resolve(config, 4) != config] == []

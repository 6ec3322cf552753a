"""A translation loads, resolves and has MaxText's sizes; what cannot be is refused, all at once."""

import re
from pathlib import Path

import pytest

from maxpipe.config import Config, ConfigError
from maxpipe.config.options import get
from maxpipe.config.values import words_of
from maxpipe.migration.configuration import translate
from maxpipe.migration.model import SHIPPED
from maxpipe.migration.read import read_maxtext

SHIPPED_MODELS = Path(__file__).parents[2] / "configs" / "models"


# Words of MaxText -> our keys that they set.
SETS = """\
hardware=tpu -> run_name=maxtext steps=150001 eval.every=0 data.source=synthetic
    data.sequence_length=2048 data.global_batch_size=96 pipeline.remat_policy=full
    optimizer.name=adamw optimizer.learning_rate=3e-05 optimizer.schedule=cosine optimizer.beta1=0.9
    optimizer.beta2=0.95 optimizer.weight_decay=0.1 optimizer.warmup_steps=15000
    optimizer.decay_steps=150001 checkpoint.every=10000 checkpoint.keep_every=10000
model_name=llama3-8b -> model.num_layers=32 model.embed_dim=4096 model.mlp_dim=14336
    model.num_query_heads=32 model.num_kv_heads=8 model.head_dim=128 model.vocab_size=128256
    model.rope_theta=500000 model.norm_eps=1e-05 model.dtype=bfloat16 model.param_dtype=float32
    model.rope_scaling.factor=1.0
model_name=qwen3-0.6b -> model.qk_norm=true model.tie_embeddings=true model.norm_eps=1e-06
steps=100 -> steps=100 optimizer.decay_steps=100 optimizer.warmup_steps=10
steps=-1 learning_rate_schedule_steps=50 -> steps=50 optimizer.decay_steps=50
steps=100 lr_schedule_type=wsd wsd_decay_steps_fraction=0.27 -> optimizer.schedule=wsd
    optimizer.stable_fraction=0.7
opt_type=sgd -> optimizer.beta1=0 optimizer.weight_decay=0
opt_type=muon muon_consistent_rms=0.2 muon_weight_decay=0.3 -> optimizer.name=muon
    optimizer.weight_decay=0.3
adam_b1=0.8 adam_eps=1e-6 -> optimizer.beta1=0.8 optimizer.eps=1e-06
gradient_clipping_threshold=0 -> optimizer.grad_clip_norm=0
skip_step_on_spikes=true skip_step_interval=64 -> optimizer.spike_window=64
    optimizer.spike_deviations=6
abort_on_nan_loss=false abort_on_inf_loss=false -> optimizer.max_consecutive_skips=0
model_name=llama3-8b rope_type=llama3.1 -> model.rope_scaling.factor=8
model_name=llama3.1-8b -> model.rope_scaling.factor=8 run_name=llama3.1-8b
model_name=llama3.1-8b rope_use_scale=false -> model.rope_scaling.factor=1.0
    model.rope_interleaved=true
global_parameter_scale=16 -> model.num_layers=32 model.embed_dim=4096 model.mlp_dim=28672
dropout_rate=0.1 -> model.dropout=0.1
attn_logits_soft_cap=50 attention_sink=true -> model.attention_soft_cap=50
    model.attention_sinks=true
mlp_activations=[gelu,linear] -> model.mlp_activation=gelu_tanh
logits_via_embedding=true base_emb_dim=1024 final_logits_soft_cap=30 -> model.logit_scale=0.03125
    model.logit_soft_cap=30
logits_via_embedding=true normalize_embedding_logits=false -> model.logit_scale=1.0
    model.tie_embeddings=true
rope_linear_scaling_factor=4 -> model.rope_scaling.type=linear model.rope_scaling.factor=4
model_name=mixtral-8x7b ici_expert_parallelism=4 routed_bias=true mlp_bias=true -> mesh.ici.expert=4
    model.moe.experts=8 model.moe.per_token=2 model.moe.mlp_dim=14336 model.moe.router=topk_softmax
    model.moe.capacity_factor=0.0 model.moe.logit_bias=true model.mlp_bias=true
model_name=qwen3-30b-a3b global_parameter_scale=8 -> model.num_layers=96 model.moe.experts=128
    model.moe.per_token=8 model.moe.mlp_dim=1536 model.qk_norm=true
model_name=gemma2-9b local_rope_max_timescale=5000 -> model.num_layers=42
    model.layer_pattern=[local,global] model.attention_window=4096 model.attention_soft_cap=50.0
    model.logit_soft_cap=30.0 model.logit_scale=0.016703827619526525 model.mlp_activation=gelu_tanh
    model.norm_placement=sandwich model.rope_theta_local=5000
model_name=gemma2-9b ici_pipeline_parallelism=4 num_layers_per_pipeline_stage=1
    pipeline_parallel_layers=20 -> pipeline.num_layers_per_stage=2 pipeline.parallel_layers=40
dropout_rate=0.1 enable_dropout=false -> model.dropout=0
attention=flash -> model.attention=splash
attention=cudnn_flash_te hardware=gpu -> model.attention=auto
per_device_batch_size=0.5 ici_fsdp_parallelism=1 ici_tensor_parallelism=8 ->
    data.global_batch_size=4
gradient_accumulation_steps=3 -> data.global_batch_size=288 pipeline.num_microbatches=3
eval_interval=10 eval_steps=4 eval_per_device_batch_size=2 -> eval.every=10 eval.batches=4
    eval.global_batch_size=16
enable_checkpointing=false -> checkpoint.every=0
max_num_checkpoints_to_keep=5 -> checkpoint.keep=5 checkpoint.keep_every=0
base_output_directory=gs://bucket/runs -> checkpoint.mirror=gs://bucket/runs
base_output_directory=/runs run_name=one -> output_dir=/runs run_name=one
load_parameters_path=/x/9 -> init_from=maxtext:/x/9
jax_cache_dir= -> compile.cache_dir=off
jax_cache_dir=gs://bucket/cache -> compile.cache_dir=
profiler=xplane profiler_steps=3 skip_first_n_steps_for_profiler=4 -> telemetry.profile_steps=[5,7]
hardware=cpu -> mesh.simulated_devices=8
gradient_accumulation_steps=3 pipeline.num_microbatches=2 seed=7 model.z_loss=1e-4 ->
    pipeline.num_microbatches=2 data.global_batch_size=288 seed=7 model.z_loss=0.0001
vocab_size=32 -> model.vocab_size=32 data.source=synthetic
dataset_type=hf hf_path=json hf_train_files=a.jsonl tokenizer_path=t.json -> data.source=jsonl
    data.path=a.jsonl data.tokenizer=t.json
dataset_type=hf hf_path=roneneldan/TinyStories tokenizer_path=t.json -> data.source=datasets
    data.path=hf:roneneldan/TinyStories
dataset_type=hf hf_path=text hf_train_files=a.txt tokenizer_path=byte -> data.tokenizer=byte
dataset_type=hf hf_path=a/b tokenizer_type=huggingface tokenizer_path=a/Llama ->
    data.tokenizer=hf:a/Llama
dataset_type=hf hf_path=allenai/c4 hf_name=en train_split=train[:1%] tokenizer_path=t.json ->
    data.source=datasets data.path=hf:allenai/c4:en:train[:1%]
dataset_type=grain grain_file_type=parquet grain_train_files=*.parquet grain_worker_count=4
    tokenizer_path=t.model -> data.source=parquet data.path=*.parquet data.num_workers=4
"""


def test_words_set_our_keys(translated):
    table = dict(re.split(" +-> +", line) for line in re.sub(r"\n +", " ", SETS).splitlines())
    written = {}
    for words, expected in table.items():
        config = translated(*words.split()).config
        values = {key: get(config, key) for key in re.findall(r"(?:^| )([^ =]+)=", expected)}
        written[words] = words_of(values).replace("', '", ",").replace("'", "").replace(", ", ",")
    assert written == table


REFUSED = {  # words of MaxText, for eight devices: parts of the advice by key
    "num_experts=8": {"num_experts": "llama2 has no experts; mixtral and qwen3_moe have"},
    "mtp_num_layers=1": {"mtp_num_layers": "docs/families.md says"},
    "shared_experts=1": {"shared_experts": "keys of model.* have it"},
    "attention_type=mla": {"attention_type": "model.attention_kind=mla"},
    "attention_type=chunk": {"attention_type": "model.layer_pattern"},
    "mlp_activations=[relu,linear]": {"mlp_activations": "use [silu, linear] or [gelu"},
    "ici_diloco_parallelism=2": {"ici_diloco_parallelism": "tensor or expert"},
    "ici_tensor_transpose_parallelism=2": {
        "ici_tensor_transpose_parallelism": "must be 1: the mesh"
    },
    "model.layers=2": {"model.layers": "unknown key; did you mean model.num_layers"},
    "model.num_layers=two": {"model.num_layers": "expected a whole number"},
    "decoder_block=mixtral base_moe_mlp_dim=64": {
        "base_moe_mlp_dim": "64 differs from base_mlp_dim"
    },
    "model_name=mixtral-8x7b capacity_factor=1.5 sparse_matmul=false": {
        "capacity_factor": "model.moe.capacity_factor"
    },
    "model_name=mixtral-8x7b load_parameters_path=/a": {"load_parameters_path": "init_from=hf:DIR"},
    "decoder_block=gemma2 sliding_window_size=8 use_post_attn_norm=true": {
        "use_post_ffw_norm": "must be true like use_post_attn_norm"
    },
    "model_name=gemma2-9b local_rope_max_timescale=5 rope_linear_scaling_factor=2": {
        "rope_linear_scaling_factor": "leaves out local layers"
    },
    "model_name=mixtral-8x7b quantization=int8": {"quantization": "experts have no 8-bit products"},
    "quantization=int8": {"quantization": "must be off: set model.quantisation instead"},
    "decoder_block=gpt3": {"decoder_block": "llama2, mistral, qwen2, qwen3, gemma2"},
    "rope_type=yarn": {"rope_type": "use default or llama3.1"},
    "opt_type=adam_pax": {"opt_type": "use adamw, muon or sgd"},
    "opt_type=muon": {"muon_consistent_rms": "must be 0.2"},
    "dataset_type=tfds": {"dataset_type": "use dataset_type=grain"},
    "dataset_type=hf": {"hf_path": "give a data set of the hub"},
    "dataset_type=grain": {
        "grain_train_files": "names no files",
        "tokenizer_path": "tokenizer.json or .model",
    },
    "dataset_type=hf hf_path=a/b tokenizer_path=assets/tokenizer_llama3.tiktoken": {
        "tokenizer_path": "tokenizer_type=huggingface and ORG/NAME"
    },
    "lora_rank=8": {"lora_rank": "docs/finetuning.md"},
    "remat_policy=fastest": {"remat_policy": "is not among full, "},
    "load_parameters_path=gs://a": {"init_from": "are on this machine"},
    "load_full_state_path=/a": {"load_full_state_path": "docs/finetuning.md"},
    "steps=many": {"steps": "expected a number, got many"},
    "num_expert=1": {"num_expert": "not translated; did you mean num_experts?"},
    "dtype=float16": {"model.dtype": "float32, bfloat16"},
    "ici_data_parallelism=3": {"mesh.ici": "does not divide the 8 devices"},
}


def test_a_key_of_ours_takes_the_place_of_what_is_refused(translated):
    ours = "model.quantisation=int8", "optimizer.name=adamw"
    notes = translated("quantization=int8", "opt_type=adam_pax", *ours).notes
    assert "quantization=int8: left out; model.quantisation takes its place" in notes
    assert "opt_type=adam_pax: left out; optimizer.name takes its place" in notes


def test_what_stands_in_the_way_is_refused_with_advice(refused):
    cases = {(words, 8): advice for words, advice in REFUSED.items()}
    cases |= {
        ("model_name=mixtral-8x7b ici_expert_parallelism=3", 9): {
            "mesh.ici.expert": "do not divide"
        },
        ("compile_topology=h100-8", 0): {"compile_topology": "maxpipe.plan takes GPUs"},
        ("compile_topology=x100-8", 0): {"compile_topology": "v5p-128 as the cloud names it"},
        ("", 0): {"per_device_batch_size": "--devices N"},
    }
    refusals = {(words, n): refused(*words.split(), devices=n) for words, n in cases}
    unlike = {
        case: refusals[case]
        for case, advice in cases.items()
        if not all(part in refusals[case].get(key, "") for key, part in advice.items())
    }
    assert unlike == {}


def test_block_without_counterpart_is_answered_with_the_shipped_model(refused):
    for block in SHIPPED:
        refusals = refused(f"decoder_block={block}", "shared_experts=1", "attention_type=mla")
        assert list(refusals) == ["decoder_block"]
        (file,) = re.findall(r"configs/models/(\S+\.yml)", refusals["decoder_block"])
        assert (SHIPPED_MODELS / file).is_file()


def test_unknown_keys_of_the_users_own_file_are_treated_as_words(installed):
    mine, copy = installed.parent / "mine.yml", installed.parent / "copy.yml"
    mine.write_text("base_config: base.yml\nfoo: 1\nlearning_rate: 1e-4\nicy_data_parallelism: 2\n")
    message = r"icy_data_parallelism \(.*/mine.yml\): is not translated; did you mean ici_data_p"
    with pytest.raises(ConfigError, match=message):
        translate(read_maxtext([str(mine)], []), 8)
    mine.write_text("base_config: base.yml\nfoo: 1\n")
    (note,) = (n for n in translate(read_maxtext([str(mine)], []), 8).notes if "not tr" in n)
    assert note == "not translated: foo"
    copy.write_text(installed.read_text() + "".join(f"theirs_{i}: 1\n" for i in range(300)))
    notes = translate(read_maxtext([str(copy)], []), 8).notes
    assert "not translated" not in "".join(notes)


def test_every_problem_is_listed_at_once(refused, translated):
    words = "model_name=llama3-8b head_dim=64 num_experts=2 foo=1 dtype=float16 opt_type=lion bar"
    keys = ["", "head_dim", "num_experts", "opt_type", "model.dtype"]
    assert list(refused(*words.split())) == keys
    # A problem of our key names MaxText's.
    words = ["base_num_decoder_layers=8", "ici_pipeline_parallelism=4", "ici_fsdp_parallelism=2"]
    with pytest.raises(ConfigError, match=r"num_pipeline_microbatches.*multiple of the 4 stages"):
        translated(*words, "num_pipeline_microbatches=6")


NOTED = {  # words of MaxText: part of a note
    "run_name=team/one": "run_name=team/one: the run is called team-one: names have",
    "use_iota_embed=true": "not translated: use_iota_embed",
    "grad_dtype=bfloat16": "grad_dtype=bfloat16: sums of squares",
    "param_scan_axis=0": "param_scan_axis=0: left out; checkpoints always keep",
    "num_pipeline_repeats=2": "left out; set pipeline.num_repeats in the file if",
    "data_shuffle_seed=7": "data_shuffle_seed=7: left out: one seed",
    "learning_rate_schedule_steps=10": "the last rate stays, where MaxText has 0",
    "attention_bias=true": "decoder_block=llama2 does not read it",
    "profiler=nsys": "profiler=nsys: left out",
    "attention_type=local_sliding": "model.attention_window in the result",
    "final_logits_soft_cap=30": "MaxText caps the logits of tied ones only",
    "model_name=mixtral-8x7b capacity_factor=2": "does not read it with sparse_matmul=true",
    "model_name=qwen3-30b-a3b foo=1": "not translated: norm_topk_prob foo",
    "foo=1 ici_tensor_transpose_parallelism=1": "not translated: foo ici_tensor_transpose",
    "ragged_buffer_factor=1": "no token is left out for want of a buffer",
}


def test_what_differs_is_noted(translated):
    notes = {words: translated(*words.split()).notes for words in NOTED}
    assert {w: lines for w, lines in notes.items() if NOTED[w] not in "\n".join(lines)} == {}


def test_defaults_and_what_is_replaced_are_not_noted(translated):
    assert "global_batch" not in "".join(translated("data.global_batch_size=8").notes)
    translation = translated()
    noted = [line.partition(":")[0] for line in translation.notes]
    assert noted == ["data.global_batch_size=96", "adam_weight_decay=0.1"]
    assert translation.config.pipeline == Config().pipeline

"""The configurations whose results are recorded: name -> words after `base.yml`.

Together they cover every engine, seven schedules, every `fsdp_gather` and the options that change
what is computed. All use four devices, so that one process can run them one after another.
"""

STEPS = 5

CONFIGURATIONS = {
    # Microbatches of the sequential engine are gradient accumulation.
    "sequential": (
        "mesh.ici.stage=1 mesh.ici.data=2 model.tie_embeddings=true pipeline.remat_policy=minimal"
    ),
    "circular_per_iteration": (
        "pipeline.schedule=circular pipeline.num_repeats=2 pipeline.remat_policy=minimal"
    ),
    "circular_per_repeat": (
        "pipeline.schedule=circular pipeline.num_repeats=2 pipeline.fsdp_gather=per_repeat "
        "pipeline.remat_policy=save_qkv_proj"
    ),
    "circular_once": (
        "pipeline.schedule=circular pipeline.num_repeats=2 pipeline.fsdp_gather=once "
        "pipeline.delay_activation_forwarding=true pipeline.remat_policy=full"
    ),
    "circular_uneven": (
        "pipeline.schedule=circular model.num_layers=5 model.qk_norm=true model.z_loss=1e-3 "
        "pipeline.num_repeats=2 pipeline.layers_per_stage=[1,2,1,1] pipeline.remat_policy=full"
    ),
    "circular_outside_muon": (
        "pipeline.schedule=circular model.attention_bias=true optimizer.name=muon "
        "pipeline.parallel_layers=2 pipeline.outside_layers=before "
        "pipeline.remat_policy=save_out_proj"
    ),
    "gpipe_dropout": "pipeline.schedule=gpipe model.dropout=0.1 pipeline.remat_policy=none",
    "lockstep_1f1b_once": (
        "pipeline.schedule=lockstep_1f1b model.dropout=0.1 pipeline.num_repeats=2 "
        "pipeline.fsdp_gather=once pipeline.overlap_slots=true pipeline.remat_policy=full"
    ),
    "lockstep_1f1b_context": (
        "pipeline.schedule=lockstep_1f1b mesh.ici.fsdp=1 mesh.ici.context=2 "
        "model.tie_embeddings=true model.logit_soft_cap=20 model.logit_tiles=2 "
        "pipeline.remat_policy=full"
    ),
    # Adam makes whole updates of the rounding of bfloat16, which differs between machines.
    "lockstep_1f1b_bfloat16": (
        "pipeline.schedule=lockstep_1f1b model.dtype=bfloat16 optimizer.name=sgd "
        "optimizer.learning_rate=0.1 pipeline.remat_policy=custom "
        "pipeline.remat_tensors.context=device pipeline.remat_tensors.mlp_gate=device"
    ),
    "lockstep_1f1b_experts": (
        "pipeline.schedule=lockstep_1f1b model.moe.experts=8 model.moe.mlp_dim=32 "
        "model.moe.shared_experts=1 model.moe.router=sigmoid model.moe.scale=2.5 "
        "model.moe.groups=4 model.moe.groups_per_token=2 model.moe.bias_rate=1e-2 "
        "model.moe.balance_loss=1e-2 model.moe.z_loss=1e-3 pipeline.num_repeats=2 "
        "pipeline.remat_policy=minimal"
    ),
    "lockstep_zb_tensor": (
        "pipeline.schedule=lockstep_zb mesh.ici.fsdp=1 mesh.ici.tensor=2 pipeline.num_repeats=2 "
        "pipeline.delay_activation_forwarding=true pipeline.remat_policy=save_dot_except_mlp"
    ),
    "1f1b_uneven": (
        "pipeline.schedule=1f1b pipeline.layers_per_stage=[1,3] pipeline.remat_policy=full"
    ),
    "interleaved_1f1b_tied": (
        "pipeline.schedule=interleaved_1f1b model.tie_embeddings=true pipeline.num_repeats=2 "
        "pipeline.remat_policy=minimal"
    ),
    "zb_v_dropout": "pipeline.schedule=zb_v model.dropout=0.1 pipeline.remat_policy=none",
}

_SMALL = (
    "model.num_layers=2 model.embed_dim=8 model.num_query_heads=2 model.num_kv_heads=1 "
    "model.head_dim=4 model.mlp_dim=16 model.vocab_size=264 steps=8 checkpoint.every=4 "
    "stop_after=4 "
)

# Runs that are stored after four of eight steps, to be resumed by later versions.
STORED_RUNS = {
    "stored_scheduled": _SMALL
    + "pipeline.schedule=lockstep_1f1b model.dropout=0.1 pipeline.remat_policy=full",
    "stored_mpmd": _SMALL
    + "pipeline.schedule=1f1b model.tie_embeddings=true pipeline.remat_policy=minimal",
}

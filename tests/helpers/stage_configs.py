"""Resolved configurations with automatic stages."""

from typing import Any

from maxpipe.config import Config, replace, resolve

AUTO = {"pipeline.layers_per_stage": [-1]}


def config_of(stages: int = 4, **values: Any) -> Config:
    """Return sixteen small layers on the mpmd engine, with one device per stage."""
    small: dict[str, Any] = {
        "model.num_layers": 16,
        "model.embed_dim": 64,
        "model.mlp_dim": 192,
        "model.vocab_size": 512,
        "model.num_query_heads": 4,
        "model.num_kv_heads": 4,
        "data.sequence_length": 32,
        "data.global_batch_size": 64,
        "pipeline.engine": "mpmd",
        "pipeline.schedule": "1f1b",
        "pipeline.num_microbatches": 8,
        "mesh.ici.stage": stages,
        "eval.every": 0,
    }
    return resolve(replace(Config(), **(small | AUTO | values)), stages)

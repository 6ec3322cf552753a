"""Resolved configurations with automatic stages."""

from typing import Any

from helpers.engines import tiny
from maxpipe.config import Config

AUTO = {"pipeline.layers_per_stage": [-1]}


def config_of(stages: int = 4, **values: Any) -> Config:
    """Return sixteen small layers on the mpmd engine, with one device per stage."""
    sizes = (
        "num_layers=16 embed_dim=64 mlp_dim=192 vocab_size=512 num_kv_heads=4 sequence_length=32"
    )
    words = f"{sizes} engine=mpmd schedule=1f1b num_microbatches=8 global_batch_size=64"
    return tiny(f"{words} stage={stages}", **(AUTO | values))

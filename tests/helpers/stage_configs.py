"""Resolved configurations with automatic stages."""

from pathlib import Path
from typing import Any

from maxpipe.config import Config, load, replace, resolve

PRESETS = sorted((Path(__file__).parents[2] / "configs" / "models").glob("*.yml"))
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


def preset(path: Path, schedule: str, stages: int, repeats: int = 1) -> Config:
    """Return a preset's model on stages of 8 devices, with two microbatches per stage."""
    words = [
        f"mesh.ici.stage={stages}",
        "mesh.ici.fsdp=8",
        "mesh.ici.data=1",
        "mesh.ici.tensor=1",
        "mesh.ici.expert=1",
        "pipeline.parallel_layers=-1",
        "pipeline.outside_layers=after",
        f"pipeline.schedule={schedule}",
        f"pipeline.num_repeats={repeats}",
        "pipeline.layers_per_stage=auto",
        f"pipeline.num_microbatches={2 * stages}",
        f"data.global_batch_size={16 * stages}",
    ]
    return resolve(load(str(path), words), 8 * stages)

"""Keep the projections to queries, keys and values."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import QKV, REMAT, Kept


@REMAT.register()
def save_qkv_proj(config: PipelineConfig) -> Kept:
    return Kept(device=QKV)

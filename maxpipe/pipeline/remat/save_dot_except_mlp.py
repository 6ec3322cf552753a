"""Keep the projections of attention; recompute attention itself and the MLP, whose tensors are the largest."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import QKV, REMAT, Kept


@REMAT.register()
def save_dot_except_mlp(config: PipelineConfig) -> Kept:
    return Kept(device=(*QKV, "out_proj"))

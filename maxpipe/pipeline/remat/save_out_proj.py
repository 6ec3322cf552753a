"""Keep the output projection of attention, so that the MLP is recomputed without attention."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import REMAT, Kept


@REMAT.register()
def save_out_proj(config: PipelineConfig) -> Kept:
    return Kept(device=("out_proj",))

"""Keep every intermediate value; recompute nothing but copies of weights."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import REMAT, Kept


@REMAT.register()
def none(config: PipelineConfig) -> Kept:
    return Kept(everything=True)

"""Keep nothing; recompute everything from the input."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import REMAT, Kept


@REMAT.register()
def full(config: PipelineConfig) -> Kept:
    return Kept()

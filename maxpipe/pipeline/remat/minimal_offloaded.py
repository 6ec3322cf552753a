"""As minimal, with the kept tensors waiting in the host's memory."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import MATMULS, REMAT, Kept


@REMAT.register()
def minimal_offloaded(config: PipelineConfig) -> Kept:
    return Kept(host=MATMULS)

"""Keep the outputs of matrix products and attention; recompute norms, rotations and activation functions."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import MATMULS, REMAT, Kept


@REMAT.register()
def minimal(config: PipelineConfig) -> Kept:
    return Kept(device=MATMULS)

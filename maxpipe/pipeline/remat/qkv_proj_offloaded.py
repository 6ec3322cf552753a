"""As save_qkv_proj, with the kept tensors waiting in the host's memory."""

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import QKV, REMAT, Kept


@REMAT.register()
def qkv_proj_offloaded(config: PipelineConfig) -> Kept:
    return Kept(host=QKV)

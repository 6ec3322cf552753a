"""Tensor by tensor, as `pipeline.remat_tensors` says."""

from dataclasses import asdict

from maxpipe.config.sections import PipelineConfig
from maxpipe.pipeline.remat import REMAT, Kept


@REMAT.register()
def custom(config: PipelineConfig) -> Kept:
    where = asdict(config.remat_tensors)
    device, host = (tuple(name for name, place in where.items() if place == p) for p in ("device", "offload"))
    return Kept(device=device, host=host)

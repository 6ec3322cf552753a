"""List single changes of a configuration that may save memory on the same devices."""

from collections.abc import Iterator

from maxpipe.config.rules.rule import Updates
from maxpipe.config.sections import Config


def memory_changes(c: Config) -> Iterator[Updates]:
    """Yield changes worth trying, the cheapest first; many are not legal for a configuration."""
    count, repeats = c.pipeline.num_microbatches, c.pipeline.num_repeats
    yield {"pipeline.remat_policy": "full"}
    yield {"pipeline.unit_times": []}
    yield {"pipeline.remat_layers": True}
    yield {"pipeline.fsdp_gather": "per_iteration"}
    for factor in (2, 4):
        yield {"pipeline.num_microbatches": factor * count}
    yield {"model.logit_tiles": 8 * c.model.logit_tiles}
    yield {"pipeline.schedule": "1f1b", "pipeline.num_repeats": 1}
    yield {"pipeline.schedule": "lockstep_1f1b", "pipeline.engine": "auto"}
    for number in (1, 2 * repeats):
        yield {"pipeline.num_repeats": number, "pipeline.num_layers_per_stage": -1}
    yield {"data.global_batch_size": c.data.global_batch_size // 2}
    for more, less in (
        ("fsdp", "data"),
        ("stage", "fsdp"),
        ("fsdp", "stage"),
        ("tensor", "fsdp"),
        ("stage", "data"),
        ("expert", "data"),
    ):
        larger, smaller = getattr(c.mesh.ici, more), getattr(c.mesh.ici, less)
        if smaller % 2 == 0:
            changes: Updates = {f"mesh.ici.{more}": 2 * larger, f"mesh.ici.{less}": smaller // 2}
            if "stage" in (more, less):
                changes |= {"pipeline.num_repeats": -1, "pipeline.num_layers_per_stage": -1}
            yield changes

"""What to change when a step does not fit: each knob with its effect on the estimate."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from maxpipe.config import Config, ConfigError, replace, resolve
from maxpipe.planning.estimate import estimate

GIB = 2**30


@dataclass(frozen=True)
class Knob:
    """One way to save memory: `words` to append to the command, and bytes saved on each device by estimate."""

    words: str
    saves: float


def knobs(written: Config, resolved: Config, num_devices: int, num_slices: int) -> list[Knob]:
    """Legal changes that save memory on the same devices, the most effective first.

    Args:
      written: as loaded, -1 for what is derived, so that a change is derived anew.
      resolved: the configuration that does not fit.
      num_devices, num_slices: the devices to stay on.
    """
    now = estimate(resolved).total
    found = []
    for changes in _changes(resolved):
        try:
            saves = (
                now - estimate(resolve(replace(written, **changes), num_devices, num_slices)).total
            )
        except (ConfigError, ValueError):
            continue
        if saves > 0.01 * now:
            found.append(Knob(" ".join(f"{key}={value}" for key, value in changes.items()), saves))
    return sorted(found, key=lambda knob: -knob.saves)


def _changes(c: Config) -> Iterator[dict[str, Any]]:
    """Single changes worth trying; many are not legal for a given configuration."""
    count, ici = c.pipeline.num_microbatches, c.mesh.ici
    yield {"pipeline.remat_policy": "full"}
    yield {"pipeline.schedule": "lockstep_1f1b", "pipeline.engine": "auto"}
    yield {"pipeline.fsdp_gather": "per_iteration"}
    yield {"model.logit_tiles": 8 * c.model.logit_tiles}
    for factor in (2, 4):
        yield {"pipeline.num_microbatches": count * factor}
    yield {"pipeline.num_repeats": 1, "pipeline.num_layers_per_stage": -1}
    yield {"pipeline.num_repeats": 2 * c.pipeline.num_repeats, "pipeline.num_layers_per_stage": -1}
    yield {"data.global_batch_size": c.data.global_batch_size // 2}
    free = {"pipeline.num_repeats": -1, "pipeline.num_layers_per_stage": -1}
    for more, less in (
        ("fsdp", "data"),
        ("stage", "fsdp"),
        ("fsdp", "stage"),
        ("tensor", "fsdp"),
        ("stage", "data"),
    ):
        if getattr(ici, less) % 2 == 0:
            sizes = {
                f"mesh.ici.{more}": 2 * getattr(ici, more),
                f"mesh.ici.{less}": getattr(ici, less) // 2,
            }
            yield sizes | (free if "stage" in (more, less) else {})

"""Find what to change when a step does not fit: each knob with its effect on the estimate."""

from collections.abc import Iterator
from dataclasses import dataclass

from maxpipe.config import Config, ConfigError, replace, resolve
from maxpipe.config.rules.rule import Updates
from maxpipe.planning.estimate import estimate


@dataclass(frozen=True)
class Knob:
    """One way to save memory.

    Attributes:
      words: to append to the command.
      saves: bytes saved on each device, by estimate.
    """

    words: str
    saves: float


def knobs(written: Config, resolved: Config, num_devices: int, num_slices: int) -> list[Knob]:
    """Return legal changes that save memory on the same devices, the most effective first.

    Args:
      written: as loaded, with -1 for what is derived, so that it is derived again after a change.
      resolved: the configuration that does not fit.
      num_devices, num_slices: the devices to stay on.
    """
    now = estimate(resolved).total
    effective = []
    for changes in _changes(resolved):
        try:
            changed = resolve(replace(written, **changes), num_devices, num_slices)
            saves = now - estimate(changed).total
        except (ConfigError, ValueError):
            continue
        if saves > 0.01 * now:
            words = " ".join(f"{key}={value}" for key, value in changes.items())
            effective.append(Knob(words, saves))
    return sorted(effective, key=lambda knob: -knob.saves)


def _changes(c: Config) -> Iterator[Updates]:
    """Yield single changes worth trying; many are not legal for a given configuration."""
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

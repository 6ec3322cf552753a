"""The schedule of a configuration as it would run, with what its stages hold and take."""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from maxpipe.config import Config, ConfigError, Problem, load, resolve
from maxpipe.config.values import AUTO
from maxpipe.pipeline.auto_stages.plan import Prediction, memory_limit, plan_stages, predict, uniform_sizes
from maxpipe.pipeline.render.stages import stages_text
from maxpipe.pipeline.simulate import Simulation
from maxpipe.telemetry.chips import chip_of


@dataclass(frozen=True)
class Drawing:
    """What there is to draw.

    Attributes:
      runs: of the configured stages, and of uniform ones if those are others; tables are named after their chunks.
      text: stages and figures, in lines.
      subtitle: the model and the unit of time.
    """

    runs: Sequence[Simulation]
    text: str
    subtitle: str


def draw(path: str, overrides: Sequence[str]) -> Drawing:
    """Simulates a YAML file with `key=value` words.

    Devices are those of `compile.topology`, whose chips limit memory, else as many as the mesh names, where -1 is 1.

    Raises:
      ConfigError: the configuration is wrong, has one stage, or no stages that fit.
      ScheduleError: its schedule cannot be built.
    """
    loaded = load(path, overrides)
    config = resolve(loaded, *_devices(loaded.config))
    if config.pipeline.engine == "sequential":
        raise ConfigError(Problem("mesh.ici.stage", "one stage has no schedule to draw; 2 or more make a pipeline"))
    chip, even = chip_of(config.compile.topology), uniform_sizes(config)
    limit = memory_limit(config, chip.hbm_bytes if chip else None)
    uniform = predict(config, even) if even else None
    if config.pipeline.layers_per_stage == AUTO:
        chosen = plan_stages(config, limit)
    else:
        sizes = config.pipeline.layers_per_stage or even
        assert sizes, "resolved layers have sizes of their own or are even"
        chosen = predict(config, sizes)
    others = [uniform] if uniform and uniform.sizes != chosen.sizes else []
    known = limit if config.pipeline.engine == "mpmd" else None
    subtitle = f"{path}, {config.pipeline.parallel_layers} layers; the forward of a layer takes 1"
    return Drawing([_named(p) for p in (chosen, *others)], stages_text(chosen, uniform, known), subtitle)


def _devices(config: Config) -> tuple[int, int]:
    """Number of devices and of slices."""
    grid, slices = config.compile.topology.partition(":")[2], config.compile.num_slices
    if grid:
        return math.prod(map(int, grid.split("x"))) * slices, slices
    ici, dcn = (math.prod(max(size, 1) for size in astuple(axes)) for axes in (config.mesh.ici, config.mesh.dcn))
    return ici * dcn, dcn


def _named(prediction: Prediction) -> Simulation:
    table = prediction.run.table
    sizes = str(prediction.sizes).replace(" ", "")
    return replace(prediction.run, table=replace(table, name=f"{table.name} {sizes}"))

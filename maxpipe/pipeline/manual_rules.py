"""What the scheduled engine asks of `sharding.logical_axis_rules`: its collectives are written for one layout."""

from collections.abc import Iterable

from jax.sharding import PartitionSpec

from maxpipe.config import ConfigError, Problem
from maxpipe.pipeline.contract import Parts
from maxpipe.pipeline.manual import ROW_AXES, manual_part
from maxpipe.sharding import KEY


def check_rules(parts: Parts) -> None:
    """Refuses rules under which rows would be counted twice, or layers or vocabulary be missing on a device.

    Raises:
      ConfigError: names every rule that does not fit, and one that does.
    """
    rules, several = parts.rules, [axis for axis in ROW_AXES if parts.mesh.shape[axis] > 1]
    problems = []
    if (rows := _axes(rules.spec(("activation_batch",)))) != set(several):
        text = f"the scheduled engine splits rows over {_names(several)}, but activation_batch lays them"
        problems.append(f"{text} over {_names(rows)}; use [activation_batch, [{', '.join(several)}]]")
    for axis, wanted in (("repeat", []), ("stage", ["stage"]), ("layers_per_stage", [])):
        wanted = [name for name in wanted if parts.mesh.shape[name] > 1]
        if (given := _axes(rules.spec((axis,)))) != set(wanted):
            text = f"the scheduled engine lays axis {axis!r} over {_names(wanted)}, not {_names(given)}"
            problems.append(f"{text}; use [{axis}, [{', '.join(wanted)}]]")
    table = parts.program.specs["embed"]["embedding"]
    if over := _axes(PartitionSpec(rules.spec(table.axes, table.shape)[0])):
        problems.append(
            f"the scheduled engine spreads the columns of the embedding table over {_names(over)}, not its rows; "
            f"take these mesh axes from {table.axes[0]!r} and give them to {table.axes[1]!r}"
        )
    if problems:
        raise ConfigError(*(Problem(KEY, text) for text in problems))


def _axes(spec: PartitionSpec) -> set[str]:
    """Manual mesh axes of a one-dimensional PartitionSpec."""
    (entry,) = manual_part(spec)
    return set(entry) if isinstance(entry, tuple) else {entry} if entry else set()


def _names(axes: Iterable[str]) -> str:
    return " and ".join(sorted(axes)) or "no axis"

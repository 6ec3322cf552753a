"""Find what to change when a step does not fit, or leaves memory idle, by the estimate."""

from collections.abc import Callable
from dataclasses import dataclass

from maxpipe.config import Config, replace, resolve
from maxpipe.config.catalog import ENGINES, REMAT_POLICIES
from maxpipe.config.errors import ConfigError
from maxpipe.config.rules.rule import Updates
from maxpipe.config.values import words_of
from maxpipe.devices.chips import Tpu
from maxpipe.pipeline.schedules.table import ScheduleError
from maxpipe.plan.choices import GATHER, needed_bytes, with_gather_mode
from maxpipe.plan.estimate import estimate
from maxpipe.plan.layer_times import first_layers, layer_times
from maxpipe.plan.memory_changes import memory_changes

MOST_GAINS = 2


@dataclass(frozen=True)
class Knob:
    """One way to save memory: words `key=value`, and the bytes that they save on each device."""

    words: str
    saves: float


@dataclass(frozen=True)
class Gain:
    """One way to use idle memory for a faster step.

    Attributes:
      words: `key=value` words to set on the command line.
      compiles: what it adds to the compilation; "" if nothing.
      needed: bytes that the program would need on each device, by estimate.
      mfu: upper bound of the model FLOPs utilisation, by estimate.
    """

    words: str
    compiles: str
    needed: float
    mfu: float


# (config, FLOPs of its step as a share of the compiled step's) -> bound of its MFU
BoundMfu = Callable[[Config, float], float]
# Share of a device's memory that a change may fill: only what it adds is estimated.
COMPILED_ROOM = 0.95
_SCAN_LAYERS = "pipeline.scan_layers"
LEAST_GAIN = 1.01  # factor on the bound of MFU
LEAST_SAVING = 0.01  # share of the memory that a step takes


def gains(
    written: Config,
    resolved: Config,
    devices: tuple[int, int],
    tpu: Tpu | None,
    memory: tuple[float, float],
    bound_mfu: BoundMfu,
) -> list[Gain]:
    """Return rematerialisation policies that save more, still fit and raise the bound of MFU.

    Args:
      written: the configuration as loaded, with -1 for derived values.
      resolved: the configuration that fits, with `pipeline.fsdp_gather` decided.
      devices: numbers of devices and slices, which do not change.
      tpu: facts of the device's chip; None if it is not a TPU or an unknown one.
      memory: bytes that the compiled program needs on a device, and that a device has.
    """
    needed, capacity = memory
    now, step = estimate(resolved, tpu).total, _microbatch_time(resolved)
    mfu = bound_mfu(resolved, 1.0)
    # On TPUs a loop over layers copies part of what is saved, which costs half of the gain.
    is_loop = (
        ENGINES[resolved.pipeline.engine].takes(_SCAN_LAYERS) and resolved.pipeline.scan_layers
    )
    can_unroll = tpu is not None and is_loop
    unrolled: Updates = {_SCAN_LAYERS: False} if can_unroll else {}
    compiles = f"compiles all {resolved.model.num_layers} layers" if can_unroll else ""
    # With auto it could gather more often, which the bound does not include.
    gather: Updates = {GATHER: resolved.pipeline.fsdp_gather}
    better = []
    for name, policy in REMAT_POLICIES.items():
        if policy.by_tensor or policy.host:
            continue
        changes: Updates = {"pipeline.remat_policy": name} | unrolled
        try:
            changed = with_gather_mode(resolve(replace(written, **changes), *devices), tpu)
            if changed.pipeline.fsdp_gather != resolved.pipeline.fsdp_gather:
                changes = changes | gather
                changed = resolve(replace(written, **changes), *devices)
            would_need = needed + estimate(changed, tpu).total - now
        except ValueError:
            continue
        faster = bound_mfu(changed, _microbatch_time(changed) / step)
        if would_need <= COMPILED_ROOM * capacity and faster > LEAST_GAIN * mfu:
            better.append(Gain(words_of(changes), compiles, would_need, faster))
    return sorted(better, key=lambda gain: (-round(gain.mfu, 3), gain.needed))[:MOST_GAINS]


def _microbatch_time(config: Config) -> float:
    """Return the time of a microbatch on all stages, in units of one layer's forward."""
    times = layer_times(config)
    first = first_layers(config)
    total = sum(first)
    if ENGINES[config.pipeline.engine].lockstep:  # their backward begins at the tokens
        total += first.forward
    return total + config.model.stacked_layers * times.layer + times.head


def knobs(
    written: Config, resolved: Config, devices: tuple[int, int], tpu: Tpu | None
) -> list[Knob]:
    """Return legal changes that save memory on the same devices, the most effective first.

    Arguments are those of `gains`; with separate programs, `resolved` has its stages chosen.
    """
    now, one_program = needed_bytes(resolved, tpu), ENGINES[resolved.pipeline.engine].one_program
    effective = []
    for changes in memory_changes(resolved):
        try:
            changed = resolve(replace(written, **changes), *devices)
            if ENGINES[changed.pipeline.engine].one_program != one_program:
                continue  # the estimate is not made for the other kind of engine
            saves = now - needed_bytes(changed, tpu)
        except (ConfigError, ScheduleError):  # a CSV file has sizes of its own
            continue
        if saves > LEAST_SAVING * now:
            effective.append(Knob(words_of(changes), saves))
    return sorted(effective, key=lambda knob: -knob.saves)

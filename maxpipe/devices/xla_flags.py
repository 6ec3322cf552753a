"""Recommend XLA flags from which a pipeline gains, by chip, without JAX.

maxpipe does not set them: they trade memory for overlap, and XLA reads them once, when it is
loaded.
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from maxpipe.devices.chips import Device, chip_for, short_name


def assignment(variable: str, text: str) -> str:
    """Return a variable of the environment as a line for a shell."""
    return f"{variable}={shlex.quote(text)}" if set(text) & set('"$`\\') else f'{variable}="{text}"'


def added_to(text: str, flags: Mapping[str, str]) -> str:
    """Return a variable's text plus the flags that it does not name."""
    named = names_in(text)
    words = [f"--{name}={value}" for name, value in flags.items() if name not in named]
    return " ".join([text, *words] if text else words)


def names_in(text: str) -> set[str]:
    """Return the names of the flags that a variable's text sets, as `--a=1`, `--a 1` or `--noa`."""
    words = [word.lstrip("-").partition("=")[0] for word in text.split() if word.startswith("-")]
    return {*words, *(word.removeprefix("no") for word in words)}


@dataclass(frozen=True)
class Recommended:
    """Flags by name, and the environment variable from which the chip's compiler reads them."""

    variable: str
    flags: Mapping[str, str]


# Collectives run during matrix products, cut into pieces where that helps. The head's tokens are
# distributed over the stages while a chunk is computed.
_OVERLAP = {
    "xla_tpu_enable_async_collective_fusion": "true",
    "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
    "xla_tpu_overlap_compute_collective_tc": "true",
    "xla_tpu_enable_async_all_to_all": "true",
}
# XLA cuts gathers of weights into pieces and runs them inside the matrix products before the one
# that needs them. libtpu refuses that on v5p and v6e, since results may be wrong there.
_FUSED_GATHERS = {
    "xla_enable_async_all_gather": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
}
_TPU = Recommended("LIBTPU_INIT_ARGS", _OVERLAP)
_GPU = Recommended(
    "XLA_FLAGS",
    {
        "xla_gpu_enable_latency_hiding_scheduler": "true",
        # Transfers get onto the wire even while matrix products fill the other streams.
        "xla_gpu_enable_highest_priority_async_stream": "true",
    },
)


# On a TPU JAX adds this when it is imported; the next process will add it again.
_OF_JAX = " --xla_tpu_use_enhanced_launch_barrier=true"

# By chip, and for every GPU.
RECOMMENDED = {
    "v4": _TPU,
    "v5e": Recommended("LIBTPU_INIT_ARGS", _OVERLAP | _FUSED_GATHERS),
    "v5p": _TPU,
    "v6e": _TPU,
    "tpu7x": _TPU,
    "gpu": _GPU,
}


def recommended_for(device: Device) -> Recommended | None:
    """Return the flags for a device; None for CPUs and for chips that are not in the table."""
    if device.platform == "gpu":
        return RECOMMENDED["gpu"]
    chip = chip_for(device.device_kind)
    return RECOMMENDED.get(chip.name) if chip else None


def own_flags(variable: str, environment: Mapping[str, str]) -> str:
    """Return the flags that a variable holds, without the one that JAX adds."""
    return environment.get(variable, "").removesuffix(_OF_JAX)


def advice(device: Device, environment: Mapping[str, str]) -> list[str]:
    """Return lines on the recommended flags if the environment leaves one unset, else none.

    They are a sentence, and an assignment that can be pasted into a shell. A flag that is set to
    another value is the user's choice.
    """
    recommended = recommended_for(device)
    if recommended is None:
        return []
    own = own_flags(recommended.variable, environment)
    text = added_to(own, recommended.flags)
    if text == own:
        return []
    chip = chip_for(device.device_kind)
    is_timed = chip is not None and chip.products_per_cycle is not None
    compared = "; in a checkout, scripts/benchmark/tune_flags.py compares them" if is_timed else ""
    kind = short_name(device.device_kind)
    said = f"XLA flags for overlap on {kind}, at the price of memory{compared}:"
    return [said, assignment(recommended.variable, text)]

"""Compile a step for TPUs with several sets of compiler flags, and print which one is the fastest.

    python scripts/benchmark/tune_flags.py configs/models/llama3-8b.yml compile.topology=v5p:4x4x4

The words are those of `maxpipe.compile`, which compiles each set in a process of its own, since XLA
reads its flags once. Then sets that gain are combined, the best first. Flags that are already in
LIBTPU_INIT_ARGS stay as they are. Exit code 1 means that the step without a set has no prediction.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxpipe.compile.compile_process import compile_command
from maxpipe.config import ConfigError, Problem
from maxpipe.config.cli import exit_on_config_error, parse_args
from maxpipe.config.slices import canonical_topology
from maxpipe.devices.chips import GIB
from maxpipe.devices.xla_flags import RECOMMENDED, added_to, assignment, names_in, own_flags

VARIABLE = "LIBTPU_INIT_ARGS"
LEAST_GAIN = 0.005  # share of a step; predictions that differ by less are the same


class FlagSet(NamedTuple):
    """Flags that belong together."""

    name: str
    flags: Mapping[str, str]


# More of a chip's own memory for each kernel: some products gain and others lose.
_KERNEL_MEMORY = tuple(
    FlagSet(f"{mib} MiB for kernels", {"xla_tpu_scoped_vmem_limit_kib": str(1024 * mib)})
    for mib in (64, 96)
)
# Collectives run on cores of their own, next to computation.
_OFFLOADED = FlagSet(
    "collectives on sparse cores",
    {
        f"xla_tpu_enable_sparse_core_collective_offload_{kind}": "true"
        for kind in ("all_gather", "all_reduce", "reduce_scatter")
    },
)
_SPARSE_CORES = ("v4", "v5p", "v6e", "tpu7x")  # chips that have some


def sets_to_try(chip: str) -> list[FlagSet]:
    """Return flags that may make a step on a TPU faster, or slower."""
    recommended = FlagSet("overlap, as recommended", RECOMMENDED[chip].flags)
    offloaded = [_OFFLOADED] if chip in _SPARSE_CORES else []
    return [recommended, *offloaded, *_KERNEL_MEMORY]


@exit_on_config_error()
def main(words: Sequence[str]) -> int:
    """Print a row for each set, and the best one as a line for a shell."""
    command, title = "python scripts/benchmark/tune_flags.py", (__doc__ or "").partition("\n")[0]
    arguments = parse_args(words, prog=command, description=title)
    topology = arguments.loaded.config.compile.topology
    if topology in ("", "cpu"):
        raise ConfigError(Problem("compile.topology", "name TPUs, such as v5p:4x4x4"))
    chip = canonical_topology(topology).partition(":")[0]
    own = own_flags(VARIABLE, os.environ)
    print("| flags | step s | vs first | GiB | compiled in |\n|---|---|---|---|---|", flush=True)
    first = best = compiled(words, "none", own, None)
    if first is None:
        return 1
    name, text, gaining = "none", own, []
    for choice in sets_to_try(chip):
        flags = added_to(own, choice.flags)
        seconds = compiled(words, choice.name, flags, first) if flags != own else None
        if seconds and seconds < (1 - LEAST_GAIN) * first:
            gaining.append((seconds, choice))
    for seconds, choice in sorted(gaining, key=lambda pair: pair[0]):
        flags = added_to(text, choice.flags)
        if text == own:
            best, name, text = seconds, choice.name, flags
        elif not choice.flags.keys() & (names_in(text) - names_in(own)):
            together = f"{name} + {choice.name}"
            combined = compiled(words, together, flags, first)
            if combined and combined < (1 - LEAST_GAIN) * best:
                best, name, text = combined, together, flags
    print(f"\nbest: {name}")
    if text != own:
        print(assignment(VARIABLE, text))
    return 0


def compiled(words: Sequence[str], name: str, text: str, first: float | None) -> float | None:
    """Print the row of a set; return the seconds of its step, None if it fails or does not fit."""
    proof = compile_command(words, lambda line: None, {VARIABLE: text})
    seconds, memory = proof.seconds, proof.memory
    cells = [
        f"{name}: {proof.failure}" if proof.failure else name,
        f"{seconds:.4g}" if seconds else "-",
        f"{seconds / (first or seconds):.3f}" if seconds else "-",
        f"{memory / GIB:.2f}{'' if proof.fits else ', too much'}" if memory else "-",
        f"{proof.compiled_in:.0f} s",
    ]
    print(f"| {' | '.join(cells)} |", flush=True)
    return seconds if proof.fits else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""List what may help when nothing fits: fewer tokens, more chips and offloading."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from maxpipe.config.catalog import REMAT_POLICIES
from maxpipe.config.slices import num_chips, slices_of
from maxpipe.plan.search.machine import CPU, MOST_GPUS
from maxpipe.plan.search.request import TOPOLOGY, Request
from maxpipe.plan.search.smallest import doubling

POLICY = "pipeline.remat_policy"
MOST_DOUBLINGS = 3  # of the number of slices, once there is no larger slice


class Attempt(NamedTuple):
    """A request that may fit.

    Attributes:
      request: the request to search.
      words: command-line words that ask for it.
      remark: a remark that follows the words; or "".
    """

    request: Request
    words: str
    remark: str = ""


def attempts_of(request: Request, flag: str = "") -> dict[str, list[Attempt]]:
    """Return kinds of remedies with what to try of each, the least change first.

    Args:
      request: the request for which nothing fits.
      flag: a flag for all of them, after a space; or "".
    """
    kinds = {
        "fewer tokens": [*_fewer_tokens(request, flag)],
        "more chips": [Attempt(on, f"{words}{flag}") for words, on in more_chips(request)],
        "offloading": [*_offloading(request, flag)],
    }
    return {kind: attempts for kind, attempts in kinds.items() if attempts}


def more_chips(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield the request on more chips of the same kind, each with the words that ask for it.

    These are larger slices, and then several of the largest; or more GPUs. Simulated devices have
    no memory of their own, so there are none.
    """
    machine = request.machine
    kind, _, _ = machine.topology.partition(":")
    if machine.chip.torus is not None:
        chips = num_chips(machine.topology)
        usual = [t for t in slices_of(kind) if num_chips(t) > chips]
        # The largest as well, where it is less than twice the one before.
        larger = [*dict.fromkeys([*doubling(usual), *usual[-1:]])]
        for topology in larger:
            yield f"{TOPOLOGY} {topology}", request.on(topology)
        largest = larger[-1] if larger else machine.topology
        for doublings in range(1, MOST_DOUBLINGS + 1):
            slices = machine.slices * 2**doublings
            words = f"{TOPOLOGY} {largest} compile.num_slices={slices}"
            yield words, request.on(largest, slices)
    elif kind != CPU:
        count = 2 * machine.devices
        while count <= MOST_GPUS:
            yield f"{TOPOLOGY} {kind}:{count}", request.on(f"{kind}:{count}")
            count *= 2


def _fewer_tokens(request: Request, flag: str) -> Iterator[Attempt]:
    """Yield smaller batches, each half the one before."""
    batch, length = min(request.batches), request.config.data.sequence_length
    while batch > 1:
        batch //= 2
        words = f"data.global_batch_size={batch}{flag}"
        remark = f", {batch * length} tokens a step, in place of the batch that is given"
        yield Attempt(request.with_batches([batch]), words, remark)


def _offloading(request: Request, flag: str) -> Iterator[Attempt]:
    """Yield the policies that offload; none where the user chose policies."""
    if POLICY in request.choices:
        return
    remark = ", with the host's memory; how fast that is the plan does not know"
    for name, policy in REMAT_POLICIES.items():
        if policy.host:
            offloads = replace(request, choices={**request.choices, POLICY: [name]})
            yield Attempt(offloads, f"--fix {POLICY}={name}{flag}", remark)

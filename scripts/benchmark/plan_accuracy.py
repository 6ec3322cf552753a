"""Compare the plan's closed forms with the compiler, on candidates drawn at random.

    python scripts/benchmark/plan_accuracy.py CONFIG --topology v5p:2x2x2 --count 12 --seed 1 \
        --results drawn.json [key=value ...]

Every drawn candidate is compiled by maxpipe.compile in a process of its own, one after another,
and none is dropped. The file holds the candidates and what the compiler says of them. A run that
was cut short goes on where it stopped, and a finished file is compared without compiling again.
With --stored nothing is compiled, and what the file holds is compared.
"""

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maxpipe.compile.compile_process import compile_configuration
from maxpipe.config import load, resolve
from maxpipe.config.options import update
from maxpipe.config.printing import to_yaml
from maxpipe.config.sections import Config
from maxpipe.devices.chips import GIB
from maxpipe.plan.search.best import priced_configuration
from maxpipe.plan.search.block import block_of
from maxpipe.plan.search.candidate import Candidate
from maxpipe.plan.search.facts import Facts
from maxpipe.plan.search.legality import Legality
from maxpipe.plan.search.machine import machine_of
from maxpipe.plan.search.pricing import Outcome, price
from maxpipe.plan.search.request import Request, shared_config
from maxpipe.plan.search.written import versions


@dataclass
class Compiled:
    """A drawn candidate, and what the compiler says of it.

    Attributes:
      updates: the keys that make it.
      memory_bytes, seconds: compiled; None until then, or where there is no figure.
      failure: why there are no figures.
      compiled_in: seconds; 0 until it is compiled.
      made_with: versions.
    """

    updates: dict[str, object]
    memory_bytes: float | None = None
    seconds: float | None = None
    failure: str = ""
    compiled_in: float = 0.0
    made_with: str = ""


class Predicted(NamedTuple):
    """Bytes of a device, and seconds of a step, before it is compiled."""

    memory: float
    seconds: float


def drawn(request: Request, count: int, seed: int, *, per_engine: bool = False) -> list[Candidate]:
    """Return legal candidates of different meshes, engines and schedules, drawn at random.

    Args:
      request: what is asked for.
      count: of candidates.
      seed: of the draw.
      per_engine: draw as many of each engine, instead of each engine and schedule.
    """
    space, machine = request.space(), request.machine
    legality, facts = Legality(request.config), Facts(request.config)
    batch, draw = request.batches[0], random.Random(seed)
    kinds: dict[tuple[str, ...], list[Candidate]] = {}
    for grid in space.grids():
        if legality.of_mesh(grid):
            continue
        for engine, schedule in space.pipelines(grid.size("stage")):
            scans = draw.choice(space.scans(engine))
            block = block_of(space, grid, engine, schedule, batch, scans=scans)
            if priced := price(block, legality, facts, machine, Outcome().fallen):
                (candidate,) = priced.candidates([draw.randrange(len(priced.block))], facts)
                kind = (engine,) if per_engine else (engine, schedule)
                kinds.setdefault(kind, []).append(candidate)
    # As many of each kind, in turn.
    chosen: list[Candidate] = []
    while len(chosen) < count and kinds:
        for key in [*kinds]:
            pool = kinds[key]
            chosen.append(pool.pop(draw.randrange(len(pool))))
            if not pool:
                del kinds[key]
    return chosen[:count]


def ranks(values: list[float]) -> np.ndarray:
    """Return the rank of each value."""
    return np.argsort(np.argsort(values)).astype(float)


def stored(path: Path | None, source: dict[str, object]) -> list[Compiled]:
    """Return what a file holds; nothing if there is none.

    Raises:
      SystemExit: it is of another draw.
    """
    if path is None or not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["source"] != source:
        raise SystemExit(
            f"{path} is of {saved['source']}, not of {source}; give the same flags, or another "
            "--results"
        )
    return [Compiled(**entry) for entry in saved["candidates"]]


def save(path: Path | None, source: dict[str, object], candidates: list[Compiled]) -> None:
    """Write the file anew."""
    if path is not None:
        plain = {"source": source, "candidates": [asdict(c) for c in candidates]}
        whole = path.with_suffix(".partial")
        whole.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
        whole.replace(path)


def compiled(candidate: Compiled, config: Config) -> Compiled:
    """Compile a candidate."""
    proof = compile_configuration(to_yaml(config), lambda line: None)
    return Compiled(
        candidate.updates,
        proof.memory,
        proof.seconds,
        proof.failure,
        proof.compiled_in,
        versions(),
    )


def name_of(candidate: Candidate) -> str:
    """Return a candidate in words."""
    return (
        f"{candidate.mesh_text()} {candidate.schedule_text()} M={candidate.microbatches} "
        f"V={candidate.repeats} {candidate.policy} {candidate.gather} t={candidate.tiles}"
    )


def row(name: str, closed: Predicted, proof: Compiled) -> str:
    """Return a line of the table; percentages are of what is compiled."""
    cells = [name, _cell(closed.memory / GIB, proof.memory_bytes, GIB, 2)]
    cells.append("-" if proof.memory_bytes is None else f"{proof.memory_bytes / GIB:.2f}")
    cells.append(_cell(closed.seconds, proof.seconds, 1.0, 4))
    cells.append(proof.failure[:80] or ("-" if proof.seconds is None else f"{proof.seconds:.4f}"))
    return f"| {' | '.join(cells)} |"


def _cell(predicted: float, known: float | None, unit: float, digits: int) -> str:
    error = "" if known is None else f" ({predicted / (known / unit) - 1:+.0%})"
    return f"{predicted:.{digits}f}{error}"


def summary(pairs: list[tuple[Predicted, Compiled]]) -> list[str]:
    """Return the errors of memory and the rank correlation of time of the closed forms."""
    lines = ["closed:"]
    known = [(a.memory, b.memory_bytes) for a, b in pairs if b.memory_bytes is not None]
    if known:
        errors = np.array([a / b - 1 for a, b in known])
        spread = f"{errors.mean():+.1%} on average, {errors.min():+.1%} to {errors.max():+.1%}"
        close = [
            f"{int((abs(errors) <= share).sum())} within {share:.0%}" for share in (0.15, 0.07)
        ]
        lines.append(f"memory of {len(known)}: {spread}; {', '.join(close)}")
    timed = [(a.seconds, b.seconds) for a, b in pairs if b.seconds is not None]
    if len(timed) > 1:
        predicted, seconds = (list(values) for values in zip(*timed, strict=True))
        ratios = np.array(predicted) / seconds
        rank = np.corrcoef(ranks(predicted), ranks(seconds))[0, 1]
        spread = f"{ratios.min():.2f} to {ratios.max():.2f}"
        lines.append(f"time of {len(timed)}: closed / compiled {spread}")
        chosen = seconds[int(np.argmin(predicted))] / min(seconds) - 1
        lines.append(
            f"the fastest by closed forms is {chosen:.1%} slower than the fastest compiled"
        )
        lines.append(f"Spearman {rank:.3f}; slowest / fastest {max(seconds) / min(seconds):.2f}")
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--topology", required=True)
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--per-engine",
        action="store_true",
        help="draw as many of each engine, instead of each engine and schedule",
    )
    parser.add_argument("--results", type=Path, help="file of the candidates, made or gone on with")
    parser.add_argument("--stored", action="store_true", help="compare what the file holds")
    flags = parser.parse_intermixed_args()
    if flags.stored and not flags.results:
        parser.error("--stored needs --results FILE")
    written = load(flags.config, flags.overrides).config
    machine = machine_of(flags.topology, 1, written)
    shared = shared_config(written, machine)
    batch = written.data.global_batch_size
    request = Request(flags.config, written, shared, machine, (batch,), {}, 0.0)
    source = {
        "config": flags.config,
        "overrides": flags.overrides,
        "topology": flags.topology,
        "seed": flags.seed,
        "count": flags.count,
    }
    if flags.per_engine:
        source["per_engine"] = True
    candidates = stored(flags.results, source)
    if not candidates:
        chosen = drawn(request, flags.count, flags.seed, per_engine=flags.per_engine)
        candidates = [Compiled(c.updates()) for c in chosen]
        save(flags.results, source, candidates)
    print(f"seed {flags.seed}, {flags.topology}, {flags.config} {' '.join(flags.overrides)}")
    units = ("GiB", "s")
    titles = [f"{unit}, {stage}" for unit in units for stage in ("closed", "compiled")]
    print(f"| candidate | {' | '.join(titles)} |")
    print("|---" * (1 + len(titles)) + "|")
    pairs: list[tuple[Predicted, Compiled]] = []
    for number, candidate in enumerate(candidates):
        config = update(shared, candidate.updates)
        if not candidate.compiled_in:
            if flags.stored:
                continue
            candidate = candidates[number] = compiled(candidate, config)
            save(flags.results, source, candidates)
        priced = priced_configuration(resolve(config, machine.devices), request)
        if isinstance(priced, str):
            raise SystemExit(priced)
        closed = Predicted(priced.memory, float(priced.seconds.step))
        pairs.append((closed, candidate))
        print(row(name_of(priced), closed, candidate), flush=True)
    print("", f"{len(pairs)} of {len(candidates)} compiled", *summary(pairs), sep="\n")


if __name__ == "__main__":
    main()

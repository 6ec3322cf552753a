"""Inject faults into supervised runs at random moments, and judge by an undisturbed run's bits.

    python scripts/benchmark/faults.py --faults 100 --processes 4 --seed 7

Kinds are drawn in equal shares, and so are moments: during a step, a save and a restart. A fault
during a restart hits the restart that the fault before it has caused. Each fault comes from
outside: a signal, a change of files, or a file system of the run's own that is filled or frozen,
which takes root and loop devices; without them these two kinds are left out. The supervisors have
to bring each run to its end, with every step logged once, the losses of a run without faults, and
the same bits in its last checkpoint. With `--elastic` a lost host stays away until the others go on
without it; losses after that are judged by 1e-5, and the bits of the checkpoint are not compared.
Only a full disk ends a run: once there is room the same
commands go on. Prints a table, and keeps the logs and files of a run that failed. Linux only.
"""

import argparse
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fault_kinds import KINDS, LOST_HOST, NEED_DISK, SLOW, Scene
from fault_report import Outcome, differences, table
from fault_soak import ENDS_SUPERVISORS, Samples, stop
from small_disk import SmallDisk, why_no_disk
from supervised_run import Processes, small_model, wait_until

from maxpipe.supervise.memory import shared_memory

MOMENTS = ("step", "save", "restart")
NAME = "faults"
SUPERVISOR = ("--pause", "0", "--max-restarts", "1000")
SOAK_MOMENTS = ("step", "save")
FASTEST_FAULT_SECONDS = 2.0
ENDLESS = 10**6
MOST_MISSES = 5
ELASTIC = (
    "mesh.elastic.axes=[data]",
    "mesh.elastic.wait_seconds=1",
    "model.dtype=float32",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "optimizer.learning_rate=1e-5",  # so that rounding does not grow over the steps
    "data.sequence_length=128",
)
STEPS = 80  # of each fault
ELASTIC_STEPS = 800
STEPS_AHEAD = 40  # from which the step of a fault is drawn


class Fault(NamedTuple):
    """What to inject, into which process, and when: one of `MOMENTS`."""

    kind: str
    victim: int
    moment: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 1 if a fault has left a trace."""
    options = _parse(argv)
    # Without this nobody would end the supervisors, and the disk would stay mounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    seed = random.randrange(10**6) if options.seed is None else options.seed
    directory = Path(options.directory or tempfile.mkdtemp(prefix="maxpipe-faults-")).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, {options.processes} processes, {directory}", flush=True)
    kinds = options.kinds.split(",") if options.kinds else [*KINDS]
    kinds = [kind for kind in kinds if kind != LOST_HOST or options.elastic]
    if reason := why_no_disk(directory):
        print(f"no {' and no '.join(NEED_DISK)}, for none can be mounted: {reason}")
        kinds = [kind for kind in kinds if kind not in NEED_DISK]
    if options.soak:
        return _soak(directory, kinds, options, seed)
    runs = draw_faults(kinds, options.faults, options.per_run, options.processes, seed)
    whole = directory / "whole"
    whole.mkdir()
    _run_whole(whole, options)
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for number, faults in enumerate(runs, 1):
        if options.only and number != options.only:
            continue
        print(f"run {number} of {len(runs)}", flush=True)
        wrong = _run_with_faults(directory / f"run-{number}", whole, faults, options, outcomes)
        problems += [f"run {number} of seed {seed}: {problem}" for problem in wrong]
    with shared_memory():
        pass  # removes what killed supervisors have left there
    for line in [*table(outcomes), *problems]:
        print(line)
    verdict = "failed" if problems else "sound"
    print(f"{verdict}: {len(outcomes)} faults in {len(runs)} runs, seed {seed}")
    return int(bool(problems))


def _soak(directory: Path, kinds: Sequence[str], options: argparse.Namespace, seed: int) -> int:
    """Let faults hit one run for some time; return 1 if it is lost or its processes grow."""
    kinds = [kind for kind in kinds if kind not in ENDS_SUPERVISORS]
    count = math.ceil(options.soak / FASTEST_FAULT_SECONDS)
    (faults,) = draw_faults(kinds, count, count, options.processes, seed, SOAK_MOMENTS)
    samples, outcomes = Samples(), list[Outcome]()
    options.steps = ENDLESS
    with _scene(directory, faults, options) as scene:
        until = time.monotonic() + options.soak
        _injure(scene, faults, outcomes, until, lambda: samples.take(scene.processes))
        problems = stop(scene.processes)
    problems += [f"{name} holds more than in the beginning" for name in samples.growing()]
    for line in [*table(outcomes), *samples.lines(), *problems]:
        print(line)
    print(f"{'failed' if problems else 'sound'}: {len(outcomes)} faults, seed {seed}, {directory}")
    return int(bool(problems))


def draw_faults(
    kinds: Sequence[str],
    count: int,
    per_run: int,
    processes: int,
    seed: int,
    moments: Sequence[str] = MOMENTS,
) -> list[list[Fault]]:
    """Return the faults of each run: kinds and moments in equal shares, in random order."""
    draw = random.Random(seed)
    drawn = [kinds[number % len(kinds)] for number in range(count)]
    when = [moments[number % len(moments)] for number in range(count)]
    draw.shuffle(drawn)
    draw.shuffle(when)
    faults = [
        Fault(kind, draw.randrange(processes), moment)
        for kind, moment in zip(drawn, when, strict=True)
    ]
    return [faults[start : start + per_run] for start in range(0, count, per_run)]


def _words(output: Path, options: argparse.Namespace) -> list[str]:
    small = small_model(options.processes)
    if options.elastic:  # longer steps, which are not over before a host is taken back
        small = [word for word in small if not word.startswith("data.sequence_length=")]
    return [
        *small,
        f"telemetry.step_deadline_seconds={options.deadline}",
        f"telemetry.startup_deadline_seconds={6 * options.deadline}",
        f"mesh.heartbeat_timeout_seconds={3 * options.deadline}",
        f"steps={_steps(options)}",
        "checkpoint.every=10",
        "checkpoint.replica_every=4",
        f"output_dir={output}",
        f"run_name={NAME}",
        *(ELASTIC if options.elastic else ()),
    ]


def _steps(options: argparse.Namespace) -> int:
    each = ELASTIC_STEPS if options.elastic else STEPS
    return int(options.steps or each * (options.per_run + 1))


def _run_whole(whole: Path, options: argparse.Namespace) -> None:
    """Train without faults; raises RuntimeError if that fails."""
    with Processes(whole, options.processes, _words(whole, options), SUPERVISOR) as processes:
        codes = processes.wait_until_ended()
        if any(codes):
            raise RuntimeError(f"without faults: {codes}\n{processes.output()[-3000:]}")


def _run_with_faults(
    place: Path,
    whole: Path,
    faults: Sequence[Fault],
    options: argparse.Namespace,
    outcomes: list[Outcome],
) -> list[str]:
    """Train with faults; add what followed from each, and return what is wrong in the end."""
    place.mkdir()
    earlier = len(outcomes)
    problems: list[str] = []
    with _scene(place, faults, options) as scene:
        processes = scene.processes
        try:
            _injure(scene, faults, outcomes)
            codes = processes.wait_until_ended()
            if any(codes):
                problems.append(f"exit codes {codes}")
            else:
                resized = _resized_after(processes.output())
                problems += differences(whole / NAME, scene.run, _steps(options), resized)
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
        missed = len(faults) - (len(outcomes) - earlier)
        if missed and not problems:
            problems.append(f"the run ended before {missed} of {len(faults)} faults; raise --steps")
        if problems:
            for index, process in enumerate(processes.codes):
                if process is None:
                    processes.kill(index)
            try:
                shutil.copytree(scene.run, place / "files", dirs_exist_ok=True)
            except OSError as error:  # the other runs count all the same
                problems.append(f"its files are not kept: {error}")
    if not problems:
        shutil.rmtree(place)
    return [f"{problem}; kept: {place}" for problem in problems]


@contextmanager
def _scene(place: Path, faults: Sequence[Fault], options: argparse.Namespace) -> Iterator[Scene]:
    """Start a run, on a disk of its own if one can be mounted, and kill what is left at the end."""
    with ExitStack() as stack:
        disk = None
        output = place / "disk"
        if not why_no_disk(place):
            disk = stack.enter_context(SmallDisk(output))
        processes = stack.enter_context(
            Processes(place, options.processes, _words(output, options), SUPERVISOR)
        )
        yield Scene(processes, output / NAME, disk, random.Random(repr(faults)))


def _injure(
    scene: Scene,
    faults: Sequence[Fault],
    outcomes: list[Outcome],
    until: float = math.inf,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Inject faults one after another.

    Args:
      scene: the run.
      faults: what to inject.
      outcomes: gets what followed from each.
      until: when to stop, by `time.monotonic`.
      look: called when the run goes on after a fault.
    """
    began = time.monotonic()
    wait_until(lambda: _last_step(scene) > 0, scene.processes)
    startup = time.monotonic() - began
    for number, fault in enumerate(faults):
        if not any(scene.processes.codes) and scene.processes.has_ended:
            return
        moment = _wait_for_moment(scene, fault, startup)
        attempts = scene.attempts
        began = time.monotonic()
        print(f"  {fault.kind}, process {fault.victim}, {moment}: ", end="", flush=True)
        for _ in range(MOST_MISSES):
            output = len(scene.processes.output())
            KINDS[fault.kind](scene, fault.victim)
            if fault.kind != SLOW:
                wait_until(lambda n=attempts: scene.attempts > n, scene.processes)
            if not scene.missed(fault.kind, output):
                break
            print("has missed; again: ", end="", flush=True)
            attempts = scene.attempts
        else:
            raise RuntimeError(f"{fault.kind} has missed {MOST_MISSES} times")
        before = _last_step(scene)
        seconds = None
        has_next = number + 1 < len(faults)
        if not (has_next and faults[number + 1].moment == "restart" and scene.is_starting):
            wait_until(lambda n=before: _last_step(scene) > n, scene.processes)
            seconds = time.monotonic() - began
        print(f"{seconds:.1f} s" if seconds else "the next one comes first", flush=True)
        outcomes.append(Outcome(fault.kind, moment, seconds))
        if seconds is not None:
            look()
        if time.monotonic() > until:
            return


def _wait_for_moment(scene: Scene, fault: Fault, startup: float) -> str:
    """Wait until it is time for a fault; return what the run is doing then.

    Args:
      scene: the run.
      fault: the next one.
      startup: seconds from a start to the first step, by which moments are drawn.
    """
    if fault.moment == "restart":
        if not scene.is_starting:  # the fault before has caused no restart
            attempts = scene.attempts
            KINDS["SIGKILL"](scene, fault.victim)
            wait_until(lambda: scene.attempts > attempts, scene.processes)
        time.sleep(scene.draw.uniform(0, startup))
    else:
        aim = _last_step(scene) + scene.draw.randrange(1, STEPS_AHEAD)
        wait_until(lambda: _last_step(scene) >= aim, scene.processes)
        if fault.moment == "save":
            wait_until(lambda: scene.is_saving, scene.processes, every_seconds=0.001)
    if scene.is_starting:
        return "restart"
    return "save" if scene.is_saving else "step"


def _resized_after(output: str) -> float:
    """Return the last step before the mesh of a run changed for the first time; inf if it never
    did.
    """
    steps = re.findall(r"since step (\d+): mesh\.ici\.data \d+ -> ", output)
    return min(map(int, steps), default=math.inf)


def _last_step(scene: Scene) -> int:
    """Return the highest step that was ever finished."""
    return scene.processes.highest_step()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--faults", type=int, default=10, help="of all runs (default: %(default)s)")
    add("--per-run", type=int, default=10, help="faults (default: %(default)s)")
    add("--processes", type=int, default=4, help="of each run (default: %(default)s)")
    add("--seed", type=int, help="of kinds, victims and moments; drawn and printed by default")
    add("--kinds", help=f"by commas, of: {', '.join(KINDS)} (default: all)")
    add("--elastic", action="store_true", help=f"with mesh.elastic.axes=[data], and {LOST_HOST!r}")
    add("--only", type=int, help="the number of the only one of all runs to make")
    add("--soak", type=float, help="seconds for which faults hit one run, which may not grow")
    add("--steps", type=int, help="of each run; by default for each fault 80, 800 with --elastic")
    add("--deadline", type=int, default=20, help="of a step, in seconds (default: %(default)s)")
    add("--directory", help="of runs and logs; a temporary one by default")
    options = parser.parse_args(argv)
    if LOST_HOST in (options.kinds or "").split(",") and not options.elastic:
        parser.error(f"{LOST_HOST!r} needs --elastic")
    return options


if __name__ == "__main__":
    sys.exit(main())

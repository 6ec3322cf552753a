"""Injure a supervised run from outside: by signals, files and mounts, in ten ways.

The run knows nothing of it: no kind needs a hook in maxpipe.
"""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from small_disk import SmallDisk
from supervised_run import Processes, wait_until

from maxpipe.checkpoint.steps import OWN, PARTNER, StepsDirectory, committed_steps

LONGEST_PAUSE_SECONDS = 5.0  # until a launcher starts again what was killed
FREEZE_SECONDS = (2.0, 25.0)
SOUND_CHECKPOINTS = 2  # of which one may be damaged
NEED_DISK = ("full disk", "slow disk")
LOST_HOST = "lost host"  # with mesh.elastic.axes only
GOES_ON = "has not come back in"  # said when the others go on without it
SLOW = "slow disk"  # the only kind after which an attempt may go on
DAMAGED = "damaged checkpoint"
NOTICED = "is damaged"  # said of a checkpoint, unless the fault has missed what is read
FULL_DISK_CODES = {1, 2}  # a save failed, or an attempt could not write at its start


class Scene(NamedTuple):
    """A run to injure.

    Attributes:
      processes: supervisors, one for each process.
      run: the run's directory.
      disk: that it lies on; None if none could be mounted.
      draw: what is drawn for a fault.
    """

    processes: Processes
    run: Path
    disk: SmallDisk | None
    draw: random.Random

    @property
    def attempts(self) -> int:
        """Count the attempts so far."""
        return self.processes.output().count("starts attempt")

    @property
    def is_starting(self) -> bool:
        """Whether the latest attempt has not finished a step yet."""
        return "\nstep " not in self.processes.output().rpartition("starts attempt")[2]

    def missed(self, kind: str, since: int) -> bool:
        """Return whether a fault was none, once the next restore is over.

        Args:
          kind: of the fault.
          since: characters of the output before it.
        """
        if kind != DAMAGED:
            return False

        def is_noticed() -> bool:
            return NOTICED in self.processes.output()[since:]

        wait_until(lambda: is_noticed() or not self.is_starting, self.processes)
        return not is_noticed()

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.run / "checkpoints").glob("*.orbax-checkpoint-tmp"))

    @property
    def checkpoints(self) -> list[int]:
        """Committed steps."""
        return committed_steps(self.run / "checkpoints")


def _send(number: signal.Signals) -> Callable[[Scene, int], None]:
    def inject(scene: Scene, victim: int) -> None:
        # Between two attempts there is no trainer.
        wait_until(lambda: scene.processes.send(victim, number), scene.processes)

    return inject


_kill = _send(signal.SIGKILL)


def _fill_disk(scene: Scene, victim: int) -> None:
    """Leave no room until the run has given up; then start the same commands again."""
    assert scene.disk is not None
    with scene.disk.full():
        codes = scene.processes.wait_until_ended()
    if not {*codes} <= FULL_DISK_CODES:
        raise RuntimeError(f"a full disk ended the run with {codes}")
    scene.processes.start_again()


def _freeze_disk(scene: Scene, victim: int) -> None:
    assert scene.disk is not None
    with scene.disk.frozen():
        time.sleep(scene.draw.uniform(*FREEZE_SECONDS))


def _damage_checkpoint(scene: Scene, victim: int) -> None:
    """Flip a byte of the newest checkpoint, from which the next attempt has to restore."""
    wait_until(lambda: len(scene.checkpoints) >= SOUND_CHECKPOINTS, scene.processes)
    _kill(scene, victim)
    for memory in map(memory_of, scene.processes.pids):
        for part in (OWN, PARTNER):
            for run in (memory / part).glob("*") if memory else ():
                shutil.rmtree(run, ignore_errors=True)  # a trainer may be writing there
    newest = StepsDirectory(scene.run / "checkpoints").of(scene.checkpoints[-1])
    largest = max(
        (path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    with largest.open("r+b") as file:
        place = scene.draw.randrange(largest.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << scene.draw.randrange(8)]))


def _lose_memory(scene: Scene, victim: int) -> None:
    """Remove a host's directory in memory, and kill its trainer."""
    memory = memory_of(scene.processes.pids[victim])
    if memory is not None:
        shutil.rmtree(memory, ignore_errors=True)
    _kill(scene, victim)


def _kill_supervisor(scene: Scene, victim: int) -> None:
    scene.processes.kill(victim)
    _start_again(scene)


def _kill_first_host(scene: Scene, victim: int) -> None:
    """Kill supervisor 0 with its trainer, and lose their memory."""
    memory = memory_of(scene.processes.pids[0])
    scene.processes.send(0, signal.SIGKILL)
    scene.processes.kill(0)
    if memory is not None:
        shutil.rmtree(memory, ignore_errors=True)
    _start_again(scene)


def _lose_host(scene: Scene, victim: int) -> None:
    """Keep a host away until the others have trained without it, and wait until they take it back.

    The first one cannot be lost.
    """
    lost = max(victim, 1)
    gone_on = scene.processes.output().count(GOES_ON)
    scene.processes.kill(lost)
    wait_until(lambda: scene.processes.output().count(GOES_ON) > gone_on, scene.processes)
    wait_until(lambda: not scene.is_starting, scene.processes)
    attempts = scene.attempts
    _start_again(scene)
    wait_until(lambda: scene.attempts > attempts, scene.processes)


def _start_again(scene: Scene) -> None:
    time.sleep(scene.draw.uniform(0, LONGEST_PAUSE_SECONDS))
    scene.processes.start_again()


KINDS: dict[str, Callable[[Scene, int], None]] = {
    "SIGKILL": _kill,
    "SIGSTOP": _send(signal.SIGSTOP),
    "SIGTERM": _send(signal.SIGTERM),
    "full disk": _fill_disk,
    "slow disk": _freeze_disk,
    DAMAGED: _damage_checkpoint,
    "lost memory": _lose_memory,
    "supervisor killed": _kill_supervisor,
    "first host killed": _kill_first_host,
    LOST_HOST: _lose_host,
}


def memory_of(supervisor: int) -> Path | None:
    """Return the directory in memory whose lock a supervisor holds; None if it has none."""
    for link in Path(f"/proc/{supervisor}/fd").glob("*"):
        try:
            target = Path(os.readlink(link))
        except OSError:
            continue  # closed meanwhile
        if target.is_relative_to("/dev/shm") and target.suffix == ".lock":
            return target.with_suffix("")
    return None

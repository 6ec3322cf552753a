"""Save a run's checkpoints asynchronously and atomically, verify them, and resume from them."""

import contextlib
import errno
import functools
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from maxpipe.checkpoint.arrays import Array, check_finite, describe, named_leaves, saveable
from maxpipe.checkpoint.errors import (
    CheckpointDamaged,
    CheckpointSaveError,
    NoCheckpoint,
    ReadError,
    StateNotFinite,
    brief,
    errno_of,
)
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.orbax_writer import OrbaxWriter
from maxpipe.checkpoint.policies import Retention, SaveTimer
from maxpipe.checkpoint.reader import Restored, read_step
from maxpipe.checkpoint.record import ITERATOR, Record, step_record
from maxpipe.checkpoint.steps import ABANDONED, DAMAGED, StepsDirectory, StepStore
from maxpipe.checkpoint.sync import MirrorSync
from maxpipe.config.sections import CheckpointConfig
from maxpipe.devices import processes

if TYPE_CHECKING:
    from maxpipe.checkpoint.replicas import Replicas

State = TypeVar("State")


class Checkpointer:
    """Saves and restores the checkpoints of one run; with several processes all call it alike.

    A save runs in the background: the arrays are copied to host memory, written, and committed by
    one atomic rename, together with the position in the data, the caller's meta and a digest of
    every array. An error of a background save is raised once, by the next call. With a mirror every
    committed step is then copied to an object store, also in the background; the next save waits
    for the copy. Steps that are only in the mirror count like those in the directory.

    A restore verifies every digest. If a step is damaged, the mirror's copy replaces it. If that is
    damaged, too, the run continues from the newest sound step, and the damaged newer steps are
    renamed to `<step>.damaged`. If a run goes back to an older step, its next save renames the
    newer steps to `<step>.abandoned`.

    With replicas, `replicate` puts a step into host memory. It is restored like a step in the
    directory if it is at least as new as those; a damaged replica is dropped.

    `directory` has a subdirectory for each step; it must be in a local or shared file system with
    atomic renames. `log` receives warnings, in process 0 only.
    """

    def __init__(
        self,
        directory: Path,
        settings: CheckpointConfig,
        *,
        mirror: Mirror | None = None,
        replicas: "Replicas | None" = None,
        log: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._convert_dtype = settings.convert_dtype
        self._log_in_process_0 = log or (lambda message: print(message, file=sys.stderr))
        self._directory = StepsDirectory(Path(directory).absolute())
        self._stores: list[StepStore] = [self._directory, *([mirror] if mirror else [])]
        self._timer = SaveTimer(settings, clock)
        self._retention = Retention(settings, functools.partial(self.record, is_saved=True))
        # With a mirror a step is safe when it has been copied, otherwise when it is committed.
        on_written = (lambda: None) if mirror else self._timer.finished
        self._writer = OrbaxWriter(self._directory, self._retention, on_written)
        self._sync: MirrorSync | None = None
        if mirror is not None:
            parts = (self._directory, mirror, self._retention)
            self._sync = MirrorSync(*parts, self._timer.finished, self._log)
        self._replicas = replicas
        self._latest: int | None = None  # step last saved or restored here, perhaps uncommitted
        self._base: int | None = None  # step last restored

    @property
    def place(self) -> str:
        return " and ".join(map(str, self._stores))

    def steps(self) -> list[int]:
        """Return committed steps in ascending order, including those that only the mirror has."""
        return sorted({step for store in self._stores for step in store.steps()})

    def resumable(self) -> list[int]:
        """Return `steps` and the steps that every process has a replica of, in ascending order."""
        return sorted({*self.steps(), *(self._replicas.steps if self._replicas else ())})

    @property
    def saved_step(self) -> int:
        """Return the step last saved, or last restored if it is also saved; 0 if there is none."""
        return self._latest or 0

    def record(self, step: int, *, is_saved: bool = False) -> Record:
        """Return the record of a step from memory (unless `is_saved`), directory or mirror.

        Raises as `step_record`.
        """
        if not is_saved and self._replicas is not None and step in self._replicas.steps:
            return step_record(self._replicas.of(step))
        stores = [store for store in self._stores if step in store.steps()]
        return (stores or self._stores)[0].record(step)

    def due(self, step: int) -> bool:
        """Return whether to save after this step; false for a step just saved or restored.

        Every process calls this once after every step. Raises CheckpointSaveError if the last save,
        or its copy to the mirror, has failed.
        """
        # Check now what has finished in the background, not only in the next save.
        if self._writer.is_pending and not self._writer.is_running:
            self._wait_for_commit()
        if self._sync is None or not self._sync.is_running:
            self._wait_for_mirror()
        # Ask in every step, whatever else holds: the processes have to agree on the time.
        is_due = self._timer.is_due(step)
        return step > 0 and step != self._latest and is_due

    def replica_due(self, step: int) -> bool:
        return self._replicas is not None and self._replicas.due(step)

    def replicate(self, step: int, state: object, iterator: Array, meta: dict[str, Any]) -> None:
        """Wait for the previous replica, then start writing a new one in the background.

        As `save`, except that a replica that cannot be written is only reported.
        """
        assert self._replicas is not None
        arrays = _arrays(state, iterator)
        with jax.transfer_guard("allow"):
            if warning := self._replicas.finish():
                self._log(warning)
            # Either all processes skip it or none does: the digests below need every process.
            if self._replicas.is_behind:
                return
            record = Record(step, meta, describe(step, arrays)).to_json()
            self._replicas.start(step, arrays, record)

    def save(
        self,
        step: int,
        state: object,
        iterator: Array,
        meta: dict[str, Any],
        on_set_aside: Callable[[], None] | None = None,
    ) -> bool:
        """Start saving in the background; return false if the step was just saved or restored.

        Waits for the previous save and for its copy to the mirror. After the return the arrays may
        be donated or overwritten; until the commit host memory has a copy of this process's shards.

        Args:
          step: number of training steps done.
          state: pytree of global `jax.Array`s in the canonical layout, or of NumPy arrays that are
            equal in all processes. PRNG keys as key data.
          iterator: data position, int64 [rows, columns] of all rows; NumPy or global `jax.Array`.
          meta: JSON; `meta["config"]` should be the nested configuration, `meta["eval_loss"]` the
            evaluation loss of this state if it is known.
          on_set_aside: called by the first save after a start or a restore, once the steps ahead of
            it are set aside and it can no longer be refused, and before this step is written.

        Raises:
          CheckpointSaveError: the previous save failed, or this one could not be started.
          StateNotFinite: an array of the state holds NaN or infinity, or a parameter a number whose
            square is infinite; raised in all processes.
          TypeError, ValueError: a leaf is not an array, or `meta` is not JSON.
        """
        if step == self._latest:
            return False
        # 1. Names and dtypes, before any wait: the caller's mistakes come first.
        arrays = _arrays(state, iterator)
        # 2. One save at a time, so that the host holds one copy of the state.
        self.wait()
        self._timer.began()
        # A save has to copy the state to the host, even in a loop that forbids transfers.
        with jax.transfer_guard("allow"):
            # 3. Digests. A state that is not finite is refused here, before anything is written.
            record = Record(step, meta, describe(step, arrays)).to_json()
            self._latest = step
            # Policies need the loss of this step before its record is on disk.
            self._retention.note(step, meta)
            # Until the save begins, a committed step of this number is an old one to replace.
            # Only the first save after a start or a restore can have steps ahead of it.
            if not self._writer.is_open:
                with self._failures(may_be_committed=False):
                    self._abandon_newer(step)
                if on_set_aside is not None:
                    on_set_aside()
            with self._failures(may_be_committed=False):
                self._writer.start(step, arrays, record)
        return True

    def check(self, step: int, state: object) -> None:
        """Check that a state in any layout, which will not be saved, is finite.

        Each process checks the leaves of which it holds a part; all raise `StateNotFinite` alike.
        """
        leaves = {
            name: leaf
            for name, leaf in named_leaves(state).items()
            if not isinstance(leaf, jax.Array) or leaf.sharding.has_addressable_devices
        }
        failure: StateNotFinite | None = None
        try:
            check_finite(step, leaves)
        except StateNotFinite as error:
            failure = error
        if not processes.agree(failure is None):
            raise failure or StateNotFinite(step, ["an array of another process"])

    def restore(
        self,
        abstract_state: State,
        step: int | None = None,
        optional: Collection[str] = (),
    ) -> Restored[State]:
        """Read and verify a committed step: the newest sound one, or `step`, which must be saved.

        Damaged newer steps are reported and, once an older one has been loaded, set aside as
        `<step>.damaged`. A replica of `step` does not count.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct`; leaves with a sharding come back as
            `jax.Array`s, the others as NumPy arrays. Mesh and shardings may differ from the save's.
          step: a committed step.
          optional: top-level names of parts that become zeros if the checkpoint does not hold them
            with the same names, shapes and dtypes.

        Raises:
          CheckpointMismatch: names, shapes or dtypes differ (`checkpoint.convert_dtype` allows
            other floating dtypes); lists each. Older steps are not tried.
          CheckpointDamaged: `step`, or every committed step, is damaged; nothing is renamed.
          CheckpointUnreadable: a step that may be sound cannot be read here; older steps are not
            tried.
          NoCheckpoint: there is no committed step, and no sound replica.
        """
        # The step to read may be the one that is still being written.
        self._finish_saves()
        if step is None:
            restored = self._restore_newest_sound(abstract_state, optional)
        else:
            restored = self._read(step, abstract_state, optional)
        # A step that is only in memory, or damaged where it was saved, still has to be saved.
        is_saved = False
        with contextlib.suppress(ReadError):
            is_saved = self.record(restored.step, is_saved=True).step == restored.step
        is_saved = bool(processes.of_first_process(int(is_saved)))
        self._latest = restored.step if is_saved else None
        self._base = restored.step
        if self._replicas is not None:  # the run is about to repeat these steps
            self._replicas.drop(*(s for s in self._replicas.steps if s > restored.step))
        return restored

    def wait(self) -> None:
        """Wait until nothing is being saved or copied to the mirror; raises as `due`."""
        self._wait_for_commit()
        self._wait_for_mirror()

    def close(self) -> None:
        """Wait for a running save and stop its threads; copy what the mirror lacks."""
        if self._replicas is not None:
            self._replicas.wait()
        self._finish_saves()
        if self._sync is not None:
            # Copy the last step, and whatever an earlier copy failed to bring to the mirror.
            self._sync.start()
            self._wait_for_mirror()

    def _wait_for_commit(self) -> None:
        """Wait for a running save, then start copying it to the mirror."""
        if not self._writer.is_pending:
            return
        with self._failures():
            self._writer.wait()
        if self._sync is not None:
            self._sync.start()

    def _wait_for_mirror(self) -> None:
        if self._sync is not None:
            self._sync.wait()
        if warning := self._timer.warning():
            self._log(warning)

    def _finish_saves(self) -> None:
        with self._failures():
            self._writer.close()
        self._wait_for_mirror()

    def _abandon_newer(self, step: int) -> None:
        """Set aside the steps after the restored one: a run that went back repeats them.

        In ascending order: after a crash midway, the run continues from the newest one, to which
        the rows of metrics still belong. `step` is about to be written.
        """
        if jax.process_index() == 0:
            # A step restored from memory may have a saved copy as well, a damaged one.
            first = step if self._base is None else min(step, self._base + 1)
            for newer in [s for s in self.steps() if s >= first]:
                target = self._set_aside(newer, ABANDONED)
                self._log(f"checkpoint {newer}, ahead of this run, was set aside as {target}")
        # No process may write a step before process 0 has moved the old one away.
        processes.barrier("maxpipe_abandon")

    def _set_aside(self, step: int, state: str) -> str:
        """Set a step aside in every store that has it, in process 0; return the new names."""
        stores = [store for store in self._stores if step in store.steps()]
        return " and ".join([store.set_aside(step, state) for store in stores])

    def _restore_newest_sound(
        self, abstract_state: State, optional: Collection[str]
    ) -> Restored[State]:
        # Nothing is renamed until a sound step has been read: the machine may be at fault.
        damage: dict[int, str] = {}
        while (step := self._newest_below(min(damage, default=None))) is not None:
            if self._replicas is not None and step in self._replicas.steps:
                replica = self._replicas.of(step)
                try:
                    restored = read_step(replica, abstract_state, optional, self._convert_dtype)
                except ReadError as error:
                    self._replicas.drop(step)
                    self._log(f"the replica of step {step} in memory is dropped: {error.reason}")
                    continue  # the step may have a saved copy as well
                source = f"replicas in memory; {self._safe_steps()}"
                self._log(f"step {step} is restored from {source}")
            else:
                try:
                    restored = self._read(step, abstract_state, optional)
                except CheckpointDamaged as error:
                    damage[step] = error.reason
                    self._log(str(error))
                    continue
            if damage:
                if jax.process_index() == 0:
                    for damaged in damage:
                        self._set_aside(damaged, DAMAGED)
                # Otherwise another process could still list a step that is being renamed.
                processes.barrier("maxpipe_damaged")
                names = ", ".join(map(str, damage))
                done = f"damaged and set aside as <step>.{DAMAGED}: {names}"
                self._log(f"continuing from checkpoint {step}; {done}")
            return restored
        if not damage:
            raise NoCheckpoint(f"there is no checkpoint in {self.place}, and no sound replica")
        lines = (f"step {step}: {reason}" for step, reason in damage.items())
        reasons = "\n  ".join(("none of its steps can be loaded:", *lines))
        remedy = "Put back a copy of that directory; to start from scratch delete it or choose"
        raise CheckpointDamaged(self.place, f"{reasons}\n{remedy} another run_name.")

    def _read(self, step: int, abstract_state: State, optional: Collection[str]) -> Restored[State]:
        read = functools.partial(
            read_step, self._directory.of(step), abstract_state, optional, self._convert_dtype
        )
        # With a mirror, a damaged or lost step is fetched from it.
        restored = self._sync.read(step, read) if self._sync else read()
        if restored.converted:
            reason = "converted to the dtypes of this run (checkpoint.convert_dtype)"
            self._log(f"{restored.converted} arrays of checkpoint {step} were {reason}")
        return restored

    def _newest_below(self, limit: int | None) -> int | None:
        # Processes may list a shared file system at different times.
        steps = [step for step in self.resumable() if limit is None or step < limit]
        step = processes.of_first_process(max(steps, default=-1))
        return step if step >= 0 else None

    @contextlib.contextmanager
    def _failures(self, may_be_committed: bool = True) -> Iterator[None]:
        """Turn any error into a `CheckpointSaveError`, unless the step is committed.

        An error after the commit came from deleting older steps; it is only reported.
        """
        try:
            yield
        except Exception as error:
            latest = self._latest
            if may_be_committed and latest in self._directory.steps():
                problem = f"older ones could not be deleted: {error}"
                return self._log(f"checkpoint {latest} is saved, but {problem}")
            self._latest = None  # so that the step may be tried again
            number, remedy = errno_of(error), ""
            reason = os.strerror(number) if number else brief(error)
            if number in (errno.ENOSPC, errno.EDQUOT):
                remedy = "; free space there, lower checkpoint.keep, or name another output_dir"
            raise CheckpointSaveError(
                f"saving checkpoint {self._directory}/{latest} failed: {reason}; "
                f"{self._safe_steps()}{remedy}"
            ) from error

    def _safe_steps(self) -> str:
        steps = ", ".join(map(str, self.steps()))
        kind = "steps" if "," in steps else "step"
        return f"safe: {kind} {steps} in {self.place}" if steps else "no step is saved yet"

    def _log(self, message: str) -> None:
        if jax.process_index() == 0:
            self._log_in_process_0(message)


def _arrays(state: object, iterator: Array) -> dict[str, Array]:
    leaves = {**named_leaves(state), ITERATOR: iterator}
    return {name: saveable(name, leaf) for name, leaf in leaves.items()}

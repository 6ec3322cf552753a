"""`Checkpointer`: asynchronous, atomic, verified checkpoints of a run, on Orbax."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from maxpipe.checkpoint.digest import digests
from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointSaveError, CheckpointUnreadable
from maxpipe.checkpoint.mirror import Mirror
from maxpipe.checkpoint.mirroring import Mirroring
from maxpipe.checkpoint.reader import ITEM as ARRAYS
from maxpipe.checkpoint.reader import Restored, read_step
from maxpipe.checkpoint.record import FILE as RECORD_FILE
from maxpipe.checkpoint.record import ITEM as RECORD
from maxpipe.checkpoint.record import ITERATOR, Leaf, Record, named_leaves, read_record, saveable
from maxpipe.checkpoint.retention import Interval, Retention
from maxpipe.checkpoint.steps import ABANDONED, DAMAGED, committed_steps, set_aside, step_path
from maxpipe.config.sections import CheckpointConfig
from maxpipe.devices import processes

if TYPE_CHECKING:
    import orbax.checkpoint as ocp


class Checkpointer:
    """Saves and restores the checkpoints of one run; with several processes all of them make the same calls.

    A step is one commit: state, data position, the caller's meta and a digest of every array appear
    together under `<directory>/<step>/` or not at all. The directory must be a local or shared file
    system with atomic renames. With a mirror every committed step is copied there in the
    background, and steps that are only there are as good as those in the directory: they are
    fetched to be restored.

    Args:
      directory: holds the step directories; made by the first save.
      settings: `checkpoint.*`. A step that is not to be kept is deleted only after a newer one has
        been committed.
      mirror: of the directory.
      say: where warnings go; called in process 0 only.
      clock: seconds, never going back.
    """

    def __init__(
        self,
        directory: Path,
        settings: CheckpointConfig,
        *,
        mirror: Mirror | None = None,
        say: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._directory = Path(directory).absolute()
        self._settings = settings
        self._mirror = mirror
        self._retention = Retention(settings, self._record_of)
        self._mirroring = Mirroring(self._directory, mirror, self._retention) if mirror else None
        self._interval = Interval(60 * settings.every_minutes, clock)
        self._report = say or (lambda message: print(message, file=sys.stderr))
        self._grace = settings.grace_seconds
        self._save_began = 0.0
        self._save_seconds: float | None = (
            None  # until the last save was safe everywhere, and nobody has looked
        )
        self._orbax: ocp.CheckpointManager | None = None
        self._is_saving = False  # or has been, and nobody has looked what came of it
        self._latest: int | None = (
            None  # step last saved or restored here, perhaps not committed yet
        )

    def due(self, step: int) -> bool:
        """Whether to save after this step, by number or by time; never for a step just saved or restored.

        With several processes all of them ask once after every step.

        Raises:
          CheckpointSaveError: the last save, or its copy to the mirror, has failed in the
            background.
        """
        if self._orbax is not None and self._is_saving and not self._orbax.is_saving_in_progress():
            self._wait_for_commit()
        if self._mirroring is None or not self._mirroring.is_running:
            self._wait_for_mirror()
        every, is_late = self._settings.every, self._interval.is_over()
        return step > 0 and step != self._latest and (is_late or (every > 0 and step % every == 0))

    @property
    def place(self) -> str:
        """Where the steps are, in words."""
        return f"{self._directory} and {self._mirror.url}" if self._mirror else str(self._directory)

    def steps(self) -> list[int]:
        """Committed steps in ascending order, those that are only in the mirror included."""
        mirrored = self._mirror.steps() if self._mirror else []
        return sorted({*committed_steps(self._directory), *mirrored})

    def save(
        self,
        step: int,
        state: Any,
        iterator: np.ndarray | jax.Array,
        meta: dict[str, Any],
    ) -> bool:
        """Starts saving in the background, unless the step was just saved or restored.

        Waits for an earlier save, and for its copy to the mirror.

        On return nothing refers to the arrays any more: they may be donated or overwritten. Until
        the commit one copy of this process's shards is kept in host memory.

        Args:
          step: training steps done.
          state: pytree of arrays in the canonical layout: `jax.Array`s (with several processes:
            global ones) or NumPy arrays (with several processes: equal in all of them). PRNG keys
            as key data.
          iterator: [rows, columns] int64 of all rows, as NumPy or as a global `jax.Array`.
          meta: JSON; `meta["config"]` should be the nested configuration, `meta["eval_loss"]` the
            evaluation loss of this state if it is known.

        Returns:
          Whether a save was started.

        Raises:
          CheckpointSaveError: the previous save failed in the background, or this one could not be
            started.
          TypeError, ValueError: a leaf is not an array, or `meta` is not JSON.
        """
        if step == self._latest:
            return False
        arrays = {
            name: saveable(name, leaf)
            for name, leaf in {**named_leaves(state), ITERATOR: iterator}.items()
        }
        self.wait()
        self._save_began = time.monotonic()
        # Moving a state to the host is what a save is for, so that it is legal also inside a
        # guarded loop.
        with jax.transfer_guard("allow"):
            found = digests(arrays)
            leaves = {
                n: Leaf(tuple(a.shape), np.dtype(a.dtype).name, found[n]) for n, a in arrays.items()
            }
            record = Record(step, meta, leaves).to_json()
            self._latest = step
            self._retention.note(step, meta)
            self._interval.restart()
            with self._failures(may_be_committed=False):
                self._start(step, arrays, record)
        return True

    def restore(
        self, abstract_state: Any, step: int | None = None, optional: Collection[str] = ()
    ) -> Restored:
        """Reads and verifies a committed step.

        Without `step`, the newest step that is sound; damaged newer ones are reported and, once an
        older one has been loaded, set aside as `<step>.damaged`. With `step`, that one or nothing.
        Where the directory's copy of a step is missing or damaged, the mirror's takes its place.

        Args:
          abstract_state: pytree of `jax.ShapeDtypeStruct`; leaves with a sharding come back as
            `jax.Array`s, the others as NumPy arrays. The mesh and the shardings need not be those
            of the save.
          step: a committed step.
          optional: top-level names of parts that are zeros unless the checkpoint holds just such
            ones.

        Raises:
          CheckpointMismatch: names, shapes or dtypes differ (`checkpoint.convert_dtype` allows
            other floating dtypes); lists each. Older steps are not tried.
          CheckpointDamaged: `step`, or every committed step, is damaged; nothing is renamed.
          CheckpointUnreadable: a step that may be sound cannot be read here; older steps are not
            tried.
          FileNotFoundError: there is no committed step.
        """
        self._release()
        if step is not None:
            try:
                restored = self._read(step, abstract_state, optional)
            except CheckpointDamaged as error:
                raise CheckpointDamaged(
                    f"checkpoint {step_path(self._directory, step)}: {error}"
                ) from error
        else:
            restored = self._restore_newest_sound(abstract_state, optional)
        self._latest = restored.step
        return restored

    def wait(self) -> None:
        """Returns when nothing is being saved or copied to the mirror any more.

        Raises:
          CheckpointSaveError: the save failed; reported once.
        """
        self._wait_for_commit()
        self._wait_for_mirror()

    def close(self) -> None:
        """Waits for a running save and lets go of threads; copies to the mirror what earlier processes could not.

        Raises:
          CheckpointSaveError: the save failed and that has not been reported yet.
        """
        self._release()
        if self._mirroring is not None:
            self._mirroring.start(self._saved)
            self._wait_for_mirror()

    def _wait_for_commit(self) -> None:
        """Then the mirror has something to copy."""
        if self._orbax is None or not self._is_saving:
            return
        self._is_saving = False
        with self._failures():
            self._orbax.wait_until_finished()
        if self._mirroring is not None:
            self._mirroring.start(self._saved)

    def _wait_for_mirror(self) -> None:
        if self._mirroring is not None and (warning := self._mirroring.wait()):
            self._say(warning)
        self._compare_with_grace()

    def _start(self, step: int, arrays: dict[str, Any], record: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp  # a second or more to import: paid at the first save

        if self._orbax is None:
            self._abandon_from(step)
            self._orbax = _manager_class()(
                self._directory,
                item_handlers={
                    ARRAYS: ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False),
                    RECORD: ocp.JsonCheckpointHandler(RECORD_FILE),
                },
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=self._retention,
                    cleanup_tmp_directories=True,
                    async_options=ocp.AsyncOptions(post_finalization_callback=self._written),
                    # Damage in an old step's metadata must not prevent a new save.
                    lightweight_initialize=True,
                ),
            )
        items = {ARRAYS: ocp.args.PyTreeSave(arrays), RECORD: ocp.args.JsonSave(record)}
        self._is_saving = True
        self._orbax.save(step, args=ocp.args.Composite(**items), force=True)

    def _abandon_from(self, step: int) -> None:
        """Sets aside steps that a run which went back before them is about to write anew."""
        for newer in [s for s in self.steps() if s >= step] if jax.process_index() == 0 else []:
            aside = self._set_aside(newer, ABANDONED)
            self._say(f"checkpoint {newer} lies ahead of this run and was set aside as {aside}")
        processes.barrier("maxpipe_abandon")

    def _set_aside(self, step: int, state: str) -> str:
        """Sets a step aside wherever it is, for process 0; says as what."""
        places = []
        if step in committed_steps(self._directory):
            places.append(str(set_aside(self._directory, step, state)))
        if self._mirror and step in self._mirror.steps():
            places.append(self._mirror.set_aside(step, state))
        return " and ".join(places)

    def _restore_newest_sound(self, abstract_state: Any, optional: Collection[str]) -> Restored:
        damage: dict[int, str] = {}
        while (step := self._newest_below(min(damage, default=None))) is not None:
            try:
                restored = self._read(step, abstract_state, optional)
            except CheckpointDamaged as error:
                damage[step] = str(error)
                self._say(f"checkpoint {step} in {self._directory} is damaged: {error}")
                continue
            self._set_damaged_aside(damage, restored.step)
            return restored
        if not damage:
            raise FileNotFoundError(f"no committed checkpoint in {self.place}")
        found = "\n".join(f"  step {step}: {reason}" for step, reason in damage.items())
        raise CheckpointDamaged(
            f"none of the checkpoints in {self.place} can be loaded:\n{found}\n"
            "Put back a copy of that directory; to start from scratch delete it or choose another run_name."
        )

    def _read(self, step: int, abstract_state: Any, optional: Collection[str]) -> Restored:
        directory, convert = step_path(self._directory, step), self._settings.convert_dtype
        read = functools.partial(
            read_step, directory, abstract_state, optional, convert_dtype=convert
        )
        try:
            restored = (
                read() if self._mirroring is None else self._mirroring.read(step, read, self._say)
            )
        except CheckpointUnreadable as error:
            raise CheckpointUnreadable(f"checkpoint {directory}: {error}") from error
        if restored.converted:
            what = f"{restored.converted} arrays of checkpoint {step} were converted to the dtypes of this run"
            self._say(f"{what} (checkpoint.convert_dtype)")
        return restored

    def _newest_below(self, limit: int | None) -> int | None:
        """Process 0 looks, so that all try the same step."""
        newest = max((step for step in self.steps() if limit is None or step < limit), default=-1)
        step = processes.of_first_process(newest)
        return step if step >= 0 else None

    def _set_damaged_aside(self, damage: dict[int, str], sound: int) -> None:
        if not damage:
            return
        if jax.process_index() == 0:
            for step in damage:
                self._set_aside(step, DAMAGED)
        processes.barrier("maxpipe_damaged")
        steps = ", ".join(map(str, damage))
        self._say(
            f"going on from checkpoint {sound}; damaged and set aside as <step>.{DAMAGED}: {steps}"
        )

    def _release(self) -> None:
        orbax, self._orbax = self._orbax, None
        if orbax is not None:
            self._is_saving = False
            with self._failures():
                orbax.close()
        self._wait_for_mirror()

    def _written(self) -> None:
        """Called by the thread that is about to commit."""
        if self._mirroring is None:
            self._saved()

    def _saved(self) -> None:
        if self._save_began:  # what is copied to the mirror may be of an earlier process
            self._save_seconds = time.monotonic() - self._save_began

    def _record_of(self, step: int) -> Record:
        if self._mirror and step not in committed_steps(self._directory):
            return self._mirror.record(step)
        return read_record(step_path(self._directory, step))

    def _compare_with_grace(self) -> None:
        seconds, self._save_seconds = self._save_seconds, None
        if seconds is None or not 0 < self._grace < seconds:
            return
        self._grace = 0  # once is enough
        self._say(
            f"a checkpoint took {seconds:.1f} s, longer than checkpoint.grace_seconds allows: a preempted run would be "
            "killed before its last save is done. Save to faster storage, or save more often to lose less"
        )

    @contextlib.contextmanager
    def _failures(self, may_be_committed: bool = True) -> Iterator[None]:
        """Makes a `CheckpointSaveError` of any error, but for one met after the commit, while deleting older steps.

        Before the save has begun a step of this number is one that it was to replace:
          `may_be_committed` is false.
        """
        try:
            yield
        except Exception as error:
            if may_be_committed and self._latest in committed_steps(self._directory):
                self._say(
                    f"checkpoint {self._latest} is saved, but older ones could not be deleted: {error}"
                )
                return
            where = (
                self._directory
                if self._latest is None
                else step_path(self._directory, self._latest)
            )
            self._latest = None  # so that the step may be tried again
            raise CheckpointSaveError(
                f"saving checkpoint {where} failed: {type(error).__name__}: {error}"
            ) from error

    def _say(self, message: str) -> None:
        if jax.process_index() == 0:
            self._report(message)


@functools.cache
def _manager_class() -> type["ocp.CheckpointManager"]:
    import orbax.checkpoint as ocp

    class Manager(ocp.CheckpointManager):
        """Orbax's manager, without its questions about preemption.

        It asks JAX's preemption service about the step being saved, also from the thread that
        commits it, while the loop asks about later steps. The service takes the latest question for
        the step the process stands at, and would have the processes agree on one that has passed.
        """

        def reached_preemption(self, step: int) -> bool:
            return False

    return Manager

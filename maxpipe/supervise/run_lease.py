"""Give a run one owner: leases of its directory and of its place in an object store.

A second start of the same run is refused while the first one lives. Imports no JAX.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.terminal import at_end
from maxpipe.storage.lease import Lease, LeaseDirectory, LeasePlace, Owner, PlaceInUse, acquire
from maxpipe.storage.object_store import explained

if TYPE_CHECKING:  # takes time to import, and most runs have none
    from maxpipe.checkpoint.mirror import Mirror

_MIRROR = "checkpoint.mirror"


class RunLease:
    """Leases of a run's directory, then of its mirror; without leases its calls do nothing."""

    def __init__(self, leases: Sequence[Lease] = ()):
        self._leases = leases

    @property
    def is_lost(self) -> bool:
        """Return whether `check` would raise."""
        return any(lease.is_lost for lease in self._leases)

    def check(self) -> None:
        """Raise `LeaseLost` if a renewal has found a place gone or with another owner; cheap."""
        for lease in self._leases:
            lease.check()

    def verify(self) -> None:
        """Look at the directory now, rather than trust the last renewal; raises as `check`."""
        for lease in self._leases[:1]:
            lease.verify()
        self.check()


@contextmanager
def own_run(
    root: Path,
    mirror: "Mirror | None",
    job: tuple[str, int],
    log: Callable[[str], None],
) -> Iterator[RunLease]:
    """Own a run's directory and mirror, and release both at the end of the context or process.

    A directory that is made here is removed at the end if it is empty.

    Args:
      root: the run's directory.
      mirror: the mirror of the run's checkpoints, if it has one.
      job: name and attempt of the job that this process belongs to.
      log: function that receives a line about a wait or a takeover.

    Raises:
      ConfigError: a live process owns one of them, or it cannot be written to.
    """
    owner = Owner.this_process(*job)
    with ExitStack() as stack:
        for missing in reversed([path for path in (root, *root.parents) if not path.exists()]):
            stack.callback(_remove_if_empty, missing)
        try:
            leases = [_own(LeaseDirectory(root), owner, log, stack)]
        except OSError as error:
            message = f"cannot write to {root}: {error.strerror}"
            raise ConfigError(Problem("output_dir", message)) from error
        if mirror is not None:
            with explained(mirror.url, _MIRROR, "written to"):
                leases.append(_own(mirror.lease_place(), owner, log, stack))
        yield RunLease(leases)


def _own(place: LeasePlace, owner: Owner, log: Callable[[str], None], stack: ExitStack) -> Lease:
    """Acquire the lease of a place, and release it with the stack."""
    try:
        lease = acquire(place, owner, log)
    except PlaceInUse as error:
        remedy = "wait until it has ended, stop it, or choose another run_name"
        raise ConfigError(Problem("run_name", f"{error}: {remedy}")) from None
    stack.enter_context(at_end(lease.release))
    return lease


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()

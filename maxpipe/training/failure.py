"""How a process ends that cannot go on."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from maxpipe.checkpoint.errors import CheckpointDamaged, CheckpointMismatch, CheckpointSaveError
from maxpipe.config.errors import ConfigError

FAILED = 1
# Their messages say all that a user can act on.
EXPLAINED = (CheckpointDamaged, CheckpointMismatch, CheckpointSaveError)


@contextmanager
def failing_fast() -> Iterator[None]:
    """Ends the process with exit code 1 on an error: with a traceback unless its message says all.

    One of several processes ends at once. Python's way out would wait for the others, and they wait for this one in
    a collective. Errors of JAX take that way all the same: most often they mean that another process is lost, and
    then JAX ends this one with exit code 134 on its way.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        is_explained, is_one_of_several = isinstance(error, EXPLAINED), jax.process_count() > 1
        if is_explained:
            print(f"error: {error}", file=sys.stderr)
        elif not is_one_of_several or isinstance(error, jax.errors.JaxRuntimeError):
            raise
        else:
            traceback.print_exc()
        if is_one_of_several:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(FAILED)
        raise SystemExit(FAILED) from None

"""Open object stores (`s3://`, `gs://`) through fsspec: libraries, options, helpful errors."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from maxpipe.config.errors import ConfigError, Problem, redacted
from maxpipe.config.imports import optional

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from fsspec.callbacks import Callback
    from fsspec.spec import AbstractBufferedFile

WAITS = (1, 2, 4, 8, 16, 32)  # seconds between attempts to read
_HUB, _PATH = "hf", "data.path"
DEADLINE = "checkpoint.mirror_deadline_seconds"

closing = threading.Event()  # while it is set, `patiently` makes no further attempt

Answer = TypeVar("Answer")

_S3_TIMEOUTS = {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}}
# Protocol of a URL, which is also the name of the extra -> the fsspec library that speaks it, the
# arguments for `fsspec.filesystem`, and where the library looks for credentials, in words.
_PROTOCOLS: dict[str, tuple[str, dict[str, object], str]] = {
    "s3": (
        "s3fs",
        {"config_kwargs": _S3_TIMEOUTS},
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE); "
        "AWS_ENDPOINT_URL for stores other than AWS",
    ),
    "gs": (
        "gcsfs",
        {"token": "google_default"},
        "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file",
    ),
}


def in_background(call: Callable[[], Answer], name: str) -> "Future[Answer]":
    """Call a function in a thread that the end of the process does not wait for."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class StoreSilent(TimeoutError):
    """A store has accepted a request and does not answer."""


class Deadline:
    """Bounds how long a store may be silent, in seconds; 0 = no limit.

    s3fs waits for ever for the answer to a write that a store has accepted, and retries reads for
    minutes, whatever its timeouts.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._last_sign = time.monotonic()

    def wait(self, request: Callable[..., Answer], *words: object, **options: object) -> Answer:
        """Return the answer to a request, a function that runs in a thread of its own; raises
        StoreSilent if it has neither ended nor made progress in time; its thread is left alone.
        """
        if not self._seconds:
            return request(*words, **options)
        self.progress()
        future = in_background(partial(request, *words, **options), "object store")
        while not wait([future], timeout=self._last_sign + self._seconds - time.monotonic()).done:
            if time.monotonic() - self._last_sign >= self._seconds:
                raise StoreSilent(
                    f"the store has not answered for {self._seconds:g} s ({DEADLINE})"
                )
        return future.result()

    def progress(self) -> None:
        self._last_sign = time.monotonic()

    def callback(self) -> "Callback":
        """Return an fsspec callback for transfers, whose calls count as signs of life."""
        from fsspec.callbacks import Callback

        deadline = self

        class SignOfLife(Callback):
            def call(self, hook_name: str | None = None, **_: object) -> None:
                deadline.progress()

            def branched(self, *_: object, **__: object) -> Callback:
                return self

        return SignOfLife()


def is_remote(path: str) -> bool:
    return "://" in path


@lru_cache
def _store_of(protocol: str) -> "AbstractFileSystem":
    if protocol != _HUB:
        return open_store(f"{protocol}://", _PATH)
    with optional("huggingface_hub", "hub", _PATH):
        from huggingface_hub import HfFileSystem
    return HfFileSystem()


def opened(url: str, size: int) -> "AbstractBufferedFile":
    """Return a file of `size` bytes of a store or, as hf://..., of the hub of Hugging Face, with a
    request for each read and none before.
    """
    return _store_of(url.partition("://")[0]).open(url, size=size, cache_type="none")


def patiently(call: Callable[[], Answer], url: str, lasting: type[Exception]) -> Answer:
    """Return the answer to a call that reads from a store, which is repeated for a minute if that
    fails, unless with an error that `lasting` names, or for want of a file or permission.

    Every store has errors of its own for what is temporary; the last is raised as an OSError.
    """
    for pause in (*WAITS, None):
        try:
            return call()
        except (lasting, FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            if pause is not None and not closing.is_set():
                line = f"{url} cannot be read, next attempt in {pause} s: {error}"
                print(redacted(line), file=sys.stderr, flush=True)
            if pause is None or closing.wait(pause):
                raise OSError(f"{type(error).__name__}: {error}") from error
    raise AssertionError


def open_store(url: str, key: str) -> "AbstractFileSystem":
    """Return the fsspec file system that a URL belongs to, without contacting the store.

    Raises ConfigError if no library speaks the protocol, or it is not installed, or the URL holds
    credentials; under `key`, which gave the URL, such as `data.path`.
    """
    protocol, _, place = url.partition("://")
    if protocol not in _PROTOCOLS:
        known = ", ".join(f"{name}://" for name in _PROTOCOLS)
        message = f"{url}: {protocol}:// is not supported; it may be {known}"
        raise ConfigError(Problem(key, message))
    library, options, credentials = _PROTOCOLS[protocol]
    # The library would take credentials for a part of the bucket's name, and quote it in its error.
    # A password may hold a slash.
    bucket = place.partition("/")[0]
    has_colon = ":" in bucket and not bucket.startswith("arn:")
    if "@" in bucket or (has_colon and "@" in place):
        message = f"{url}: a URL must not hold credentials; they come from {credentials}"
        raise ConfigError(Problem(key, message))
    with optional(library, protocol, key):
        import fsspec

        # Other programs change the store, so neither instances nor listings may be cached.
        return fsspec.filesystem(
            protocol, skip_instance_cache=True, use_listings_cache=False, **options
        )


@contextmanager
def explained(url: str, key: str, action: str = "read") -> Iterator[None]:
    """Turn every error inside the context into a ConfigError that names credentials.

    The context does what `action`, a past participle, says with a URL that `key` gave.
    """
    try:
        yield
    except ConfigError:
        raise
    # Every store has errors of its own, from the network's to "no such bucket".
    except Exception as error:
        message = (
            f"{url} cannot be {action}: {type(error).__name__}: {error}; "
            f"credentials come from {_PROTOCOLS[url.partition('://')[0]][2]}"
        )
        raise ConfigError(Problem(key, message)) from error

"""Object stores (`s3://`, `gs://`) through fsspec: what speaks to them, and what their errors tell the user."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maxpipe.config.errors import ConfigError, Problem
from maxpipe.config.imports import optional

# Protocol: (library of fsspec's that speaks it = extra that installs it, options, what credentials
# come from).
STORES: dict[str, tuple[str, dict[str, Any], str]] = {
    "s3": (
        "s3fs",
        {
            "config_kwargs": {
                "connect_timeout": 5,
                "read_timeout": 30,
                "retries": {"max_attempts": 2},
            }
        },
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE); AWS_ENDPOINT_URL for stores other than AWS",
    ),
    "gs": (
        "gcsfs",
        {"token": "google_default"},
        "GOOGLE_APPLICATION_CREDENTIALS to the path of a key file",
    ),
}


def is_remote(path: str) -> bool:
    """Whether the path begins with a protocol."""
    return "://" in path


def open_store(url: str, key: str) -> Any:
    """The fsspec file system that a URL belongs to; nothing is asked of the store yet.

    Args:
      url: such as `s3://bucket/corpus`.
      key: what names it, such as `data.path`.

    Raises:
      ConfigError: no library speaks the protocol, or it is not installed.
    """
    protocol = url.partition("://")[0]
    if protocol not in STORES:
        known = ", ".join(f"{name}://" for name in STORES)
        raise ConfigError(Problem(key, f"{url}: there is no {protocol}:// here; it may be {known}"))
    library, options, _ = STORES[protocol]
    with optional(library, protocol, key):
        import fsspec

        # What others write must be seen, so that neither instances nor listings are kept.
        return fsspec.filesystem(
            protocol, skip_instance_cache=True, use_listings_cache=False, **options
        )


@contextmanager
def explained(url: str, key: str, deed: str = "read") -> Iterator[None]:
    """Makes every error inside one that a user can mend.

    Args:
      url, key: as for `open_store`.
      deed: what is done with the URL inside, a past participle.

    Raises:
      ConfigError: the store lets nobody in, or does not answer.
    """
    try:
        yield
    except ConfigError:
        raise
    # Every store has errors of its own, from the network's to "no such bucket".
    except Exception as error:
        raise unusable(url, error, key, deed) from error


def unusable(url: str, error: Exception, key: str, deed: str = "read") -> ConfigError:
    """What to say of an error of a store; arguments as for `explained`."""
    credentials = STORES[url.partition("://")[0]][2]
    message = f"{url} cannot be {deed}: {type(error).__name__}: {error}; credentials come from {credentials}"
    return ConfigError(Problem(key, message))

"""Define streamload's own errors, as one tree.

There is one class for each decision of a caller: check the storage, repair or remove a shard, rebuild an index, fix or
skip a sample, restart, or correct a saved state. Invalid arguments raise `ValueError` and `TypeError`. Every error
pickles, so it travels from a worker to the training loop with all its attributes.
"""

from __future__ import annotations

import re
from typing import Any

from streamload.text import printable

# A user with a password before a host; in a web address also a user alone, which may be a token. In other urls a name
# alone is public, such as the container in `abfs://container@account/`.
_LOGIN = re.compile(
    r"(?<=://)(?:(?<=http://)|(?<=https://))[^/?#\s]+@"
    r"|(?<=://)(?!\[)[^/?#\s:]*:(?!:|\d+(?:[/?#]|\Z))(?:[^/?#\s]*@|[^?#\s]*?@)",
    re.IGNORECASE,
)

_QUERY = re.compile(r"\?([^#\s]*)")
_SECRET_NAME = re.compile(
    r"x-(?:amz|goog)-|token|secret|passw|pwd|signature|credential|auth(?!or)|session|jwt|hmac|hdn(?:ea|tl|ts)|ticket|"
    r"api[-_]?key|access[-_]?(?:key|id)|key-pair-id|\A(?:code|key|sig|sign|sas)\Z"
)
# Parameters of S3 and Cloud Storage (older forms), CloudFront and Azure that are secret only beside a signature.
_BESIDE_SIGNATURE = {
    "signature": re.compile("expires|policy"),
    "sig": re.compile("s[eiprstv]|s(?:dd|es|ip|pr|rt|cid|aoid|uoid)|sk(?:[estv]|oid|tid)"),
}


def without_secrets(text: str) -> str:
    """Remove logins, signatures and secret parameters from a url, or from all urls in a text.

    Every url in messages, logs, traces, pictures and `__url__` passes through here. Other parameters stay, since they
    may distinguish shards, as in `?file=a.tar`. A url that is signed anew gives the same text, so caches use the text
    as a key, with ETag and size in case a removed parameter matters.
    """
    return _QUERY.sub(_public_parameters, _LOGIN.sub("", text)) if "://" in text else text


def _public_parameters(query: re.Match[str]) -> str:
    parameters = [(each.partition("=")[0].lower(), each) for each in query[1].split("&")]
    names = {name for name, _ in parameters}
    secret = [_SECRET_NAME.search, *(beside.fullmatch for name, beside in _BESIDE_SIGNATURE.items() if name in names)]
    public = [each for name, each in parameters if "=" not in each or not any(matches(name) for matches in secret)]
    return f"?{'&'.join(public)}" if public else ""


class StreamloadError(Exception):
    """The base class of all errors.

    Attributes:
        message: the problem and its remedy, without the place.
        url: the url or path of the shard, file or folder, if known; without secrets.
        key: the sample's key within the shard, if known.
        offset: byte offset in the archive or file, if known; in the compressed file if fetching or decompression fails.
    """

    def __init__(
        self, message: str, *, url: str | None = None, key: str | None = None, offset: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.url = None if url is None else without_secrets(url)
        self.key = key
        self.offset = offset

    def __str__(self) -> str:
        place = [
            f"{name} {value!r}" if isinstance(value, str) else f"{name} {value}"
            for name, value in (("at", self.url), ("sample", self.key), ("offset", self.offset))
            if value is not None
        ]
        message = printable(self.message)
        return f"{message} ({', '.join(place)})" if place else message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        state = {k: v for k, v in self.__dict__.items() if k != "message"}
        return (type(self), (self.message,), state)


class StorageError(StreamloadError):
    """A storage could not be listed, read or written, or fetching needs more memory or open files than allowed."""


class ShardNotFoundError(StorageError):
    """A shard or folder does not exist, or a pattern matches nothing."""


class ShardChangedError(StorageError):
    """A shard's size or version has changed."""


class TransientStorageError(StorageError):
    """A request failed temporarily: a reset, a timeout, an overloaded server, a truncated body.

    Requests are retried. After the last try, reading a shard raises StorageError; other operations raise this error.

    Attributes:
        throttled: the storage asked for fewer requests (429, 503, SlowDown).
        retry_after_s: seconds until the next request, if the storage stated them (`Retry-After`).
    """

    retry_after_s: float | None = None

    def __init__(self, message: str, *, throttled: bool = False, **place: Any) -> None:
        super().__init__(message, **place)
        self.throttled = throttled


class ShardFormatError(StreamloadError):
    """A shard is not a complete, well-formed tar archive of samples; `offset` is the place of the damage."""


class DatasetIndexError(StreamloadError):
    """A needed index or `classes.json` is missing, damaged or incompatible; or shards are unfinished."""


class SampleError(StreamloadError):
    """A sample could not be made. `on_error=` decides whether that ends the run; errors like NameError always do."""


class DecodeError(SampleError):
    """A field could not be decoded."""


class TransformError(SampleError):
    """The user's transform raised an exception, which is the `__cause__`."""


class CollateError(SampleError):
    """Samples could not be collated, which always ends the run. An exception of `collate_fn` is the `__cause__`."""


class WorkerError(StreamloadError):
    """A feeder or worker process could not be started or died (in a loader repeatedly), or too many files are open."""


class ClusterError(StreamloadError):
    """A Ray cluster cannot be reached, lacks resources, or has nodes with other versions or files."""


class LoaderStateError(StreamloadError):
    """A state is invalid, does not belong to this loader, or cannot be saved now; the message says why."""


class LoaderClosedError(StreamloadError):
    """The loader was closed, or this pass has ended: by an error, or because a newer pass replaced it."""

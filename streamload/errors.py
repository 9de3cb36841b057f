"""Every error that a caller of streamload can meet, as one tree.

There is one class for each decision that a caller can take: look at the storage, repair or remove a shard, rebuild
an index, fix or skip a sample, start again, or correct a saved state. Wrong *arguments* are not in the tree: they
are `ValueError` and `TypeError`, raised where the argument was given.

Every error pickles, so it survives the way from a worker to the training loop with all that it knows.
"""

from __future__ import annotations

import re
from typing import Any

from streamload.text import printable

__all__ = [
    "ClusterError",
    "CollateError",
    "DatasetIndexError",
    "DecodeError",
    "LoaderClosedError",
    "LoaderStateError",
    "SampleError",
    "ShardChangedError",
    "ShardFormatError",
    "ShardNotFoundError",
    "StorageError",
    "StreamloadError",
    "TransformError",
    "TransientStorageError",
    "WorkerError",
    "without_credentials",
    "without_secrets",
    "without_signature",
]

_LOGIN = re.compile(
    r"(?<=://)(?:(?<=http://)|(?<=https://))[^/?#\s]+@"
    r"|(?<=://)(?!\[)[^/?#\s:]*:(?!:|\d+(?:[/?#]|\Z))(?:[^/?#\s]*@|[^?#\s]*?@)",
    re.IGNORECASE,
)
"""User and password before a host, and whatever stands there in a web address: that may be a token. What stands alone
there elsewhere names something, as the container in `abfs://container@account/`."""

_SECRET_IN_QUERY = re.compile(r"(?<=[?&])([^=&#\s]+)=[^&#\s]*")
_SECRET_NAME = re.compile(
    r"token|secret|passw|pwd|signature|credential|auth(?!or)|session|jwt|api[-_]?key|access[-_]?key|\A(?:key|sig|sas)\Z",
    re.IGNORECASE,
)
_QUERY = re.compile(r"((?:\A|::)https?://[^?#]*)\?([^#]*)", re.IGNORECASE)
_SIGNATURES = {
    "signature": re.compile("awsaccesskeyid|expires|googleaccessid|key-pair-id|policy|signature"),
    "sig": re.compile("sig|s[eiprstv]|s(?:dd|es|ip|pr|rt|cid|aoid|uoid)|sk(?:[estv]|oid|tid)"),
}
"""What stands beside a signature: of S3 and Cloud Storage in their older form and of CloudFront, and of Azure."""


def without_secrets(url: str) -> str:
    """The url for messages: without a password before the host, and without the values of its query.

    A path stays as it is, whatever is in it.
    """
    if "://" not in url or ("?" not in url and "@" not in url):
        return url
    return _SECRET_IN_QUERY.sub(r"\1=...", _LOGIN.sub("...@", url))


def without_credentials(url: str) -> str:
    """The url as data that is kept beside samples: without what gives access, with all that tells shards apart.

    User and password are left out, and of a web address's query what signs it and what is named as a secret is. All
    other urls and paths stay as they are, which is why messages use `without_secrets`.
    """
    if "://" not in url or ("?" not in url and "@" not in url):
        return url
    return _QUERY.sub(_without_named_secrets, without_signature(_LOGIN.sub("", url)))


def without_signature(url: str) -> str:
    """A web address without the parameters that sign it, which differ each time that it is signed, and no others.

    For keys of caches, since the same object is found again by it. A signature says who may read and until when, and
    does not choose what is read. A server may still give these names another meaning, so this is safe only in
    a key that holds the ETag and the size of the answer too: then another object or version has another key. Names
    that are not a signature's alone (`Expires`, `st`) are left out only beside a `Signature` or `sig`.

    Args:
        url: of any kind; all but `http://` and `https://`, also behind `::`, stay as they are.
    """
    return _QUERY.sub(_unsigned, url) if "?" in url else url


def _unsigned(found: re.Match[str]) -> str:
    address, query = found.groups()
    fields = [(field.partition("=")[0].lower(), field) for field in query.split("&")]
    names = {name for name, _ in fields}
    signing = [re.compile("x-(?:amz|goog)-.*"), *(beside for name, beside in _SIGNATURES.items() if name in names)]
    return _with_query(address, [field for name, field in fields if not any(each.fullmatch(name) for each in signing)])


def _without_named_secrets(found: re.Match[str]) -> str:
    address, query = found.groups()
    return _with_query(address, [part for part in query.split("&") if not _SECRET_NAME.search(part.partition("=")[0])])


def _with_query(address: str, fields: list[str]) -> str:
    return f"{address}?{'&'.join(fields)}" if fields else address


class StreamloadError(Exception):
    """The root of the tree; catches everything that streamload raises on its own account.

    Attributes:
        message: what is wrong and what to do about it, without the place.
        url: the shard concerned, where known; without passwords and signatures, since errors end up in logs.
        key: the sample's key within the shard, where known.
        offset: the byte offset within the (uncompressed) shard, where known.
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
            for name, value in (("shard", self.url), ("sample", self.key), ("offset", self.offset))
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
    """Bytes could not be listed, read or written."""


class ShardNotFoundError(StorageError):
    """A shard, a folder or everything that a pattern stands for does not exist."""


class ShardChangedError(StorageError):
    """A shard is no longer the one that was listed: its size or version differs."""


class TransientStorageError(StorageError):
    """A request failed in a way that may pass: a reset, a time-out, a server that is overloaded, a body cut short.

    Reading tries such a request again by itself; who meets this error meets the last of several attempts.

    Attributes:
        throttled: whether the storage asked for fewer requests (429, 503, SlowDown).
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        key: str | None = None,
        offset: int | None = None,
        throttled: bool = False,
    ) -> None:
        super().__init__(message, url=url, key=key, offset=offset)
        self.throttled = throttled


class ShardFormatError(StreamloadError):
    """A shard is not a whole, well-formed tar archive of samples; `offset` says where it stops being one."""


class DatasetIndexError(StreamloadError):
    """An index is missing where it is needed, damaged, of another version, or does not belong to its shards."""


class SampleError(StreamloadError):
    """One sample could not be made; `on_error=` decides whether that ends the run."""


class DecodeError(SampleError):
    """A field's bytes are not what its extension promises."""


class TransformError(SampleError):
    """The user's transform raised; its exception is the `__cause__`."""


class CollateError(SampleError):
    """Samples could not be put together to a batch; what `collate_fn` raised is the `__cause__`."""


class WorkerError(StreamloadError):
    """A feeder or worker process could not be started, or several died in turn, or none answered in time."""


class ClusterError(StreamloadError):
    """A Ray cluster cannot be reached, lacks what is needed, or its nodes have other versions or files."""


class LoaderStateError(StreamloadError):
    """A saved state does not belong to this loader, or cannot be saved now; the message says what differs."""


class LoaderClosedError(StreamloadError):
    """The loader was closed, or a newer pass took the place of this one."""

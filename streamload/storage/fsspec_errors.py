"""What the exceptions of fsspec's filesystems say, as our errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType

from streamload.errors import ShardNotFoundError, StorageError, TransientStorageError, without_secrets
from streamload.storage.errors import NO_SUCH_SHARD, connection_error, status_error
from streamload.storage.protocol import protocol_of

_CONNECTING = (
    "ClientConnectorError",
    "ClientConnectorCertificateError",
    "ClientConnectorDNSError",
    "ConnectionRefusedError",
    "EndpointConnectionError",
    "SSLError",
    "gaierror",
)
_BROKEN = (
    "Timeout",
    "Disconnected",
    "ClientPayload",
    "ClientOSError",
    "IncompleteRead",
    "ConnectionClosed",
    "Protocol",
)


class ReportsErrors:
    """A block in which whatever a filesystem raises becomes a StorageError; mistakes in our own code do not.

    The original is not kept as the cause, since its text may hold keys or signatures.

    Args:
        url: what is requested.
        passing: exceptions of these kinds pass as they are.
        by_options: an unexpected keyword argument is an option that the library behind the filesystem does not know,
            as the first request finds out; it is a ValueError.
    """

    def __init__(self, url: str, passing: tuple[type[Exception], ...] = (), *, by_options: bool = False) -> None:
        self._url = url
        self._by_options = by_options
        self._passing = (StorageError, TypeError, AssertionError, *passing)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._by_options and isinstance(exc, TypeError) and "unexpected keyword argument" in str(exc):
            raise ValueError(f"storage_options do not fit {protocol_of(self._url)}://: {exc}") from None
        if isinstance(exc, Exception) and not isinstance(exc, self._passing):
            raise filesystem_error(self._url, exc) from None


def filesystem_error(url: str, exc: Exception) -> StorageError:
    """The error to raise for what a filesystem raised; its text is left out where it may hold keys or signatures."""
    for link in _chain(exc):
        status, code = _status(link)
        if status is not None or code is not None:
            return status_error(url, status, code)
    shown = without_secrets(url)
    names = [name for link in _chain(exc) for name in _class_names(link)]
    if any(name in _CONNECTING for name in names):
        return connection_error(url, " ".join([*names, *map(str, _chain(exc))]))
    # Before what is not found, which fsspec's http calls all that it gets no size of.
    if isinstance(exc, TimeoutError | ConnectionError) or any(part in name for name in names for part in _BROKEN):
        return TransientStorageError(f"the answer broke off ({type(exc).__name__}); try again later", url=shown)
    if isinstance(exc, FileNotFoundError | NotADirectoryError):
        return ShardNotFoundError(NO_SUCH_SHARD, url=shown)
    if isinstance(exc, PermissionError):
        return StorageError("access is denied; check the credentials and the rights", url=shown)
    return StorageError(f"cannot be read ({type(exc).__name__}); check the url and storage_options", url=shown)


def _chain(exc: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = exc
    for _ in range(10):
        if link is None:
            return
        yield link
        link = link.__cause__


def _class_names(exc: BaseException) -> list[str]:
    return [kind.__name__ for kind in type(exc).__mro__]


def _status(exc: BaseException) -> tuple[int | None, str | None]:
    """Status and code of an answer, as aiohttp, requests and botocore hold them."""
    response = getattr(exc, "response", None)
    if isinstance(response, Mapping):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = response.get("Error", {}).get("Code")
        return status, code if isinstance(code, str) and not code.isdigit() else None
    for status in (getattr(exc, "status", None), getattr(response, "status_code", None)):
        if isinstance(status, int) and 300 <= status < 600:
            return status, None
    return None, None

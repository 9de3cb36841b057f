"""Turn a storage's answers into errors with advice, and recognize the answers in each library's exceptions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial

from streamload.errors import (
    ShardChangedError,
    ShardNotFoundError,
    StorageError,
    TransientStorageError,
    without_secrets,
)
from streamload.storage.protocol import WEB, protocol_of

_WITH_HOSTS = (*WEB, "ftp", "sftp", "ssh", "smb", "webhdfs", "hdfs")


class ExpiredCredentialsError(TransientStorageError):
    """The credentials have expired; new ones may be valid."""


class NoConnectionError(TransientStorageError):
    """The storage was not reached."""


class UntrustedServerError(StorageError):
    """TLS failed; a retry would fail too."""


class WholeAnswerError(TransientStorageError):
    """The answer to a request for a range was the whole object."""


# -- answers -------------------------------------------------------------------------------------------------------

_Kind = Callable[..., StorageError]
_Answer = str | int

# Error class and message by HTTP status, by the storage's own code, or by a word in the pattern tables below.
_ANSWERS: dict[_Answer, tuple[_Kind, str]] = {}


def _row(kind: _Kind, message: str, *answers: _Answer) -> None:
    _ANSWERS.update(dict.fromkeys(answers, (kind, message)))


_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired")
_KEY_CODES = ("SignatureDoesNotMatch", "InvalidAccessKeyId", "RequestTimeTooSkewed", "InvalidToken")
_REGION_CODES = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "Redirect")
_NO_BUCKET_CODES = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName")
_BUSY_CODES = ("SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "ServerBusy")
_FAILED: tuple[_Answer, ...] = ("RequestTimeout", "InternalError", 408, 500, 502, 504)
_row(ExpiredCredentialsError, "the credentials have expired ({shown}); renew them (log in again)", *_EXPIRED_CODES)
_row(
    StorageError,
    "access is denied ({shown}); check this machine's clock, and that `key`, `secret` and `token` (storage_options "
    "or AWS's variables) belong to this endpoint",
    *_KEY_CODES,
)
_row(StorageError, "access is denied ({shown}); give credentials that allow this ({login})", 401, 403)
_row(
    StorageError,
    "no credentials were found in storage_options (`key`, `secret`, `profile`), the environment, this machine's cloud "
    "or (with the extra `s3`) `~/.aws`; give them, or `anon=True` for a public bucket",
    "no credentials",
)
_row(
    StorageError,
    "the bucket is in another region or behind another endpoint ({shown}); check both{address}",
    *_REGION_CODES,
    *(301, 302, 307, 308),
)
_row(ShardNotFoundError, "no such shard; check its url, and any range in braces", "NoSuchKey", "BlobNotFound", 404)
_row(ShardNotFoundError, "there is no such bucket ({shown}); check its name and the endpoint", *_NO_BUCKET_CODES)
_row(ShardChangedError, "the object ends before the bytes that were requested, so it was changed", 416)
_row(
    partial(TransientStorageError, throttled=True),
    "the storage asks for fewer requests ({shown}); try again later, or send fewer at once",
    *_BUSY_CODES,
    *(429, 503),
)
_row(TransientStorageError, "the storage failed ({shown}); try again later", *_FAILED)
_row(TransientStorageError, "the storage did not answer in time; try again later", "timeout")
_row(TransientStorageError, "the answer broke off; try again later", "broken")
_row(TransientStorageError, "the answer is not the range that was requested; try again later", "other part")
_row(
    WholeAnswerError,
    "this server ignores range requests (it sent a whole file); use another (nginx, caddy, rclone serve), or "
    "copy the shards to a disk",
    "whole",
)
_row(
    StorageError,
    "the storage does not say how long the whole file is, so a cut answer cannot be told from a complete one; use a "
    "server that sends Content-Length, or copy the file",
    "unknown length",
)
_row(
    UntrustedServerError,
    "the server's certificate is not trusted, or the server does not speak TLS; check https:// in the address, or name "
    "the file of your own certificate authority by storage_options={{'client_kwargs': {{'verify': PEM_FILE}}}}",
    "no TLS",
)
_row(NoConnectionError, "the host of {place} is not known; check its name{address}", "no host")
_row(NoConnectionError, "no connection to {place}; check that it runs, and its host and port{address}", "no connection")

_ENDPOINT = "`endpoint_url` and `client_kwargs={'region_name': ...}` in storage_options, or AWS's variables"
_WEB_LOGIN = "as in https://USER:PASSWORD@HOST/, or `headers` in storage_options"
_SIGNATURE = re.compile(r"[?&](X-Amz-Signature|X-Goog-Signature|Signature|sig)=", re.IGNORECASE)
_SIGN_ANEW = "sign the url anew: its signature is wrong or has expired"
_LOGIN = "`key` and `secret` in storage_options, or your other tools' environment, or `anon=True` for a public bucket"
_PLAIN_CODE = re.compile(r"[A-Za-z0-9.]{1,60}\Z")
_HOST = re.compile(r"https?://[^\s/?#\"',)]+")


def answer_error(url: str, answer: _Answer | None, code: str | None = None, details: str = "") -> StorageError:
    """Make the error for an `answer` (HTTP status or word in `_ANSWERS`) and the storage's own code.

    `details` may hold the address that was requested; the message shows its host.
    """
    host = _HOST.search(without_secrets(details))
    code = code if code is not None and _PLAIN_CODE.match(code) else None
    refused: tuple[_Kind, str] = (StorageError, "the request was refused ({shown}); check the url and storage_options")
    otherwise = _ANSWERS[500] if isinstance(answer, int) and answer >= 500 else refused
    kind, message = _ANSWERS.get(code or "") or _ANSWERS.get(answer or "") or otherwise
    protocol = protocol_of(url)
    login = (_SIGN_ANEW if _SIGNATURE.search(url) else _WEB_LOGIN) if protocol in WEB else _LOGIN
    return kind(
        message.format(
            shown=" ".join(str(part) for part in (answer, code) if part is not None),
            login=login,
            place="the storage" if host is None else host[0],
            address=" in the url" if protocol in _WITH_HOSTS else f": {_ENDPOINT}",
        ),
        url=url,
    )


def parse_retry_after(value: object) -> float | None:
    """Return the seconds in a `Retry-After` header, a number or a date; None for anything else."""
    if not isinstance(value, str):
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None


# -- exceptions of libraries -----------------------------------------------------------------------------------------

_Rows = tuple[tuple[str, _Answer], ...]
_CONNECT: _Rows = (
    (r"(?i)unexpected_?eof|handshake eof|reset by peer|connection ?reset|timed ?out", "no connection"),
    (r"(?i)certificate|\btls|ssl|invalidcontenttype|invalidmessage|alertreceived|incompatible", "no TLS"),
    (r"(?i)dns|name or service|getaddrinfo|nodename|resol(?:ve|ution)|gaierror", "no host"),
    ("", "no connection"),
)
# Patterns for `ClassName: text`.
_OBSTORE: _Rows = (
    (r"BareRedirect|redirect without LOCATION", 301),
    (r"^(?:NotFoundError|FileNotFoundError):", 404),
    (r"^PermissionDeniedError:", 403),
    (r"^UnauthenticatedError:", 401),
    (r"non-partial response|RangeNotSupported", "whole"),
    (r"Wanted range starting at", 416),
    (r"CONTENT_RANGE header: \"?bytes \d+-\d+/\*", "unknown length"),
    (r"Requested \d+\.\.\d+, got \d+\.\.\d+|Content-Range|UnexpectedRange", "other part"),
    (r"kind: Connect|tcp connect|dns error", "connect"),
    (r"TimedOut|Timeout", "timeout"),
    (r"kind: (?:Interrupted|Request|Decode|Unknown)|body error|IncompleteMessage", "broken"),
)
# Patterns for the class names of an exception and its causes, with their base classes.
_FSSPEC: _Rows = (
    (r"ClientConnector|ConnectionRefused|EndpointConnection|SSLError|gaierror|\bConnectError", "connect"),
    # Before FileNotFoundError, which fsspec's http raises for every file whose size it does not get.
    (r"Timeout", "timeout"),
    (r"Disconnected|ClientPayload|ClientOSError|IncompleteRead|ConnectionClosed|Protocol", "broken"),
    (r"\bConnection\w*Error|\bReadError", "broken"),
    (r"FileNotFoundError|NotADirectoryError", 404),
    (r"PermissionError", 403),
)
_MOST_CAUSES = 10
_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_METADATA_SERVER = re.compile(r"//169\.254\.169\.254|//metadata\.google\.internal|//metadata/computeMetadata")
# Removed before words are matched, since addresses, and `ssl` settings in aiohttp's texts, do not describe the failure.
_ADDRESS = re.compile(r"https?://\S+|Cannot connect to host \S+ ssl:(?:<[^>]*>|\S+)")


def _answer_in(rows: _Rows, text: str, details: str) -> _Answer | None:
    answer = next((answer for pattern, answer in rows if re.search(pattern, text)), None)
    return _answer_in(_CONNECT, _ADDRESS.sub("", details), "") if answer == "connect" else answer


def obstore_error(url: str, exc: Exception) -> StorageError:
    """Make the error for an exception of obstore, without the keys and tokens that its text may hold."""
    text = f"{type(exc).__name__}: {exc}"
    if _METADATA_SERVER.search(text):
        return answer_error(url, "no credentials")
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        return answer_error(url, int(status[1]), code[1] if code else None)
    if (answer := _answer_in(_OBSTORE, text, text)) is not None:
        return answer_error(url, answer, details=text)
    # The first line is shown, cut before anything that the server sent or the request contained.
    shown = without_secrets(re.split(r"[\n<{]|https?://", str(exc), maxsplit=1)[0].strip(" :-"))[:200]
    return StorageError(f"cannot be read ({shown}); check the url and storage_options", url=url)


def fsspec_error(url: str, exc: Exception) -> StorageError:
    """Make the error for an exception of a filesystem, without the exception's text, which may hold keys."""
    causes: list[BaseException] = [exc]
    while len(causes) < _MOST_CAUSES:
        cause = causes[-1].__cause__ or getattr(causes[-1], "reason", None)  # `reason` is urllib's
        if not isinstance(cause, BaseException):
            break
        causes.append(cause)
    for cause in causes:
        status, code, retry_after = _response_of(cause)
        if status is not None or code is not None:
            error = answer_error(url, status, code)
            if isinstance(error, TransientStorageError):
                error.retry_after_s = parse_retry_after(retry_after)
            return error
    names = " ".join(kind.__name__ for cause in causes for kind in type(cause).__mro__)
    details = " ".join([names, *map(str, causes)])
    if (answer := _answer_in(_FSSPEC, names, details)) is not None:
        return answer_error(url, answer, details=details)
    return StorageError(f"cannot be read ({type(exc).__name__}); check the url and storage_options", url=url)


def _response_of(exc: BaseException) -> tuple[int | None, str | None, object]:
    """Return the status, code and `Retry-After` in an exception of aiohttp, requests, httpx or botocore."""
    response = getattr(exc, "response", None)
    if isinstance(response, Mapping):
        code = response.get("Error", {}).get("Code")
        code = code if isinstance(code, str) and not code.isdigit() else None
        metadata = response.get("ResponseMetadata", {})
        return metadata.get("HTTPStatusCode"), code, metadata.get("HTTPHeaders", {}).get("retry-after")
    for holder, name in ((exc, "status"), (response, "status_code")):
        status = getattr(holder, name, None)
        if isinstance(status, int) and 300 <= status < 600:
            return status, None, (getattr(holder, "headers", None) or {}).get("Retry-After")
    return None, None, None


@contextmanager
def fsspec_errors(url: str, *passing: type[Exception]) -> Iterator[None]:
    """Turn a filesystem's errors into StorageErrors without a cause, except TypeError, AssertionError and `passing`."""
    try:
        yield
    except Exception as exc:
        if isinstance(exc, (StorageError, TypeError, AssertionError, *passing)):
            raise
        raise fsspec_error(url, exc) from None


# -- checks ----------------------------------------------------------------------------------------------------------


def missing_error(url: str, name: str, names: Iterable[str], folder: str) -> ShardNotFoundError:
    """Make the error for a missing shard; `names` are the names in its folder."""
    what = "shard" if "." in name else "shard or folder"
    return ShardNotFoundError(f"no such {what}: {close_matches(name, names, folder)}", url=url)


def check_small(url: str, size_bytes: int, most_bytes: int) -> None:
    """Raise StorageError for a file that is too large."""
    if size_bytes > most_bytes:
        raise StorageError(f"the file has more than {most_bytes:,} bytes, the limit for files of this kind", url=url)


def check_length(url: str, content: bytes, wanted_bytes: int, total_bytes: int) -> None:
    """Raise TransientStorageError for an answer shorter or longer than requested."""
    if len(content) != wanted_bytes:
        raise answer_error(url, "whole" if len(content) == total_bytes > wanted_bytes else "other part")


def close_matches(name: str, names: Iterable[str], folder: str) -> str:
    """Return advice for a mistyped name."""
    known = sorted(names)[:10_000]
    close = difflib.get_close_matches(name, known, n=3)
    if close:
        advice = f"did you mean {' or '.join(map(repr, close))}?"
        return f"{advice} If it is from a range in braces, check the range" if re.search(r"\d", name) else advice
    if not known:
        return f"there is nothing in {without_secrets(folder)!r}; check the path"
    return f"nothing in {without_secrets(folder)!r} has a similar name"

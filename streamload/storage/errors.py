"""Our errors for a storage's answers, with advice and without secrets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from streamload.errors import (
    ShardChangedError,
    ShardNotFoundError,
    StorageError,
    TransientStorageError,
    without_secrets,
)
from streamload.storage.protocol import protocol_of
from streamload.text import counted

NO_SUCH_SHARD = "no such shard; check its url, and where braces name it whether there are so many"

_THROTTLING = {"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "ServerBusy"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "InvalidBucketName"}
_WRONG_REGION = {"PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "Redirect"}
_WRONG_KEY = {
    "SignatureDoesNotMatch": "the secret key does not belong to the access key: check `secret` in storage_options, or "
    "AWS_SECRET_ACCESS_KEY",
    "InvalidAccessKeyId": "the storage does not know this access key: check `key` in storage_options, or "
    "AWS_ACCESS_KEY_ID, and that it belongs to this endpoint",
    "RequestTimeTooSkewed": "this machine's clock differs too much from the storage's: set it right",
    "InvalidToken": "the session token is not valid: check `token` in storage_options, or AWS_SESSION_TOKEN",
}
_ENDPOINT = (
    "`endpoint_url` and `client_kwargs={'region_name': ...}` in storage_options, or AWS_ENDPOINT_URL and AWS_REGION"
)
_WEB = ("http", "https")
_LOGIN = "as in https://USER:PASSWORD@HOST/, or `headers` in storage_options)"
_KEYS = (
    "`key` and `secret` in storage_options, or the environment that your other tools use), or `anon=True` for a public "
    "bucket"
)
_FILESYSTEMS = ("ftp", "sftp", "ssh", "smb", "webhdfs", "hdfs")
_DENIED = "access is denied"
_PLAIN_CODE = re.compile(r"[A-Za-z0-9.]{1,60}\Z")
# Says nothing of what went wrong, whatever words are in it: aiohttp's texts have the setting `ssl` there.
_ADDRESS = re.compile(r"https?://\S+|Cannot connect to host \S+ ssl:(?:<[^>]*>|\S+)")

_BROKE_OFF = re.compile(r"unexpected_?eof|handshake eof|reset by peer|connection ?reset|timed ?out", re.IGNORECASE)
_NO_TLS = re.compile(
    r"certificate|\btls|ssl|invalidcontenttype|invalidmessage|alertreceived|incompatible", re.IGNORECASE
)
_NO_HOST = re.compile(r"dns|name or service|getaddrinfo|nodename|resol(?:ve|ution)", re.IGNORECASE)


class ExpiredCredentialsError(StorageError):
    """The credentials have expired; with new ones the request may succeed."""


class NoConnectionError(TransientStorageError):
    """The storage was not reached: no such host, or nothing listens there."""


class UntrustedServerError(StorageError):
    """TLS failed, as it will for whatever else is requested there."""


class WholeAnswerError(TransientStorageError):
    """The server answered a request for a part with the whole object, as some proxies occasionally do."""


def status_error(url: str, status: int | None, code: str | None) -> StorageError:
    """The error for an answer without the requested bytes.

    Args:
        url: what was requested.
        status: the HTTP status; None where it is not known.
        code: the storage's own name for what is wrong (`NoSuchKey`), where there is one.
    """
    code = code if code is not None and _PLAIN_CODE.match(code) else None
    shown = " ".join(str(part) for part in (status, code) if part is not None)
    url = without_secrets(url)
    if code in _EXPIRED:
        return ExpiredCredentialsError(f"the credentials have expired ({shown}); renew them (log in again)", url=url)
    if code in _NO_BUCKET:
        return ShardNotFoundError(f"there is no such bucket ({shown}); check its name and the endpoint", url=url)
    if code in _WRONG_KEY:
        return StorageError(f"{_DENIED} ({shown}): {_WRONG_KEY[code]}", url=url)
    if code in _WRONG_REGION or status in (301, 302, 307, 308):
        return StorageError(
            f"the bucket is in another region or behind another endpoint ({shown}); give the right one: {_ENDPOINT}",
            url=url,
        )
    if code in _THROTTLING or status in (429, 503):
        return TransientStorageError(
            f"the storage asks for fewer requests ({shown}); try again later, or ask with less at once",
            url=url,
            throttled=True,
        )
    if status == 404 or code in ("NoSuchKey", "BlobNotFound"):
        return ShardNotFoundError(NO_SUCH_SHARD, url=url)
    if status == 412:
        return ShardChangedError("the shard was changed while it was in use", url=url)
    if status == 416:
        return ShardChangedError("the object ends before the bytes that were requested, so it was changed", url=url)
    if status == 408 or code in ("RequestTimeout", "InternalError") or (status is not None and status >= 500):
        return TransientStorageError(f"the storage failed ({shown}); try again later", url=url)
    if status in (401, 403):
        how = _LOGIN if protocol_of(url) in _WEB else _KEYS
        return StorageError(f"{_DENIED} ({shown}); give credentials that may read this ({how}", url=url)
    return StorageError(f"the storage refused the request ({shown}); check the url and storage_options", url=url)


def is_unexplained_denial(error: StorageError) -> bool:
    """Whether access was denied without a reason, as in the answer to a HEAD."""
    return type(error) is StorageError and error.message.startswith((f"{_DENIED} (401);", f"{_DENIED} (403);"))


def connection_error(url: str, what: str) -> StorageError:
    """The error for a connection that was not made; `what` is what the library said.

    One that breaks off while TLS is agreed on is like any other that breaks: the server may just be starting again.
    """
    said, url = _ADDRESS.sub("", what), without_secrets(url)
    if _NO_TLS.search(said) and not _BROKE_OFF.search(said):
        return UntrustedServerError(
            "the server's certificate is not trusted, or it does not speak TLS; check https:// in the "
            f"{'url' if protocol_of(url) in _WEB else 'endpoint'}, or name the file of your own certificate authority "
            f"{_own_authority(url)}",
            url=url,
        )
    protocol = protocol_of(url)
    where = f": {_ENDPOINT}"
    if protocol in _FILESYSTEMS:
        where = " in the url, or `host` and `port` in storage_options"
    elif protocol in _WEB:
        where = " in the url"
    if _NO_HOST.search(said):
        return NoConnectionError(f"the host is not known; check its name{where}", url=url)
    return NoConnectionError(f"no connection to the storage; check that it runs, and host and port{where}", url=url)


def _own_authority(url: str) -> str:
    """How to trust a server whose certificate is signed by a private authority."""
    if protocol_of(url) in (*_WEB, "s3", "s3a"):
        return "by storage_options={'client_kwargs': {'verify': PEM_FILE}}"
    return "in SSL_CERT_FILE, before the program is started"


def transient_error(url: str, what: str) -> TransientStorageError:
    """The error for an answer that broke off or is not plausible."""
    return TransientStorageError(f"{what}; try again later", url=without_secrets(url))


def whole_answer_error(url: str) -> WholeAnswerError:
    """The error for an answer that is the whole object where a part was requested."""
    what = "the server sent the whole object where a part was requested"
    return WholeAnswerError(f"{what}; try again later", url=without_secrets(url))


def unknown_length_error(url: str) -> StorageError:
    """The error for a file whose length the server does not give (RFC 9110 allows `bytes 0-9/*`)."""
    return StorageError(
        "the storage does not say how long the whole file is, so an answer that breaks off cannot be told from a whole "
        "one; read from a server that sends Content-Length, or copy the file",
        url=without_secrets(url),
    )


def changed_error(url: str, was: str | None, now: str | None) -> ShardChangedError:
    """The error for an object that is another version; `now` is None where it could not be learned."""
    return ShardChangedError(
        f"the shard was changed while it was in use: it was listed with ETag {was} and has {now or 'another one'} now; "
        "make a new loader, and give every version of a dataset a folder of its own",
        url=without_secrets(url),
    )


def check_small(url: str, size_bytes: int, most_bytes: int) -> None:
    """Raise StorageError for a supposedly small file that is too large."""
    if size_bytes > most_bytes:
        raise StorageError(
            f"this has more than {most_bytes:,} bytes, so it is not what it should be", url=without_secrets(url)
        )


def check_length(url: str, content: bytes, wanted_bytes: int, total_bytes: int) -> None:
    """Raise TransientStorageError for an answer that is not as long as what was requested."""
    if len(content) == total_bytes > wanted_bytes:
        raise whole_answer_error(url)
    if len(content) != wanted_bytes:
        raise transient_error(
            url, f"the storage gave {counted(len(content), 'byte')} where {wanted_bytes:,} were requested"
        )


def close_matches(name: str, names: Iterable[str], folder: str) -> str:
    """Advice for a mistyped name: similar names in its folder."""
    known = sorted(names)[:10_000]
    close = difflib.get_close_matches(name, known, n=3)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if not known:
        return f"nothing lies in {without_secrets(folder)!r}; check the path"
    return f"nothing in {without_secrets(folder)!r} has a name like this"

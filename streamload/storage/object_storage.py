"""The storage of objects in buckets and on web servers, by obstore."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import re
import threading
import time
import weakref
from base64 import b64encode
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from streamload.errors import (
    ShardChangedError,
    ShardNotFoundError,
    StorageError,
    TransientStorageError,
    without_secrets,
)
from streamload.storage.errors import (
    ExpiredCredentialsError,
    changed_error,
    check_length,
    check_small,
    close_matches,
    connection_error,
    is_unexplained_denial,
    status_error,
    transient_error,
    unknown_length_error,
    whole_answer_error,
)
from streamload.storage.fsspec_errors import ReportsErrors
from streamload.storage.options import CLIENT_OPTIONS, NO_RETRY, RETRY, ObjectConfig, tls_context
from streamload.storage.patterns import ANY_FOLDERS, fits, pattern_steps
from streamload.storage.protocol import (
    UNKNOWN_BYTES,
    RangeBody,
    ShardInfo,
    WholeBody,
    is_pattern,
    matches,
    protocol_of,
    quoted,
    same_etag,
    version_of,
)
from streamload.storage.retry_policy import Retries, RetryPolicy
from streamload.text import counted

_ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL_S3"
_WEB = ("http", "https")


class ObjectPlace(NamedTuple):
    """Where an object is.

    Attributes:
        root: the url of its bucket or host, with a slash at the end.
        bucket: the bucket's or container's name; the host of a web server.
        key: the object's name in it, as obstore takes it.
        account: of Azure, where the url names one.
    """

    root: str
    bucket: str
    key: str
    account: str | None = None


def locate(url: str) -> ObjectPlace:
    """The place that a url names.

    Raises:
        StorageError: it names no bucket or host, or a key that cannot be requested.
    """
    protocol = protocol_of(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise StorageError("the url names no bucket or host", url=url)
    root = f"{protocol}://{bucket}/"
    if protocol in _WEB:
        return ObjectPlace(root, bucket, unquote(key))
    if key.startswith("/"):  # obstore would leave out the slash, and read what may be another object
        raise StorageError("the key begins with a slash; name the object without it", url=url)
    container, at, account = bucket.partition("@")
    return ObjectPlace(root, container, key, account.partition(".")[0] if at else None)


def make_store(place: ObjectPlace, config: ObjectConfig, *, retries: bool) -> Any:
    """Make the obstore store of a bucket or a host; nothing is requested yet.

    Args:
        place: which bucket or host.
        config: how to reach it.
        retries: it makes requests again that failed.

    Raises:
        StorageError: what it needs is not there: an account's name, a profile, or boto3 for credentials from `~/.aws`.
    """
    from obstore import store
    from obstore.exceptions import BaseError

    stores: Any = store  # which settings there are is obstore's to check
    options: dict[str, Any] = {
        "client_options": CLIENT_OPTIONS | config.client,
        "retry_config": RETRY if retries else NO_RETRY,
    }
    try:
        if config.family == "http":
            return _web_store(stores, place.root, options)
        if config.family == "gs":
            return stores.GCSStore(place.bucket, config=config.config, **options)
        if config.family == "az":
            account = {"account_name": place.account} if place.account else {}
            return stores.AzureStore(place.bucket, config=config.config | account, **options)
        return _s3_store(stores, place, config, options)
    except (BaseError, ValueError) as exc:
        reason = without_secrets(str(exc).partition("\n")[0])
        raise StorageError(
            f"this storage cannot be set up ({reason}); check storage_options", url=without_secrets(place.root)
        ) from None


def _web_store(stores: Any, root: str, options: dict[str, Any]) -> Any:
    """With the user and password of the url as the header that obstore does not make of them.

    A redirect to another host is followed without it, as without any header of this name.
    """
    protocol, _, place = root.partition("://")
    login, at, host = place.rpartition("@")
    headers = options["client_options"].get("default_headers", {})
    if at and "authorization" not in map(str.lower, headers):
        user, _, password = map(unquote, login.partition(":"))
        basic = b64encode(f"{user}:{password}".encode()).decode("ascii")
        headers = headers | {"Authorization": f"Basic {basic}"}
        options = options | {"client_options": options["client_options"] | {"default_headers": headers}}
    return stores.HTTPStore(f"{protocol}://{host}", **options)


def _s3_store(stores: Any, place: ObjectPlace, config: ObjectConfig, options: dict[str, Any]) -> Any:
    from obstore.exceptions import UnknownConfigurationKeyError

    config, credentials = aws_settings(config, place.root)
    options = options | {"credential_provider": credentials}
    endpoint = config.config.get("endpoint")
    if endpoint is not None and _ENDPOINT_VARIABLE in os.environ:
        # Newer releases of obstore prefer the variable to the endpoint, older ones know neither it nor its setting.
        with contextlib.suppress(UnknownConfigurationKeyError):
            over = {_ENDPOINT_VARIABLE.lower(): endpoint}
            return stores.S3Store(place.bucket, config=config.config | over, **options)
    return stores.S3Store(place.bucket, config=config.config, **options)


Credentials = Callable[[], dict[str, Any]]
"""Gives credentials as obstore takes them; called again after a while."""

# Where obstore finds credentials itself.
_VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)

_RENEWED_AFTER = timedelta(minutes=10)


def aws_settings(config: ObjectConfig, root: str) -> tuple[ObjectConfig, Credentials | None]:
    """Add region and credentials of a profile in `~/.aws`, which botocore reads, where no others are given.

    Args:
        config: from the options and the environment, which come first.
        root: the bucket's url, for errors.

    Raises:
        StorageError: there is no such profile, it names an endpoint, or botocore is missing.
    """
    profile = config.profile or os.environ.get("AWS_PROFILE")
    is_given = "access_key_id" in config.config or bool(config.config.get("skip_signature"))
    files = [
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials",
        os.environ.get("AWS_CONFIG_FILE") or "~/.aws/config",
    ]
    if is_given or (config.profile is None and any(map(os.environ.get, _VARIABLES))):
        return config, None
    if profile is None and not any(os.path.exists(os.path.expanduser(file)) for file in files):
        return config, None
    try:
        session = importlib.import_module("botocore.session").Session(profile=profile)
    except ImportError as exc:
        raise StorageError(
            "credentials from ~/.aws need botocore: pip install 'streamload[s3]'", url=without_secrets(root)
        ) from exc
    if profile is not None and profile not in session.available_profiles:
        raise StorageError(
            f"there is no profile {profile!r} (of storage_options or AWS_PROFILE) in {files[0]} or {files[1]}",
            url=without_secrets(root),
        )
    if "endpoint" not in config.config and {"endpoint_url", "services"} & session.get_scoped_config().keys():
        raise StorageError(
            f"the profile in {files[1]} names an endpoint, which is not read from there; give it as `endpoint_url` in "
            "storage_options, or in AWS_ENDPOINT_URL",
            url=without_secrets(root),
        )
    if "region" not in config.config and (region := session.get_config_variable("region")):
        config = replace(config, config=config.config | {"region": region})
    credentials = session.get_credentials()
    return config, None if credentials is None else lambda: _frozen(credentials)


def _frozen(credentials: Any) -> dict[str, Any]:
    """Credentials as they are now; requested again after a while, since botocore renews those that expire."""
    found = credentials.get_frozen_credentials()
    return {
        "access_key_id": found.access_key,
        "secret_access_key": found.secret_key,
        "token": found.token,
        "expires_at": datetime.now(UTC) + _RENEWED_AFTER,
    }


_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_TOO_SHORT = "Wanted range starting at"
_NOT_PARTIAL = ("non-partial response", "RangeNotSupported")
_UNKNOWN_LENGTH = re.compile(r"CONTENT_RANGE header: \"?bytes \d+-\d+/\*")
_WRONG_RANGE = re.compile(r"Requested \d+\.\.\d+, got \d+\.\.\d+|Content-Range|UnexpectedRange")
_BROKEN = re.compile(r"kind: (?:Timeout|Interrupted|Request|Decode|Unknown)|body error|TimedOut|IncompleteMessage")
_ASKS_THE_CLOUD = re.compile(r"//169\.254\.169\.254|//metadata\.google\.internal|//metadata/computeMetadata")
_BY_CLASS = {"PreconditionError": 412, "PermissionDeniedError": 403, "UnauthenticatedError": 401}


def is_whole_answer(exc: Exception) -> bool:
    """Whether the server answered a request for a range with status 200."""
    return any(words in str(exc) for words in _NOT_PARTIAL)


def storage_error(url: str, exc: Exception) -> StorageError:
    """The error to raise for what obstore raised; its text is left out, since it may hold keys and tokens."""
    text = str(exc)
    code = found[1] if (found := _CODE.search(text)) else None
    if _ASKS_THE_CLOUD.search(text):
        return StorageError(
            "no credentials were found: neither in storage_options, nor in the environment, nor from this machine's "
            "cloud; give them, or `anon=True` for a public bucket",
            url=without_secrets(url),
        )
    if found := _STATUS.search(text):
        return status_error(url, int(found[1]), code)
    if "BareRedirect" in text or "redirect without LOCATION" in text:
        return status_error(url, 301, code)
    if isinstance(exc, FileNotFoundError):
        return status_error(url, 404, code)
    if type(exc).__name__ in _BY_CLASS:
        return status_error(url, _BY_CLASS[type(exc).__name__], code)
    if is_whole_answer(exc):
        return whole_answer_error(url)
    if _TOO_SHORT in text:
        return ShardChangedError(
            "the object ends before the bytes that were requested, so it was changed", url=without_secrets(url)
        )
    if _UNKNOWN_LENGTH.search(text):
        return unknown_length_error(url)
    if _WRONG_RANGE.search(text):
        return transient_error(url, "the server sent another part of the object than was requested")
    if "kind: Connect" in text or "tcp connect" in text or "dns error" in text:
        return connection_error(url, text)
    if _BROKEN.search(text):
        what = (
            "the storage did not answer in time" if "TimedOut" in text or "Timeout" in text else "the answer broke off"
        )
        return transient_error(url, what)
    return StorageError(
        f"cannot be read ({_first_words(text)}); check the url and storage_options", url=without_secrets(url)
    )


def _first_words(text: str) -> str:
    """The first line of a message, cut before whatever the server sent or the request held."""
    return without_secrets(re.split(r"[\n<{]|https?://", text, maxsplit=1)[0].strip(" :-"))[:200]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def info_of(url: str, meta: Mapping[str, Any]) -> ShardInfo:
    """A shard as a listing or a HEAD answer describes it."""
    changed: datetime = meta["last_modified"]
    # Whole seconds, since a listing may be finer than the header of an answer.
    mtime_ns = (changed - _EPOCH) // timedelta(seconds=1) * 1_000_000_000
    return ShardInfo(url, meta["size"], mtime_ns, version_in(meta))


def version_in(meta: Mapping[str, Any]) -> str | None:
    """The version of the object that was requested; see `version_of`."""
    return version_of(meta["e_tag"], meta["last_modified"], meta["size"])


_FIRST_WAIT_S = 0.001
_LONGEST_WAIT_S = 0.5
_Result = TypeVar("_Result")


class InFlight:
    """The answers that obstore's threads still hold.

    Such a thread reports each answer to Python, even one that was cancelled. If the interpreter exits meanwhile, the
    process aborts, and until then the connection stays open. An answer dies when its thread has released it.

    Args:
        call_obstore: any call into obstore: what its threads have released is freed only by the next one.
    """

    def __init__(self, call_obstore: Callable[[], object]) -> None:
        self._answers: weakref.WeakSet[Awaitable[object]] = weakref.WeakSet()
        self._call_obstore = call_obstore

    def add(self, answer: Awaitable[_Result]) -> Awaitable[_Result]:
        """Note an answer, and return it to be awaited."""
        self._answers.add(answer)
        return answer

    async def wait_until_empty(self) -> None:
        """Wait until obstore has released all answers, which must have arrived or been cancelled; at most a second.

        It polls, mostly twice, since obstore does not notify.
        """
        wait_s = _FIRST_WAIT_S
        while self._answers and wait_s <= _LONGEST_WAIT_S:
            self._call_obstore()
            if self._answers:
                await asyncio.sleep(wait_s)
                wait_s *= 2
        self._answers.clear()


_FIRST_PIECE_BYTES, _LARGEST_PIECE_BYTES = 256 << 10, 512 << 10
_LONGEST_PIECE_S = 0.1


class PieceSize:
    """How much obstore gathers of a body before it passes that on; each piece costs as much as copying 100 kB.

    What it has gathered is lost where the body breaks off, and nobody sees it come. So pieces are of 256 KiB until a
    body has come whole, and then of what came in a tenth of a second, at most 512 KiB; after a body that did not come
    whole, the next ones are passed on as they come.

    Attributes:
        least_bytes: of every piece but the last.
    """

    def __init__(self) -> None:
        self.least_bytes = _FIRST_PIECE_BYTES

    def came_whole(self, body_bytes: int, seconds: float) -> None:
        """A body was read to its end. A short one says nothing."""
        if body_bytes > _LARGEST_PIECE_BYTES:
            at_this_rate = int(body_bytes * _LONGEST_PIECE_S / max(seconds, 1e-6))
            self.least_bytes = max(1, min(_LARGEST_PIECE_BYTES, at_this_rate))

    def was_left(self) -> None:
        """A body broke off, or was not read to its end."""
        self.least_bytes = 1


class ObjectBody:
    """See `RangeBody`.

    Args:
        url: of the object.
        result: obstore's answer.
        sizes: of the range and of the whole object.
        etag: of the object.
        in_flight: notes every piece that is requested.
        pieces: how large they are in this bucket; learns from this body.
    """

    def __init__(
        self,
        url: str,
        result: Any,
        sizes: tuple[int, int],
        *,
        etag: str | None,
        in_flight: InFlight,
        pieces: PieceSize,
    ) -> None:
        self._range_bytes, self.total_bytes = sizes
        self.etag = etag
        self._url = url
        self._stream = result.stream(min_chunk_size=pieces.least_bytes)
        self._in_flight = in_flight
        self._pieces = pieces

    async def chunks(self) -> AsyncIterator[bytes]:
        """See `RangeBody.chunks`."""
        import obstore

        left, stream, began_s = self._range_bytes, self._stream, time.monotonic()
        try:
            while (chunk := await self._next(stream)) is not None:
                left -= len(chunk)
                if left < 0:
                    raise transient_error(self._url, "the server sent more bytes than its headers say")
                yield chunk
        except (obstore.exceptions.BaseError, OSError) as exc:
            raise body_error(self._url, exc) from None
        finally:
            await self.aclose()
            if left:
                self._pieces.was_left()
            else:
                self._pieces.came_whole(self._range_bytes, time.monotonic() - began_s)
        if left:
            raise transient_error(self._url, f"the answer ended {counted(left, 'byte')} early")

    async def _next(self, stream: Any) -> Any:
        try:
            return await self._in_flight.add(anext(stream))
        except StopAsyncIteration:
            return None

    async def aclose(self) -> None:
        """See `RangeBody.aclose`."""
        self._stream = None  # the last reference: obstore closes the connection with it


def body_error(url: str, exc: Exception) -> StorageError:
    """A transient error, whatever broke the body off: if the cause is permanent, the next request fails with it."""
    error = storage_error(url, exc)
    return error if isinstance(error, TransientStorageError) else transient_error(url, "the answer broke off")


_SIGNED_FOR = timedelta(hours=1)
# A server may close its connection with a refusal, which the next request meets.
_TRIES_OF_NAMING = 3

_LISTED_AT_ONCE = 1000
_used_by: list[int] = []


class ObjectStorage:
    """Objects by `s3://bucket/key`, `gs://bucket/key`, `az://container/key` or `https://host/path`.

    Each bucket or host has two obstore stores (connection pools), made on first use. The one for writing retries by
    itself, since only it can resend a part of a large object; what it gives up on is retried here, like any other
    transient failure. When credentials expire, the store is replaced once for all concurrent requests, which are then
    retried.

    Args:
        config: how the stores are made.
        retries: how requests are retried.
    """

    def __init__(self, config: ObjectConfig, retries: Retries | None = None) -> None:
        self._config = config
        self._retries = retries or Retries()
        self._stores: dict[tuple[str, bool], Any] = {}
        self._answers_200: set[str] = set()
        self._in_flight = InFlight(_call_obstore)
        self._pieces: defaultdict[str, PieceSize] = defaultdict(PieceSize)
        self._lock = threading.Lock()

    def info(self, url: str) -> ShardInfo:
        """Size and version by one HEAD; see `Storage.info`."""
        import obstore

        if self._config.family != "http" and not locate(url).key:
            raise ShardNotFoundError("this is a bucket, and a shard must be an object in it; check the path", url=url)
        try:
            meta = self._retried(url, obstore.head)
        except ShardNotFoundError as exc:
            raise self._with_advice(url, exc) from None
        except StorageError as exc:
            raise self._explained(url, exc) from None
        return info_of(url, meta)

    def absolute(self, url: str) -> str:
        """The url itself, with its protocol in lower case."""
        protocol, rest = url.split("://", 1)
        return f"{protocol.lower()}://{rest}"

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """The matches, by one listing for each folder that a component matches; from `**` on, of everything below.

        Raises:
            StorageError: the storage cannot list, as web servers cannot.
        """
        place = locate(pattern)
        if self._config.family == "http":
            raise StorageError(
                "a web server does not list its files, so patterns and folders cannot be looked up; name the shards, "
                "with braces: train-{000000..000099}.tar",
                url=without_secrets(pattern),
            )
        components = [part for part in place.key.split("/") if part]
        listing = ObjectListing(partial(self._level, place), partial(self._below, place))
        if folders:
            return [ShardInfo(f"{place.root}{key}", UNKNOWN_BYTES, 0) for key in sorted(listing.folders(components))]
        found = [info_of(f"{place.root}{meta['path']}", meta) for meta in listing.objects(components)]
        return sorted(found, key=lambda info: info.url)

    def is_folder(self, url: str) -> bool:
        """Whether any key has this one and a slash as its prefix; see `Storage.is_folder`. Never on a web server."""
        if self._config.family == "http":
            return False
        listed = self._level(locate(url), locate(url).key.rstrip("/"))
        return bool(listed["objects"] or listed["common_prefixes"])

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """See `Storage.read_bytes`. What has come is kept where an answer is cut, as long as the version stays."""
        import obstore

        content = bytearray()
        version: str | None = None
        goes_on = True

        def rest(store: Any, key: str) -> bytes:
            nonlocal version, goes_on
            if not goes_on or version is None:
                content.clear()
            try:
                answer = _get_from(store, key, len(content))
            except (obstore.exceptions.BaseError, OSError, ValueError) as exc:
                goes_on = not is_whole_answer(exc)  # a server that ignores ranges
                raise
            size_bytes, now = answer.meta["size"], version_in(answer.meta)
            check_small(url, size_bytes, most_bytes)
            if now != version:
                content.clear()
                version = now
            if answer.range[0] != len(content):
                content.clear()
                raise transient_error(url, "it was changed while it was read")
            _receive(url, answer, content)
            if len(content) != size_bytes:
                raise transient_error(url, f"the answer ended after {len(content):,} bytes")
            return bytes(content)

        return self._retried(url, rest, came=lambda: len(content))

    async def open_range(self, url: str, start: int, end: int | None, *, etag: str | None = None) -> RangeBody:
        """See `Storage.open_range`."""
        place = locate(url)
        return await self._retried_async(url, place, lambda: self._open(url, place, start, end, etag))

    async def _open(self, url: str, place: ObjectPlace, start: int, end: int | None, etag: str | None) -> RangeBody:
        import obstore

        if place.root in self._answers_200:
            return await self._open_signed(url, place, start, end, etag)
        options: Any = {"range": {"offset": start} if end is None else (start, end)}
        if etag is not None and not etag.startswith("W/"):  # a weak one never matches
            options["if_match"] = quoted(etag)
        try:
            # No local name: an error that someone keeps would keep the store through it, and its connections.
            result = await self._in_flight.add(obstore.get_async(self._store(place), place.key, options=options))
        except (obstore.exceptions.BaseError, OSError, ValueError) as exc:
            if is_whole_answer(exc) and self._config.family == "s3" and not self._config.config.get("skip_signature"):
                self._answers_200.add(place.root)
                return await self._open_signed(url, place, start, end, etag)
            refusal = storage_error(url, exc)
            if type(refusal) is ShardChangedError or (is_whole_answer(exc) and start == 0):
                return await self._empty_or_refused(url, place, start, etag, refusal)
            raise refusal from None
        total_bytes, now = result.meta["size"], version_in(result.meta)
        if not same_etag(etag, now):
            raise changed_error(url, etag, now)
        first, last = result.range
        if (first, last) != (start, total_bytes if end is None else min(end, total_bytes)):
            raise transient_error(url, "the server sent another part of the object than was requested")
        sizes, pieces = (last - first, total_bytes), self._pieces[place.root]
        return ObjectBody(url, result, sizes, etag=now, in_flight=self._in_flight, pieces=pieces)

    async def _empty_or_refused(
        self, url: str, place: ObjectPlace, start: int, etag: str | None, refusal: StorageError
    ) -> WholeBody:
        """What the object is now, after a range of it was refused: an empty object has no range.

        Raises:
            ShardChangedError: it is another version than the wanted one; names both.
            StorageError: the refusal, which is right.
        """
        size_bytes, now = await self._size_and_etag_now(place)
        if size_bytes == 0 and start == 0 and same_etag(etag, now):
            return WholeBody(b"", 0, now)
        is_only_shorter = etag is None or (now is not None and same_etag(etag, now))
        if is_only_shorter or type(refusal) is not ShardChangedError:
            raise refusal from None
        raise changed_error(url, etag, now) from None

    async def _open_signed(
        self, url: str, place: ObjectPlace, start: int, end: int | None, etag: str | None
    ) -> RangeBody:
        """Read a range whole from `rclone serve s3`, which sends it with status 200; obstore takes only 206."""
        import aiohttp
        import obstore

        address = await self._in_flight.add(obstore.sign_async(self._store(place), "GET", place.key, _SIGNED_FOR))
        connector = aiohttp.TCPConnector(ssl=tls_context(self._config.client))
        headers = {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        with ReportsErrors(url):
            async with (
                aiohttp.ClientSession(connector=connector, raise_for_status=True) as session,
                session.get(address, headers=headers) as response,
            ):
                content, now = await response.read(), quoted(response.headers.get("ETag"))
                span, _, total = response.headers.get("Content-Range", "").rpartition("/")
        if not same_etag(etag, now):
            raise changed_error(url, etag, now)
        if start == 0 and not content:
            return WholeBody(b"", 0, now)
        if span != f"bytes {start}-{start + len(content) - 1}" or not total.isdigit():
            raise whole_answer_error(url)
        stop = int(total) if end is None else min(end, int(total))
        check_length(url, content, stop - start, int(total))
        return WholeBody(content, int(total), now)

    async def _size_and_etag_now(self, place: ObjectPlace) -> tuple[int | None, str | None]:
        import obstore

        for _ in range(_TRIES_OF_NAMING):
            with suppress(obstore.exceptions.BaseError, OSError):
                meta = await self._in_flight.add(obstore.head_async(self._store(place), place.key))
                return meta["size"], version_in(meta)
        return None, None

    def write(self, url: str, source: bytes | str) -> None:
        """By one PUT, or in parts where it is large; either way whole or not at all. See `Storage.write`."""
        import obstore

        if self._config.family == "http":
            raise StorageError("a web server cannot be written to; name a bucket or a folder", url=without_secrets(url))
        content = source if isinstance(source, bytes) else Path(source)
        self._retried(url, lambda store, key: obstore.put(store, key, content), writes=True)

    def delete(self, url: str) -> None:
        """See `Storage.delete`."""
        import obstore

        try:
            self._retried(url, obstore.delete)
        except ShardNotFoundError:
            return

    async def aclose(self) -> None:
        """Drop the stores and their connections, and wait for what is in flight."""
        with self._lock:
            self._stores.clear()
        await self._in_flight.wait_until_empty()

    # -- listing

    def _level(self, place: ObjectPlace, prefix: str) -> Any:
        import obstore

        return self._retried(place.root + prefix, lambda store, _: obstore.list_with_delimiter(store, prefix or None))

    def _below(self, place: ObjectPlace, prefix: str, wanted: Callable[[str], bool]) -> Any:
        import obstore

        def whole(store: Any, _: str) -> Any:
            chunks = obstore.list(store, prefix or None, chunk_size=_LISTED_AT_ONCE)
            return [meta for chunk in chunks for meta in chunk if wanted(meta["path"])]

        return self._retried(place.root + prefix, whole)

    def _with_advice(self, url: str, error: ShardNotFoundError) -> ShardNotFoundError:
        """The error with names similar to the missing one, from one listing of its folder."""
        place = locate(url)
        folder, _, name = place.key.rpartition("/")
        if self._config.family == "http" or "bucket" in error.message:
            return error
        try:
            level = self._level(place, folder)
        except ShardNotFoundError as exc:  # the bucket, since a folder that is not there lists as empty
            return ShardNotFoundError(exc.message, url=without_secrets(url))
        except StorageError:
            return error
        paths = [*(str(meta["path"]) for meta in level["objects"]), *map(str, level["common_prefixes"])]
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        advice = close_matches(name, names, f"{place.root}{folder}")
        return ShardNotFoundError(f"no such shard: {advice}", url=without_secrets(url))

    def _explained(self, url: str, error: StorageError) -> StorageError:
        """The error for a denied HEAD, whose answer has no body that says why; a listing's has."""
        if not is_unexplained_denial(error) or self._config.family == "http":
            return error
        place = locate(url)
        try:
            self._level(place, place.key.rpartition("/")[0])
        except StorageError as exc:
            return StorageError(exc.message, url=without_secrets(url)) if type(exc) is StorageError else error
        return error

    def _store(self, place: ObjectPlace, *, writes: bool = False) -> Any:
        _use_here(place.root)
        with self._lock:
            store = self._stores.get((place.root, writes))
            if store is None:
                store = self._stores[place.root, writes] = make_store(place, self._config, retries=writes)
            return store

    def _renew(self, place: ObjectPlace, expired: Any) -> None:
        """Drop the stores of expired credentials, unless another request has done so already."""
        with self._lock:
            if any(store is expired for store in self._stores.values()):
                for writes in (True, False):
                    self._stores.pop((place.root, writes), None)

    def _retried(
        self,
        url: str,
        act: Callable[[Any, str], _Result],
        *,
        writes: bool = False,
        came: Callable[[], int] = lambda: 0,
    ) -> _Result:
        """Call `act` with a url's store and key, and retry it as the policy says.

        Expired credentials are renewed, once. `came` says how many bytes there are: more of them are progress.
        """
        import obstore

        place, attempts, renewed = locate(url), self._retries.begin(url), False
        while True:
            store, before = self._store(place, writes=writes), came()
            try:
                answer = act(store, place.key)
                attempts.progressed()
                return answer
            except (obstore.exceptions.BaseError, OSError, ValueError, TransientStorageError) as exc:
                error = exc if isinstance(exc, TransientStorageError) else storage_error(url, exc)
                if came() > before:
                    attempts.progressed()
                if renews := isinstance(error, ExpiredCredentialsError) and not renewed:
                    renewed = True
                    self._renew(place, store)
                wait_s = 0.0 if renews else attempts.wait_s(error)
                if wait_s is None:
                    raise error from None
            finally:
                del store  # an error that someone keeps would keep its connections
            time.sleep(wait_s)

    async def _retried_async(self, url: str, place: ObjectPlace, act: Callable[[], Awaitable[_Result]]) -> _Result:
        """The same on the running loop; a missing object comes with advice."""
        store = self._store(place)
        try:
            try:
                return await act()
            except ExpiredCredentialsError:
                self._renew(place, store)
                return await act()
        except ShardNotFoundError as exc:
            error = exc
        finally:
            del store
        # With stores of its own, since it may outlast the others; and used once, since closing waits for its thread.
        alone = ObjectStorage(self._config, Retries(RetryPolicy(tries=1)))
        raise await asyncio.to_thread(alone._with_advice, url, error)


def _get_from(store: Any, key: str, start: int) -> Any:
    """The answer to a request for an object from a place on."""
    import obstore

    return obstore.get(store, key, options={"range": {"offset": start}}) if start else obstore.get(store, key)


def _receive(url: str, answer: Any, content: bytearray) -> None:
    """Append the body of an answer to what there is."""
    import obstore

    try:
        for piece in answer.stream(min_chunk_size=1):  # what is gathered is lost where the body breaks off
            content += bytes(piece)
    except (obstore.exceptions.BaseError, OSError) as exc:
        raise body_error(url, exc) from None


def _call_obstore() -> object:
    from obstore.store import MemoryStore

    return MemoryStore()


def _use_here(url: str) -> None:
    """Note that this process uses obstore: in a fork its threads are the parent's, and it would wait forever.

    Raises:
        StorageError: it was forked from one that has.
    """
    process = os.getpid()
    if not _used_by:
        _used_by.append(process)
    elif _used_by[0] != process:
        raise StorageError(
            "this process was forked from one that has used a storage, and would wait forever here; start it by spawn",
            url=without_secrets(url),
        )


class ObjectListing:
    """Looks up patterns in one bucket.

    Args:
        level: lists what lies right below a prefix: its `objects` and `common_prefixes`, as obstore gives them.
        below: lists all objects below a prefix, at any depth, of whose paths a function says so.
    """

    def __init__(self, level: Callable[[str], Any], below: Callable[[str, Callable[[str], bool]], list[Any]]) -> None:
        self._level = level
        self._below = below

    def objects(self, components: Sequence[str]) -> list[Any]:
        """The objects whose keys the components of a pattern stand for, each once, as obstore describes them."""
        prefixes, steps = self._prefixes(components)
        if steps[0] != ANY_FOLDERS:
            return [meta for prefix in prefixes for meta in self._objects(prefix, steps[0])]
        return [meta for prefix in prefixes for meta in self._below(prefix, partial(_fits_below, prefix, steps))]

    def folders(self, components: Sequence[str]) -> list[str]:
        """The folders (what keys have before a slash) that the components stand for, each once."""
        prefixes, steps = self._prefixes(components)
        if steps[0] != ANY_FOLDERS:
            return [found for prefix in prefixes for found in self._folders(prefix, steps[0])]
        return [
            f"{prefix}/{folder}".lstrip("/")
            for prefix in prefixes
            for folder in _folders_of(_relative(meta["path"], prefix) for meta in self._below(prefix, lambda _: True))
            if fits(folder, steps)
        ]

    def _prefixes(self, components: Sequence[str]) -> tuple[Sequence[str], list[str]]:
        """Where to look, and the steps of the pattern from there on: one, or as many as there are from `**` on."""
        steps = pattern_steps(components) or ["*"]
        first = next((number for number, step in enumerate(steps) if is_pattern(step)), len(steps) - 1)
        prefixes: Sequence[str] = ["/".join(steps[:first])]
        while first < len(steps) - 1 and steps[first] != ANY_FOLDERS:
            prefixes = [match for prefix in prefixes for match in self._folders(prefix, steps[first])]
            first += 1
        return prefixes, steps[first:]

    def _folders(self, prefix: str, component: str) -> Sequence[str]:
        if not is_pattern(component):
            return [f"{prefix}/{component}".lstrip("/")]
        return [found for found in self._level(prefix)["common_prefixes"] if matches(found, component)]

    def _objects(self, prefix: str, component: str) -> Sequence[Any]:
        return [meta for meta in self._level(prefix)["objects"] if matches(meta["path"], component)]


def _fits_below(prefix: str, steps: Sequence[str], path: str) -> bool:
    return fits(_relative(path, prefix), steps)


def _relative(path: str, prefix: str) -> str:
    return path[len(prefix) :].strip("/")


def _folders_of(paths: Iterable[str]) -> set[str]:
    """All folders in which paths lie, at any depth."""
    found: set[str] = set()
    for path in paths:
        while (path := path.rpartition("/")[0]) and path not in found:
            found.add(path)
    return found

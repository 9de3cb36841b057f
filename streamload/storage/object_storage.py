"""Read and write objects in buckets and on web servers with obstore."""

from __future__ import annotations

import asyncio
import difflib
import math
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
import weakref
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import obstore
from obstore import store
from obstore.exceptions import BaseError, UnknownConfigurationKeyError

from streamload.errors import (
    ShardChangedError,
    ShardNotFoundError,
    StorageError,
    TransientStorageError,
    without_secrets,
)
from streamload.storage import errors
from streamload.storage.download import Retries
from streamload.storage.protocol import (
    FAMILY,
    UNKNOWN_BYTES,
    WEB,
    Entry,
    RangeBody,
    ShardInfo,
    find_entries,
    one_piece,
    place_of,
    protocol_of,
    quoted,
)
from streamload.text import counted

_Result = TypeVar("_Result")

# How obstore retries a write, or a part of a large one. Our own `RetryPolicy` counts all of obstore's tries as one.
RETRY: dict[str, Any] = {
    "max_retries": 10,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
    "retry_timeout": timedelta(seconds=30),
}
# Timeouts on progress: the default of 30 s for a whole request would end slow bodies that still progress. Plain http is
# used only for an http:// endpoint.
_CLIENT: dict[str, Any] = {"timeout": "24h", "read_timeout": "30s", "connect_timeout": "10s", "allow_http": True}


# -- options ---------------------------------------------------------------------------------------------------------

_STORES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
# Obstore's names for options that fsspec's filesystems and their clients name differently. Of S3's endpoint names, only
# `aws_endpoint_url_s3` overrides environment variables.
_ALIASES: dict[str, dict[str, str]] = {
    "s3": {
        "key": "access_key_id",
        "secret": "secret_access_key",
        "token": "session_token",
        "region_name": "region",
        "anon": "skip_signature",
        "endpoint_url": "aws_endpoint_url_s3",
        "endpoint": "aws_endpoint_url_s3",
        "profile": "profile",
    },
    "gs": {"token": "service_account", "endpoint_url": "base_url", "anon": "skip_signature"},
    "az": {"sas_token": "sas_key", "endpoint_url": "endpoint", "anon": "skip_signature"},
    "http": {},
}


@dataclass(frozen=True, slots=True)
class ObjectOptions:
    """Settings of an obstore store and its client, and an AWS profile."""

    family: str
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    client: dict[str, Any] = field(default_factory=dict, repr=False)
    profile: str | None = None


def object_options(protocol: str, options: Mapping[str, Any]) -> ObjectOptions:
    """Translate the options of one protocol for obstore. Messages show no values that may be secret.

    Raises TypeError for a value of the wrong type, ValueError for an unknown option or an impossible value.
    """
    family = FAMILY[protocol]
    for name in ("client_kwargs", "client_options", "headers"):
        if not isinstance(options.get(name) or {}, Mapping):
            raise TypeError(f"storage_options[{name!r}] must be a dict, not {type(options[name]).__name__}")
    flat: dict[str, Any] = {}
    for settings in (options.get("client_kwargs") or {}, options):
        flat |= {name: value for name, value in settings.items() if value is not None and name != "client_kwargs"}
    client, headers, verify = dict(flat.pop("client_options", {})), flat.pop("headers", {}), flat.pop("verify", True)
    for name, value in headers.items():
        if not isinstance(value, str):
            raise TypeError(f"storage_options['headers'][{name!r}] must be a string, not {type(value).__name__}")
    client |= {"default_headers": dict(headers)} if headers else {}
    if isinstance(verify, str):
        if not os.path.isfile(verify):
            problem = f"storage_options['client_kwargs']['verify'] is {verify!r}, but there is no such file"
            raise ValueError(f"{problem}; give the path of a file with certificates (PEM), or False")
        client["root_certificate"] = Path(verify).read_bytes()
    elif not verify:
        client["allow_invalid_certificates"] = True
    config: dict[str, Any] = {}
    for name, value in flat.items():
        own = _own_name(protocol, family, name)
        if not isinstance(value, str | bool):
            within = "" if name in options else "['client_kwargs']"
            raise TypeError(f"storage_options{within}[{name!r}] must be a string, not {type(value).__name__}")
        if value:  # fsspec's callers write `anon=False` for the default
            config.setdefault(own, value)
    _check_endpoint(family, config)
    return ObjectOptions(family, config, client, config.pop("profile", None))


def _own_name(protocol: str, family: str, name: str) -> str:
    """Return obstore's name of an option. Raises ValueError for an unknown one."""
    plain = name.lower().removeprefix("aws_") if family == "s3" else name
    aliases = _ALIASES[family]
    try:
        if plain not in aliases:
            getattr(store, _STORES[family])("bucket", config={plain: ""})
    except (KeyError, UnknownConfigurationKeyError):
        known = ["client_kwargs", "client_options", "headers", *aliases, *aliases.values()]
        close = difflib.get_close_matches(name, known, 1, cutoff=0.0)[0]
        raise ValueError(
            f"storage_options names {name!r}, which {protocol}:// does not know; did you mean {close!r}? If it is an "
            "option of an fsspec filesystem, pass the filesystem: filesystem=fsspec.filesystem(...)"
        ) from None
    except BaseError:  # the option is known; the store lacks others
        pass
    return aliases.get(plain, plain)


def _check_endpoint(family: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for an endpoint without a scheme, since obstore would panic."""
    variables = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if family == "s3" else ()
    named = [("endpoint_url", config[own]) for own in ("aws_endpoint_url_s3", "base_url", "endpoint") if own in config]
    named += [(variable, os.environ[variable]) for variable in variables if variable in os.environ]
    if named and not named[0][1].startswith(("http://", "https://")):
        raise ValueError(f"{named[0][0]}={without_secrets(named[0][1])!r} must begin with https:// or http://")


# -- stores ----------------------------------------------------------------------------------------------------------


def locate(url: str) -> tuple[str, str]:
    """Split a url into its root (bucket or host) and obstore's key; a web root keeps the query.

    Raises StorageError for a url without bucket or host, or with a key that cannot be requested.
    """
    protocol = protocol_of(url)
    bucket, _, key = url.partition("://")[2].partition("/")
    if not bucket:
        raise StorageError("the url does not name a bucket or host", url=url)
    root = f"{protocol}://{bucket}/"
    if protocol in WEB:
        path, mark, query = key.partition("?")
        return f"{root}{mark}{query}", unquote(path)
    if key.startswith("/"):  # obstore would drop the slash, and perhaps read another object
        raise StorageError("the key begins with a slash; name the object without it", url=url)
    return root, key


def make_store(root: str, options: ObjectOptions, *, retries: bool) -> Any:
    """Make the obstore store of a root; with `retries` the store repeats failed requests itself.

    Raises StorageError if a setting is wrong or missing: an account's name, a profile, or boto3 for the profile.
    """
    retry = RETRY if retries else RETRY | {"max_retries": 0}
    client, config = _CLIENT | options.client, options.config
    settings: dict[str, Any] = {"client_options": client, "retry_config": retry}
    bucket, at, account = root.partition("://")[2].rstrip("/").partition("@")
    try:
        if options.family == "http":
            address, client["default_headers"] = _without_login(root, client.get("default_headers", {}))
            return store.HTTPStore.from_url(address, **settings)
        if options.family == "s3":
            settings["credential_provider"] = _aws_credentials(root, options)
        if at:
            config = config | {"account_name": account.partition(".")[0]}
        return getattr(store, _STORES[options.family])(bucket, config=config, **settings)
    except (BaseError, ValueError, TypeError) as exc:
        reason = without_secrets(str(exc).partition("\n")[0])
        raise StorageError(f"this storage cannot be set up ({reason}); check storage_options", url=root) from None


def _without_login(root: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """Turn the login in a web address into a header, which is left out on redirects."""
    protocol, _, place = root.partition("://")
    host, slash, query = place.partition("/")
    login, at, host = host.rpartition("@")
    if at and "authorization" not in map(str.lower, headers):
        user, _, password = map(unquote, login.partition(":"))
        basic = b64encode(f"{user}:{password}".encode()).decode("ascii")
        headers = {**headers, "Authorization": f"Basic {basic}"}
    return f"{protocol}://{host}{slash}{query}", headers


def _aws_credentials(root: str, options: ObjectOptions) -> Any:
    """Return the provider of credentials from `~/.aws`; None if obstore is to find credentials itself."""
    files = [("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config")]
    profile = options.profile or os.environ.get("AWS_PROFILE")
    exists = any(os.path.exists(os.path.expanduser(os.environ.get(name) or path)) for name, path in files)
    if {"access_key_id", "skip_signature"} & options.config.keys() or not (profile or exists):
        return None
    try:
        import boto3
        from botocore.exceptions import BotoCoreError
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if profile is None:
            return None
        raise StorageError(
            f"the profile {profile!r} of `~/.aws` needs boto3: pip install 'streamload[s3]'", url=root
        ) from None
    try:
        session = boto3.Session(profile_name=profile)
    except BotoCoreError as exc:
        raise StorageError(
            f"there is no profile {profile!r} (from storage_options or AWS_PROFILE): {exc}", url=root
        ) from None
    # `ttl` must be below 15 minutes, the time before expiry at which botocore renews credentials.
    return Boto3CredentialProvider(session, ttl=timedelta(minutes=5)) if session.get_credentials() else None


# -- the storage -----------------------------------------------------------------------------------------------------

# Obstore gathers pieces of this size, since passing on a piece costs as much as copying 100 kB.
_PIECE_BYTES = 512 << 10
# A time of change younger than this identifies no version: an object may change twice within a second, and some servers
# always answer "now".
_LEAST_AGE_S = 60.0
# Maximum number of stores, since each signed url has a store of its own.
_MOST_STORES = 64
_SIGNED_FOR = timedelta(hours=1)
# The timeout of requests that are sent without obstore.
_TIMEOUT_S = 10.0

# Holds the id of the process that has used obstore; a fork lacks obstore's threads.
_used_by: set[int] = set()


def _version(meta: Mapping[str, Any]) -> str | None:
    """Return the ETag, or a weak ETag made of time and size; None if the time is unknown or too recent."""
    etag, changed = meta["e_tag"], meta["last_modified"]
    if etag is not None or changed is None:
        return quoted(etag)
    changed_s = changed.timestamp()
    if changed_s <= 0 or time.time() - changed_s < _LEAST_AGE_S:
        return None
    return f'W/"{int(changed_s):x}-{meta["size"]:x}"'


def _info(url: str, meta: Mapping[str, Any]) -> ShardInfo:
    # Whole seconds, since a listing's times may be finer than a header's.
    return ShardInfo(url, meta["size"], int(meta["last_modified"].timestamp()) * 1_000_000_000, _version(meta))


class ObjectStorage:
    """Read and write objects at `s3://bucket/key`, `gs://bucket/key`, `az://container/key` or `https://host/path`.

    Each bucket or host has an obstore store for reading, and one for writing. Only the latter retries by itself, since
    only obstore can repeat a part of a large object. Stores are replaced if credentials expire.
    """

    def __init__(self, options: ObjectOptions, retries: Retries | None = None) -> None:
        self._options = options
        self._retries = retries or Retries()
        self._web = options.family == "http"
        self._signs = not self._web and "skip_signature" not in options.config
        self._stores: dict[tuple[str, bool], Any] = {}
        self._lock = threading.Lock()
        # Answers that obstore's threads still hold; if the interpreter exits meanwhile, the process aborts.
        self._in_flight: weakref.WeakSet[Awaitable[object]] = weakref.WeakSet()
        self._broken: set[str] = set()
        self._answers_200: set[str] = set()
        self._pauses: dict[str, tuple[float, float]] = {}  # times: last asked, and until when to rest
        self._pausing = threading.Lock()

    def info(self, url: str) -> ShardInfo:
        """Return size and version by one HEAD; if that fails in a bucket, list the folder to explain why."""
        root, key = locate(url)
        if not self._web and not key:
            raise ShardNotFoundError("this is a bucket, but a shard must be an object in it; check the path", url=url)
        try:
            return _info(url, self._retried(url, _head))
        except StorageError as exc:
            if self._web or isinstance(exc, TransientStorageError):
                raise
            error = exc
        folder, _, name = key.rpartition("/")
        try:
            names = [entry.path.rpartition("/")[2] for entry in self._level(root, folder)]
        except StorageError as exc:
            if type(exc) is type(error):
                error = type(exc)(exc.message, url=url)
        else:
            if isinstance(error, ShardNotFoundError):
                error = errors.missing_error(url, name, names, root + folder)
        raise error from None

    def absolute(self, url: str) -> str:
        """Return the url itself, with its protocol in lower case."""
        protocol, rest = url.split("://", 1)
        return f"{protocol.lower()}://{rest}"

    def list(self, pattern: str, *, folders: bool = False) -> list[ShardInfo]:
        """Return the matches, by one listing of each folder. Raises StorageError for a web server."""
        root, key = locate(pattern)
        if self._web:
            raise StorageError(
                "a web server does not list its files, so patterns and folders cannot be looked up; name the shards, "
                "with braces: train-{000000..000099}.tar",
                url=pattern,
            )
        entries = find_entries(key.strip("/"), partial(self._level, root), folders=folders)
        if folders:
            return [ShardInfo(f"{root}{entry.path}", UNKNOWN_BYTES, 0) for entry in entries]
        return [_info(f"{root}{entry.path}", entry.known) for entry in entries]

    def is_folder(self, url: str) -> bool:
        """Return True if an object's key begins with this key and a slash; False on a web server."""
        root, key = locate(url)
        return not self._web and bool(self._level(root, key.rstrip("/")))

    def read_bytes(self, url: str, *, most_bytes: int) -> bytes:
        """Read a small file by one GET."""

        def whole(store: Any, key: str) -> bytes:
            answer = obstore.get(store, key)
            errors.check_small(url, answer.meta["size"], most_bytes)
            content = bytes(answer.bytes())
            errors.check_length(url, content, answer.meta["size"], answer.meta["size"])
            return content

        return self._retried(url, whole)

    async def open_range(self, url: str, start: int, end: int | None) -> RangeBody:
        """Request a range by one GET."""
        root, key = locate(url)
        if root in self._answers_200:
            return await self._open_signed(url, start, end)
        options: Any = {"range": {"offset": start} if end is None else (start, end)}
        try:
            # No local variable names the store: a kept error would keep the variable, and so the store's connections.
            result = await self._tracked(obstore.get_async(self._store(root), key, options=options))
        except (BaseError, OSError, ValueError) as exc:
            error = errors.obstore_error(url, exc)
            is_whole = isinstance(error, errors.WholeAnswerError)
            if is_whole and self._signs and self._options.family == "s3":
                self._answers_200.add(root)
                return await self._open_signed(url, start, end)
            if start == 0 and (is_whole or isinstance(error, ShardChangedError)):  # the object may be empty
                with suppress(StorageError):
                    meta = await asyncio.to_thread(self._retried, url, _head)
                    if meta["size"] == 0:
                        return RangeBody(0, _version(meta), one_piece(b""))
            raise await asyncio.to_thread(self._handled, url, error) from None
        total_bytes = result.meta["size"]
        return RangeBody(total_bytes, _version(result.meta), self._pieces(url, root, result, result.range[1] - start))

    async def _pieces(self, url: str, root: str, result: Any, range_bytes: int) -> AsyncGenerator[bytes, None]:
        """Yield an answer's body; in small pieces after a broken answer, so that each counts as progress."""
        left, stream = range_bytes, result.stream(min_chunk_size=1 if root in self._broken else _PIECE_BYTES)
        del result
        try:
            while True:
                piece = await self._tracked(anext(stream))
                left -= len(piece)
                yield piece
        except StopAsyncIteration:
            if left:
                raise TransientStorageError(f"the answer ended {counted(left, 'byte')} early", url=url) from None
        except (BaseError, OSError) as exc:
            # Always transient: if the cause is permanent, the next request fails with it.
            error = errors.obstore_error(url, exc)
            raise (error if isinstance(error, TransientStorageError) else errors.answer_error(url, "broken")) from None
        finally:
            del stream  # the last reference: obstore closes the connection with it
            (self._broken.add if left else self._broken.discard)(root)

    async def _open_signed(self, url: str, start: int, end: int | None) -> RangeBody:
        """Read a range from `rclone serve s3`, which sends ranges with status 200: obstore refuses them."""
        byte_range = f"bytes={start}-{'' if end is None else end - 1}"
        with errors.fsspec_errors(url):
            response = await asyncio.to_thread(self._send, url, byte_range)
        headers = response.headers
        etag, (span, _, total) = quoted(headers.get("ETag")), headers.get("Content-Range", "").rpartition("/")
        if start == 0 and response.length == 0:
            return RangeBody(0, etag, one_piece(b""))
        stop = min(math.inf if end is None else end, int(total) if total.isdigit() else 0)
        if span != f"bytes {start}-{stop - 1}":
            raise errors.answer_error(url, "whole")

        async def pieces() -> AsyncGenerator[bytes, None]:
            with errors.fsspec_errors(url):  # closing `response` would wait for the reading thread
                while piece := await asyncio.to_thread(response.read1, _PIECE_BYTES):
                    yield piece  # one by one, since reading can be cancelled only between two pieces

        return RangeBody(int(total), etag, pieces())

    def write(self, url: str, source: bytes | str) -> None:
        """Write by one PUT; large content in parts."""
        if self._web:
            raise StorageError("a web server cannot be written to; name a bucket or a folder", url=url)
        content = source if isinstance(source, bytes) else Path(source)
        self._retried(url, lambda store, key: obstore.put(store, key, content), writes=True)

    def delete(self, url: str) -> None:
        """Delete an object."""
        with suppress(ShardNotFoundError):
            self._retried(url, obstore.delete)

    async def aclose(self) -> None:
        """Drop the stores and their connections, and wait at most a second for the answers in flight."""
        with self._lock:
            self._stores.clear()
        wait_s = 0.001
        while self._in_flight and wait_s < 1.0:
            store.MemoryStore()  # a cancelled answer is released at the next call of obstore
            if self._in_flight:
                await asyncio.sleep(wait_s)
                wait_s *= 2
        self._in_flight.clear()

    def _tracked(self, answer: Awaitable[_Result]) -> Awaitable[_Result]:
        self._in_flight.add(answer)
        return answer

    def _level(self, root: str, folder: str) -> Sequence[Entry]:
        listed: Any = self._retried(root + folder, lambda store, _: obstore.list_with_delimiter(store, folder or None))
        folders = [Entry(str(path), is_folder=True) for path in listed["common_prefixes"]]
        return [*folders, *(Entry(meta["path"], is_folder=False, known=meta) for meta in listed["objects"])]

    def _store(self, root: str, *, writes: bool = False) -> Any:
        """Return the store of a root. Raises StorageError in a fork of a process that has used obstore."""
        process = os.getpid()
        if _used_by - {process}:
            raise StorageError(
                "this process is a fork of one that has used a storage, and would hang; start it with the spawn method",
                url=root,
            )
        _used_by.add(process)
        with self._lock:
            store = self._stores.get((root, writes))
            if store is None:
                if len(self._stores) >= _MOST_STORES:
                    self._stores.pop(next(iter(self._stores)))
                store = self._stores[root, writes] = make_store(root, self._options, retries=writes)
            return store

    def _retried(self, url: str, act: Callable[[Any, str], _Result], *, writes: bool = False) -> _Result:
        root, key = locate(url)

        def once() -> _Result:
            store = self._store(root, writes=writes)
            try:
                return act(store, key)
            except (BaseError, OSError, ValueError, TransientStorageError) as exc:
                error = exc if isinstance(exc, StorageError) else errors.obstore_error(url, exc)
                raise self._handled(url, error) from None
            finally:
                del store  # a kept error would keep the store's connections

        return self._retries.repeat(url, once)

    def _handled(self, url: str, error: StorageError) -> StorageError:
        """Drop all stores if credentials expired; ask a throttling storage for its `Retry-After`. Return the error."""
        if isinstance(error, errors.ExpiredCredentialsError):
            with self._lock:
                self._stores.clear()
        if isinstance(error, TransientStorageError) and error.throttled:
            with self._pausing:  # one extra request for all requests refused together
                place = place_of(url)
                asked_s, until_s = self._pauses.get(place, (-math.inf, 0.0))
                if time.monotonic() > max(asked_s + 1.0, until_s):
                    pause_s, asked_s = self._retry_after_s(url), time.monotonic()
                    self._pauses[place] = asked_s, (until_s := asked_s + pause_s)
            error.retry_after_s = max(0.0, until_s - time.monotonic())
        return error

    def _retry_after_s(self, url: str) -> float:
        """Request the `Retry-After`, which obstore does not expose; return 0 if there is none."""
        try:
            if self._web or self._signs:
                self._send(url, "bytes=0-0").close()
        except urllib.error.HTTPError as exc:
            exc.close()
            return errors.parse_retry_after(exc.headers.get("Retry-After")) or 0.0
        except (BaseError, OSError, ValueError, HTTPException):
            pass
        return 0.0

    def _send(self, url: str, byte_range: str) -> HTTPResponse:
        """Request a range without obstore, blocking the thread. Raises urllib's errors, or BaseError."""
        client, trust = self._options.client, ssl.create_default_context()
        if "root_certificate" in client:
            trust.load_verify_locations(cadata=client["root_certificate"].decode("ascii", "ignore"))
        if client.get("allow_invalid_certificates"):
            trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        address, headers = url, client.get("default_headers", {})
        if self._web:
            address, headers = _without_login(url, headers)
        else:
            root, key = locate(url)
            address = obstore.sign(self._store(root), "GET", key, _SIGNED_FOR)
        request = urllib.request.Request(address, headers={"Range": byte_range})  # noqa: S310  it is a web address
        for name, value in headers.items():
            request.add_unredirected_header(name, value)
        response: HTTPResponse = urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trust)  # noqa: S310
        return response


def _head(store: Any, key: str) -> Any:
    try:
        return obstore.head(store, key)
    except BaseError:
        if "?" not in str(getattr(store, "url", "")):
            raise
        return obstore.get(store, key, options={"range": (0, 1)}).meta  # signed for GET, as most signed urls are

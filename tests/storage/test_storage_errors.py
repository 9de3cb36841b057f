"""What goes wrong with a storage: every answer becomes the right error, with advice and without secrets."""

from __future__ import annotations

import asyncio
import pickle
from email.utils import formatdate

import pytest
from matrix import exhaustive
from servers.faults import FaultServer
from servers.scripted_server import CONTENT, ScriptedServer
from through_fsspec import through_fsspec

from streamload.errors import (
    DatasetIndexError,
    SampleError,
    ShardChangedError,
    ShardFormatError,
    ShardNotFoundError,
    StorageError,
    StreamloadError,
    TransientStorageError,
)
from streamload.storage import filesystem_storage, object_storage
from streamload.storage.download import Pin, Retries, download, read_range
from streamload.storage.filesystem_storage import FilesystemStorage
from streamload.storage.object_storage import locate, object_options
from streamload.storage.storages import Storages

OPTIONS = {"key": "key-id", "secret": "told-secret", "token": "told-secret"}
KINDS = ["s3", "http", "fsspec-http", exhaustive(("s3fs",))]


def storages_of(kind: str, address: str, retries: Retries | None = None) -> tuple[Storages, str]:
    if kind == "http":
        return Storages(retries=retries), f"{address}/set/a.tar"
    if kind == "fsspec-http":
        return Storages(filesystem=through_fsspec("http"), retries=retries), f"{address}/set/a.tar"
    options = {**OPTIONS, "endpoint_url": address, "client_kwargs": {"region_name": "us-east-1"}}
    if kind == "s3fs":
        return Storages(filesystem=through_fsspec("s3", **options), retries=retries), "s3://bucket/set/a.tar"
    return Storages(options, retries=retries), "s3://bucket/set/a.tar"


async def read(kind: str, *faults: str) -> bytes:
    with ScriptedServer(*faults) as server:
        storages, url = storages_of(kind, server.url)
        try:
            body = await storages.for_url(url).open_range(url, 1000, 300_000)
            return b"".join([bytes(chunk) async for chunk in body.pieces])
        finally:
            await storages.aclose()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["whole", "other", "short"])
async def test_wrong_bytes_are_never_given_out(kind: str, fault: str) -> None:
    """Fsspec asks for the size first, and does not show which range came."""
    if kind not in ("s3fs", "fsspec-http"):
        faults = [fault] * 20
    elif fault == "other":
        return
    else:
        faults = ["", *[fault] * 20]
    with pytest.raises(TransientStorageError):
        await read(kind, *faults)


@pytest.mark.parametrize("kind", ["s3", "http"])
async def test_a_part_of_what_nobody_knows_the_length_of_is_refused(kind: str) -> None:
    with pytest.raises(StorageError, match="how long the whole file is") as caught:
        await read(kind, *["open"] * 20)
    assert not isinstance(caught.value, TransientStorageError), "it would be asked for again"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_of_another_version_is_refused(kind: str) -> None:
    with ScriptedServer() as server:
        storages, url = storages_of(kind, server.url)
        retries = Retries()
        try:
            sound = await read_range(storages.for_url(url), url, 9, 99, pin=Pin(etag='"v1"'), retries=retries)
            assert sound == CONTENT[9:99]
            with pytest.raises(ShardChangedError, match='the version "old", and now has .* the version "v1"'):
                await read_range(storages.for_url(url), url, 9, 99, pin=Pin(etag='"old"'), retries=retries)
        finally:
            await storages.aclose()


@pytest.mark.parametrize("kind", ["http", "s3"])
async def test_an_object_that_is_only_too_short_is_not_said_to_be_another(kind: str) -> None:
    with FaultServer({"set/a.tar": b"abc", "bucket/set/a.tar": b"abc"}) as server:
        storages, url = storages_of(kind, server.url)

        async def ask() -> None:
            try:
                await storages.for_url(url).open_range(url, 3, 9)
            finally:
                await storages.aclose()

        with pytest.raises(ShardChangedError, match="ends before the bytes that were requested"):
            await ask()


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("404 NoSuchBucket", ShardNotFoundError, "no such bucket"),
        ("404 NoSuchKey", ShardNotFoundError, "no such shard"),
        ("403 AccessDenied", StorageError, "access is denied"),
        ("403 SignatureDoesNotMatch", StorageError, "SignatureDoesNotMatch.*that `key`, `secret`"),
        ("403 InvalidAccessKeyId", StorageError, "InvalidAccessKeyId.*belong to this endpoint"),
        ("400 AuthorizationHeaderMalformed", StorageError, "another region"),
        ("301 PermanentRedirect", StorageError, "another region"),
        ("400 ExpiredToken", TransientStorageError, "expired"),
        ("503 SlowDown", TransientStorageError, "fewer requests"),
        ("429 TooManyRequests", TransientStorageError, "fewer requests"),
        ("500 InternalError", TransientStorageError, "try again later"),
    ],
)
async def test_what_an_answer_means(fault: str, error: type[StorageError], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        await read("s3", *[fault] * 20)
    assert "told-secret" not in f"{caught.value!s} {caught.value.__cause__!s}"
    assert caught.value.url == "s3://bucket/set/a.tar"
    assert isinstance(caught.value, TransientStorageError) == (error is TransientStorageError)
    sent = pickle.loads(pickle.dumps(caught.value))
    if isinstance(sent, TransientStorageError):
        assert sent.throttled == ("fewer" in words)


async def test_expired_credentials_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    messages: list[str] = []
    make = object_storage.make_store

    def counted(root: str, options: object, *, retries: bool) -> object:
        made.append(root)
        return make(root, options, retries=retries)

    monkeypatch.setattr(object_storage, "make_store", counted)
    for faults, expected in ((["400 ExpiredToken"], CONTENT[:100]), (["400 ExpiredToken"] * 2, None)):
        made.clear()
        with ScriptedServer(*faults) as server:
            storages, url = storages_of("s3", server.url)
            content = bytearray()
            try:
                await download(storages.for_url(url), url, 0, 100, lambda _, piece: content.extend(piece), pin=Pin())
            except StorageError as exc:
                messages.append(exc.message)
            finally:
                await storages.aclose()
        assert bytes(content) == (expected or b"")
        assert len(made) == 2
    assert len(messages) == 1
    assert "the credentials have expired (400 ExpiredToken)" in messages[0]


async def versions(kind: str, *changed: str) -> list[str | None]:
    """The versions that a server without ETags gives at these times of change; all are held to the first."""
    found: list[str | None] = []
    pin = Pin()
    with ScriptedServer(etag="") as server:
        storages, url = storages_of(kind, server.url)
        try:
            for time in changed:
                server.changed = time
                await read_range(storages.for_url(url), url, 0, 10, pin=pin, retries=Retries())
                found.append(pin.etag)
        finally:
            await storages.aclose()
    assert not any("if-match" in request for request in server.requests)
    return found


@pytest.mark.parametrize("kind", ["s3", "http"])
async def test_without_an_etag_the_time_of_change_stands_for_it(kind: str) -> None:
    """Else the cache on the disk, what is kept of scans and the pin all take another object of equal size for it."""
    before, after = "Sat, 01 Jan 2022 00:00:00 GMT", "Sun, 02 Jan 2022 00:00:00 GMT"
    assert await versions(kind, before, before) == ['W/"61cf9980-7d000"'] * 2
    with pytest.raises(ShardChangedError, match="61cf9980.*61d0eb00"):
        await versions(kind, before, after)


@pytest.mark.parametrize(("kind", "said"), [(kind, said) for kind in ("s3", "http") for said in ("now", "")])
async def test_a_time_of_change_that_says_nothing_is_not_taken_for_a_version(kind: str, said: str) -> None:
    assert await versions(kind, formatdate(usegmt=True) if said == "now" else said) == [None]


SIGNED = "https://me:told-secret@h/a.tar?X-Amz-Signature=told-secret"


@pytest.mark.parametrize("error", [StorageError, ShardFormatError, SampleError, DatasetIndexError])
def test_no_error_shows_a_signature_or_a_password(error: type[StreamloadError]) -> None:
    raised = error("cannot be read", url=SIGNED)
    for shown in (str(raised), repr(raised), str(raised.url), str(pickle.loads(pickle.dumps(raised)))):
        assert "https://h/a.tar" in shown
        assert "told-secret" not in shown


def test_what_holds_keys_does_not_show_them() -> None:
    assert "told-secret" not in f"{object_options('s3', OPTIONS)} {Storages(OPTIONS)}"


def test_a_question_mark_is_a_pattern_in_buckets_and_a_query_on_the_web() -> None:
    assert locate("s3://bucket/a-00?.tar") == ("s3://bucket/", "a-00?.tar")
    assert locate("https://h/d/a%20b.tar?sig=b%2F") == ("https://h/?sig=b%2F", "d/a b.tar")


async def test_a_key_that_begins_with_a_slash_is_not_taken_for_the_one_without() -> None:
    storage = Storages(OPTIONS).for_url("s3://bucket//a.tar")
    with pytest.raises(StorageError, match="begins with a slash"):
        await storage.open_range("s3://bucket//a.tar", 0, 1)


async def replaced_in_between(storage: FilesystemStorage) -> None:
    """Two ranges of a file whose storage tells no version with its bytes; another one of its size comes in between."""
    url = "memory://replaced/a.tar"
    await asyncio.to_thread(storage.write, url, b"before")
    pin, retries = Pin(), Retries()
    await read_range(storage, url, 0, 3, pin=pin, retries=retries)
    await asyncio.to_thread(storage.write, url, b"behind")
    await read_range(storage, url, 3, 6, pin=pin, retries=retries)


async def test_a_replaced_file_is_noticed_where_answers_carry_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    await replaced_in_between(FilesystemStorage({}))  # within a moment
    monkeypatch.setattr(filesystem_storage, "LOOK_AGAIN_S", 0.0)
    with pytest.raises(ShardChangedError):
        await replaced_in_between(FilesystemStorage({}))

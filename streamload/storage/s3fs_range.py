"""A range of an object by s3fs, streamed and checked, which its own `cat_file` does not do."""

from __future__ import annotations

from collections.abc import AsyncIterator
from operator import methodcaller
from typing import Any

from streamload.errors import ShardChangedError, StorageError
from streamload.storage.errors import changed_error, transient_error
from streamload.storage.fsspec_errors import ReportsErrors
from streamload.storage.http_range import Wanted, covered_bytes, strong_etag
from streamload.storage.protocol import EmptyBody, RangeBody, quoted, same_etag
from streamload.text import counted

__all__ = ["open_s3fs_range"]

_CHUNK_BYTES = 256 << 10


async def open_s3fs_range(fs: Any, path: str, wanted: Wanted) -> RangeBody:
    """Request a range; see `Storage.open_range`.

    Args:
        fs: an asynchronous `S3FileSystem` of the running loop.
        path: the bucket and the key.
        wanted: the range.
    """
    bucket, key, version = fs.split_path(path)
    last = "" if wanted.end is None else wanted.end - 1
    options = {"VersionId": version} if version else {}
    if (strong := strong_etag(wanted.etag)) is not None:
        options["IfMatch"] = strong
    options |= {"Bucket": bucket, "Key": key, "Range": f"bytes={wanted.start}-{last}"}
    try:
        with ReportsErrors(wanted.url):
            answer = await methodcaller("_call_s3", "get_object", **options)(fs)
    except ShardChangedError:
        size_bytes, now = await _size_and_etag_now(fs, bucket, key)
        if size_bytes == wanted.start == 0 and same_etag(wanted.etag, now):
            return EmptyBody(now)
        if same_etag(wanted.etag, now):  # it is only shorter than the range
            raise
        raise changed_error(wanted.url, wanted.etag, now) from None
    body = answer["Body"]
    try:
        now = quoted(answer.get("ETag"))
        if not same_etag(wanted.etag, now):
            raise changed_error(wanted.url, wanted.etag, now)
        range_bytes, total_bytes = covered_bytes(wanted, answer.get("ContentRange"))
    except StorageError:
        body.close()
        raise
    return _S3Body(wanted.url, body, range_bytes, total_bytes, now)


async def _size_and_etag_now(fs: Any, bucket: str, key: str) -> tuple[int | None, str | None]:
    try:
        with ReportsErrors(key):
            found = await methodcaller("_call_s3", "head_object", Bucket=bucket, Key=key)(fs)
    except StorageError:
        return None, None
    return found.get("ContentLength"), quoted(found.get("ETag"))


class _S3Body:
    def __init__(self, url: str, body: Any, range_bytes: int, total_bytes: int, etag: str | None) -> None:
        self.total_bytes = total_bytes
        self.etag = etag
        self._url = url
        self._body = body
        self._range_bytes = range_bytes

    async def chunks(self) -> AsyncIterator[bytes]:
        left = self._range_bytes
        try:
            while left > 0:
                with ReportsErrors(self._url):
                    chunk = await self._body.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    break
                left -= len(chunk)
                yield chunk
        finally:
            await self.aclose()
        if left:
            raise transient_error(self._url, f"the answer ended {counted(left, 'byte')} early")

    async def aclose(self) -> None:
        self._body.close()

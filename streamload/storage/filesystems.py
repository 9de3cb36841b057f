"""The fsspec filesystem of a url: found by the url or given by the user, and opened for the running loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import methodcaller
from typing import Any

from streamload.errors import StorageError, without_secrets
from streamload.storage.errors import transient_error
from streamload.storage.fsspec_errors import ReportsErrors
from streamload.storage.options import filesystem_options
from streamload.storage.protocol import protocol_of
from streamload.storage.urls import chain_links


@dataclass(frozen=True, slots=True)
class OpenFilesystem:
    """A filesystem, and the mapping between its paths and our urls.

    Attributes:
        fs: the filesystem.
        before: what stands before a path in a url, such as `dir::s3://`.
        after: what stands behind it, as the archive in `zip://a.tar::s3://bucket/a.zip`.
        drops_slash: whether urls leave out the slash that paths begin with.
        is_async: whether its methods can be awaited on the running loop.
    """

    fs: Any
    before: str
    after: str
    drops_slash: bool
    is_async: bool

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Call one of fsspec's methods: on the loop where the filesystem can, else on a thread.

        Args:
            method: its name.
            args: its arguments.
            timeout_s: how long it may take on the loop; a call on a thread cannot be interrupted.
            options: its keyword arguments.

        Raises:
            TransientStorageError: it took longer.
        """
        if not self.is_async:
            return await asyncio.to_thread(getattr(self.fs, method), *args, **options)
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await getattr(self.fs, f"_{method}")(*args, **options)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise transient_error(self.url(str(args[0])), f"no answer within {timeout_s:g} s") from None

    def url(self, path: str) -> str:
        """The url of a path."""
        if "://" in path:  # as paths on web servers are
            chain, link, _ = self.before.rpartition("::")
            return f"{chain}{link}{path}{self.after}"
        path = path.rstrip("/")
        return f"{self.before}{path.lstrip('/') if self.drops_slash else path}{self.after}"

    async def aclose(self) -> None:
        """Close the connections of an asynchronous filesystem."""
        session = getattr(self.fs, "_session", None) or getattr(self.fs, "_s3", None)
        if self.is_async and session is not None:
            with contextlib.suppress(RuntimeError):  # of a loop that is closed already
                await session.close()


def open_filesystem(url: str, options: Mapping[str, Any], filesystem: Any) -> tuple[OpenFilesystem, str]:
    """Open the filesystem of a url, for the running loop if it is asynchronous.

    Args:
        url: the url, or a path of `filesystem`.
        options: `storage_options` as the user gave them.
        filesystem: what the user gave to read with; None to find it by the url.

    Returns:
        The filesystem, and the url's path in it.

    Raises:
        StorageError: the package for this protocol is missing, or its server cannot be reached or refuses: some
            filesystems connect when they are made.
        ValueError: the filesystem does not take these options.
    """
    try:
        with ReportsErrors(url, passing=(ImportError, ValueError, FileNotFoundError)):
            fs, path, is_async = _opened(url, options, filesystem)
    except ImportError as exc:
        raise StorageError(f"this storage needs a package that is not there: {exc}", url=without_secrets(url)) from exc
    except FileNotFoundError:
        raise StorageError(
            "this storage cannot be opened: a file that it needs is not there; check storage_options",
            url=without_secrets(url),
        ) from None
    except TypeError as exc:
        raise ValueError(f"storage_options do not fit {protocol_of(url)}://: {exc}") from None
    before, body, after = _pieces(url)
    head, drops_slash = _head(body.rstrip("/"), path.rstrip("/"))
    return OpenFilesystem(fs, before + head, after, drops_slash, is_async), path


def _opened(url: str, options: Mapping[str, Any], filesystem: Any) -> tuple[Any, str, bool]:
    """The filesystem, the url's path in it, and whether it is asynchronous."""
    import fsspec

    if filesystem is not None:
        fs, is_async = _on_loop(filesystem)
        return fs, path_in(fs, url), is_async
    if len(chain_links(url)) > 1:
        fs, path = fsspec.url_to_fs(url, **options)
        return fs, path, False
    protocol = protocol_of(url)
    made_by = fsspec.get_filesystem_class(protocol)
    settings = methodcaller("_get_kwargs_from_urls", url)(made_by) | filesystem_options(protocol, options)
    if made_by.async_impl:
        settings |= {"asynchronous": True, "skip_instance_cache": True}
    return made_by(**settings), path_in(made_by, url), made_by.async_impl


def path_in(filesystem: Any, url: str) -> str:
    """The path of a url as its filesystem, or the class of it, takes it."""
    return str(methodcaller("_strip_protocol", url)(filesystem))


def layers(filesystem: Any) -> Iterator[Any]:
    """A filesystem, if there is one, and those of fsspec that it wraps; one of pyarrow's is no layer."""
    while hasattr(filesystem, "protocol"):
        yield filesystem
        filesystem = getattr(filesystem, "fs", None)


def _on_loop(filesystem: Any) -> tuple[Any, bool]:
    """The user's filesystem, or one like it for the running loop where it can be had."""
    if not filesystem.async_impl or hasattr(filesystem, "fs"):  # one that wraps another is called on a thread
        return filesystem, False
    options = filesystem.storage_options
    if hasattr(filesystem, "_call_s3"):
        options = filesystem_options("s3", options)
    options = {**options, "asynchronous": True, "skip_instance_cache": True}
    return type(filesystem)(*filesystem.storage_args, **options), True


def _pieces(url: str) -> tuple[str, str, str]:
    """A url as what stands before its path, the path, and what stands behind it."""
    segments = chain_links(url)
    first = next((number for number, segment in enumerate(segments) if "://" in segment), None)
    if first is None:
        return "", url, ""
    protocol, body = segments[first].split("://", 1)
    before = "::".join([*segments[:first], f"{protocol}://"])
    return before, body, "".join(f"::{segment}" for segment in segments[first + 1 :])


def _head(body: str, path: str) -> tuple[str, bool]:
    """The part of a url that is not in the filesystem's path, such as the host of `sftp://host/path`.

    Returns:
        The part, and whether the path begins with a slash that the url does not have.
    """
    for tail, drops_slash in ((path, False), (path.lstrip("/"), True)):
        if body.endswith(tail):
            return body[: len(body) - len(tail)], drops_slash
    return "", False

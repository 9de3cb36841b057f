"""Define the values that all storages share: urls, versions and patterns."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from glob import escape
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import urlsplit

from streamload.errors import StorageError

if TYPE_CHECKING:
    from streamload.storage.filesystem_storage import FilesystemStorage
    from streamload.storage.local_files import LocalStorage
    from streamload.storage.object_storage import ObjectStorage

UNKNOWN_BYTES = -1  # stands for a size that only a request would tell

_GLOB = re.compile(r"[*?\[]")
_IPV6_HOST = re.compile(r"://(?:[^/]*@)?\[[^\[\]/]*\]")
_PROTOCOL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class ShardInfo(NamedTuple):
    """A shard's url (an absolute path if it is local), size (or `UNKNOWN_BYTES`), time and version.

    Attributes:
        mtime_ns: Unix time in nanoseconds; 0 if unknown.
        etag: None for local files, or if the storage has none.
    """

    url: str
    bytes: int
    mtime_ns: int
    etag: str | None = None


async def one_piece(content: bytes) -> AsyncGenerator[bytes, None]:
    """Yield bytes as the only piece of a `RangeBody`."""
    if content:
        yield content


@dataclass(slots=True)
class RangeBody:
    """The answer to a request for a range, in flight. Read it to the end or close it.

    Attributes:
        total_bytes: the size of the whole object.
        etag: its version, or None.
        pieces: yields the bytes; an empty piece shows that the request is alive. Raises TransientStorageError if the
            body breaks off; the caller checks its length.
    """

    total_bytes: int
    etag: str | None
    pieces: AsyncGenerator[bytes, None]

    async def aclose(self) -> None:
        """Abandon the rest and drop the connection. Idempotent."""
        await self.pieces.aclose()


# Every storage has these methods; failures of requests are StorageErrors with the url.
# - info(url): size and version of a shard, or ShardNotFoundError.
# - absolute(url): the url, made independent of the working directory.
# - list(pattern, folders=): files (or folders) by a glob of `*`, `?`, `[...]`, sorted by url. `**` as a whole component
#   matches any number of folders, even none. Only components that begin with a dot match names that begin with a dot.
# - is_folder(url): True if something lies below the url.
# - read_bytes(url, most_bytes=): a small file whole; a larger one is an error.
# - open_range(url, start, end): the bytes from `start` to `end` (exclusive; None for the rest; cut at the object's
#   end), and the version. The caller checks the version and the number of bytes. ShardChangedError if the object ends
#   at or before `start` (but an empty object gives an empty range at 0). TransientStorageError if a retry may succeed.
# - write(url, source): a file whole or not at all, from bytes or from a local file given by its path.
# - delete(url): a missing file is not an error.
# - aclose(): close the connections that the running loop has opened; later reads open new ones.
Storage: TypeAlias = "LocalStorage | ObjectStorage | FilesystemStorage"


# -- urls ----------------------------------------------------------------------------------------------------------

WEB = ("http", "https")
FAMILY = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az", "adl": "az"}
"""The kind of object store by protocol; fsspec handles all other remote protocols."""

FAMILY |= dict.fromkeys(WEB, "http")


def protocol_of(url: str) -> str:
    """Return the lower-cased protocol of a url, `file` for a path."""
    match = _PROTOCOL.match(url)
    return match[1].lower() if match else "file"


def place_of(url: str) -> str:
    """Return protocol and host (or bucket) of a url."""
    return "/".join(url.split("/", 3)[:3])


# -- filesystems of fsspec --------------------------------------------------------------------------------------------


def layers(filesystem: Any) -> Iterator[Any]:
    """Yield a filesystem of fsspec and the filesystems that it wraps; nothing for None."""
    while hasattr(filesystem, "protocol"):
        yield filesystem
        filesystem = getattr(filesystem, "fs", None)


def protocols_of(filesystem: Any) -> frozenset[str]:
    """Return the protocols of a filesystem, in lower case."""
    protocol = filesystem.protocol
    return frozenset(name.lower() for name in ([protocol] if isinstance(protocol, str) else protocol))


# -- versions ------------------------------------------------------------------------------------------------------


def quoted(etag: str | None) -> str | None:
    """Return an ETag with its quotes, which some servers leave out."""
    return etag if etag is None or etag.startswith(('"', "W/")) else f'"{etag}"'


def same_etag(one: str | None, other: str | None) -> bool:
    """Return True if two ETags may name the same version. None matches any ETag; quotes and weakness are ignored."""
    bare = {etag.removeprefix("W/").strip('"') for etag in (one, other) if etag is not None}
    return len(bare) <= 1


# -- patterns ------------------------------------------------------------------------------------------------------

ANY_FOLDERS = "**"
"""As a whole component, this matches any number of folders; within a component it means `*`."""

_DEEPEST = 32


class Entry(NamedTuple):
    """A file or folder: the path as the storage writes it, and the storage's own metadata."""

    path: str
    is_folder: bool
    known: Any = None


def is_pattern(url: str) -> bool:
    """Return True if a url holds `*`, `?` or `[`; in an http url only a `*` in the path counts."""
    if url.startswith(("http://", "https://")):
        return "*" in url and "*" in urlsplit(url).path
    return _GLOB.search(_IPV6_HOST.sub("", url)) is not None


def escaped(url: str) -> str:
    """Return the pattern that matches only this url."""
    host = _IPV6_HOST.search(url)
    return escape(url) if host is None else url[: host.end()] + escape(url[host.end() :])


def _split_pattern(path: str) -> tuple[str, list[str]]:
    """Split a pattern into the folder before the first glob and the remaining components, at least one."""
    components = path.split("/")
    first = next((number for number, each in enumerate(components) if is_pattern(each)), len(components) - 1)
    steps: list[str] = []
    for component in filter(None, components[first:]):
        if component != ANY_FOLDERS or steps[-1:] != [ANY_FOLDERS]:
            steps.append(component)
    if not steps or steps[-1] == ANY_FOLDERS:
        steps.append("*")
    return "/".join(components[:first]), steps


def find_entries(
    pattern: str, level: Callable[[str], Iterable[Entry]], *, folders: bool, root: str = ""
) -> list[Entry]:
    """Return the files (or the folders) whose paths match a pattern, each once, sorted.

    `level` lists a folder; it returns nothing for a missing folder. `root` is the path of the outermost folder.
    """
    start, steps = _split_pattern(pattern)
    last = len(steps) - 1
    fits = [re.compile(("" if step.startswith(".") else r"(?!\.)") + translate(step)).match for step in steps]

    def walk(folder: str, at: set[int], depth: int) -> Iterator[Entry]:
        """Yield the matches below a folder; names in it can match a step in `at`, or the step after a `**` in `at`."""
        if depth > _DEEPEST:
            raise StorageError(
                f"more than {_DEEPEST} folders are nested here, so a link probably leads back to its own folder; "
                "name the folders without `**`",
                url=folder,
            )
        if len(at) == 1 and not is_pattern(step := steps[min(at)]) and min(at) + 1 < len(steps):  # needs no listing
            yield from walk(f"{folder}/{step}" if folder else step, {min(at) + 1}, depth)
            return
        any_folders = {number for number in at if steps[number] == ANY_FOLDERS}
        names = at - any_folders | {number + 1 for number in any_folders}
        for entry in level(folder):
            name = entry.path.rstrip("/").rpartition("/")[2]
            if entry.is_folder == folders and last in names and fits[last](name):
                yield entry
            if entry.is_folder:
                after = {number + 1 for number in names - {last} if fits[number](name)}
                if after := after | (set() if name.startswith(".") else any_folders):
                    yield from walk(entry.path, after, depth + 1)

    return sorted(walk(start or root, {0}, 0), key=itemgetter(0))

"""Parse the names of shards, and mark folders with incomplete sets of shards.

The mark is written before the first shard of a set and removed after the last. Without it, a folder whose writer was
killed could be read as a complete dataset.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from urllib.parse import unquote

from streamload.errors import DatasetIndexError, ShardNotFoundError, without_secrets
from streamload.storage.protocol import WEB, Storage, protocol_of

_SHARD = re.compile(r"\.(?:tar|tar\.(?:gz|bz2|xz|zst|zstd)|tgz|tbz2?|txz|tzst)\Z", re.IGNORECASE)
_UNKNOWN_COMPRESSION = re.compile(r"\.(?:tar\.(?:z|lz|lz4|lzo|lzma|lrz|br|sz|7z|zip|rar)|taz|tlz)\Z", re.IGNORECASE)


def folder_and_name(url: str) -> tuple[str, str]:
    """Split a shard's url into its folder and its name in an index."""
    web = ("%" in url or "?" in url) and protocol_of(url) in WEB
    folder, _, name = (url.split("?", 1)[0] if web else url).rpartition("/")
    return folder or "/", unquote(name) if web else name


def shard_name(url: str) -> str:
    """Return a shard's name in an index."""
    return folder_and_name(url)[1]


def is_shard_name(name: str) -> bool:
    """Return True for names of tar archives, compressed or not."""
    return name.endswith(".tar") or _SHARD.search(name) is not None


def refuse_unknown_compression(url: str) -> None:
    """Raise ValueError for an unsupported compression."""
    if not url.endswith(".tar") and _UNKNOWN_COMPRESSION.search(url):
        raise ValueError(
            f"urls names {without_secrets(url)!r}, but shards compressed this way are not supported; decompress them, "
            "or use gz, zst, xz or bz2"
        )


# The only places at which `normpath` changes an absolute path.
_UNTIDY = re.compile(r"//|/\.|/\Z")


def refuse_repetitions(urls: Sequence[str]) -> None:
    """Raise ValueError if a shard is named twice."""
    paths = [os.path.normpath(url) if url.startswith("/") and _UNTIDY.search(url) else url for url in urls]
    if len(set(paths)) == len(paths):
        return
    path = next(path for path, number in Counter(paths).items() if number > 1)
    raise ValueError(
        f"urls names the shard {without_secrets(path)!r} twice, which would give each of its samples twice; "
        "remove one of them (to see samples more often, iterate more often)"
    )


_NUMBER = re.compile(r"%0?(\d*)d")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class ShardNaming:
    """A form such as `shard-%06d.tar`, with at least `digits` digits; None stands for any text, as in `*.tar`."""

    before: str
    digits: int | None
    after: str

    def name(self, number: int) -> str:
        """Return a shard's name by its number."""
        return f"{self.before}{number:0{self.digits}d}{self.after}"

    def matches(self, name: str) -> bool:
        """Return True if a name has this form."""
        number = name[len(self.before) : len(name) - len(self.after)]
        if name != f"{self.before}{number}{self.after}":
            return False
        if self.digits is None:
            return not name.startswith(".")
        return len(number) >= max(1, self.digits) and number.isascii() and number.isdigit()


def destination_of(pattern_or_folder: str | os.PathLike[str], prefix: str) -> tuple[str, ShardNaming]:
    """Return a writer's folder and names: from a path with one `%06d` and `.tar`, or from a folder and a prefix.

    Raises:
        TypeError, ValueError: the pattern is hidden or does not have exactly one number, or the prefix is not a visible
            name.
    """
    path = os.fspath(pattern_or_folder) if isinstance(pattern_or_folder, str | os.PathLike) else None
    if not isinstance(path, str) or not path:
        raise TypeError(f"pattern_or_folder must be a non-empty string or path, not {pattern_or_folder!r}")
    folder, name = os.path.split(path)
    if not name.endswith(".tar"):
        if not prefix or prefix.startswith(".") or "/" in prefix or _CONTROL.search(prefix):
            raise ValueError(f"prefix must be a visible file name without '/', not {prefix!r}")
        return path, ShardNaming(f"{prefix}-", 6, ".tar")
    numbers = list(_NUMBER.finditer(name))
    if len(numbers) != 1 or name.startswith("."):
        raise ValueError(
            f"pattern_or_folder is {path!r}; a pattern needs exactly one %06d for the shard's number, "
            "as in 'out/train-%06d.tar', and must not be hidden"
        )
    number = numbers[0]
    return folder or ".", ShardNaming(name[: number.start()], int(number[1] or 0), name[number.end() :])


SHARDIFY, SHARD_WRITER = "shardify", "ShardWriter"

PACKING_FOLDER = ".streamload-packing"
"""Folder in a destination for the records of an unfinished packing run."""

_FILE = ".streamload-unfinished.json"
_MOST_MARK_BYTES = 1 << 20
_ADVICE = {
    SHARDIFY: "a `shardify` or `streamload map` (a call: `pack` or `map_shards`) into this folder was interrupted, or "
    "is still at work; run it again with --resume (resume=True) to go on, or with --overwrite (overwrite=True) to "
    "start over",
    SHARD_WRITER: "a ShardWriter was interrupted, or is still at work; write them again with overwrite=True, or remove "
    "the folder",
}


@dataclass(frozen=True, slots=True)
class UnfinishedSet:
    """An incomplete set of shards: their names, and `SHARDIFY` or `SHARD_WRITER`."""

    shards: ShardNaming
    writer: str


def read_mark(storage: Storage, folder: str) -> Sequence[UnfinishedSet]:
    """Return the unfinished sets in a folder or url.

    Raises:
        DatasetIndexError: the mark is damaged.
        StorageError: the storage cannot be read.
    """
    url = f"{folder.rstrip('/')}/{_FILE}"
    content = read_if_there(storage, url, _MOST_MARK_BYTES)
    if content is None:
        return ()
    try:
        return [UnfinishedSet(ShardNaming(**entry["shards"]), str(entry["writer"])) for entry in json.loads(content)]
    except (ValueError, TypeError, LookupError, RecursionError) as exc:
        raise DatasetIndexError(
            "this mark of an interrupted writer is damaged; write the shards again, or remove it if they are complete",
            url=url,
        ) from exc


def write_mark(storage: Storage, folder: str, shards: ShardNaming, writer: str | None) -> None:
    """Mark a set as incomplete before `writer` changes it, or as complete if `writer` is None. Idempotent.

    Raises:
        StorageError: the mark cannot be read or written.
        DatasetIndexError: an existing mark is damaged.
    """
    with locked_folder(folder):
        before, url = read_mark(storage, folder), f"{folder.rstrip('/')}/{_FILE}"
        sets = [each for each in before if each.shards != shards]
        if writer is not None:
            sets.append(UnfinishedSet(shards, writer))
        if sets:
            storage.write(url, json.dumps([asdict(each) for each in sets]).encode("ascii"))
        elif before:
            storage.delete(url)


def unfinished_error(unfinished: UnfinishedSet, folder: str) -> DatasetIndexError:
    """Return the error for reading an unfinished set."""
    advice = _ADVICE.get(unfinished.writer, "its writer was interrupted, or is still at work; write them again")
    return DatasetIndexError(
        f"the shards in this folder are not complete: {advice}. (To read what is there all the same, remove "
        f"{_FILE} from it)",
        url=folder,
    )


def read_if_there(storage: Storage, url: str, most_bytes: int) -> bytes | None:
    """Read a small file; None if it does not exist, or is the page that some web servers send in its place.

    Raises StorageError if it cannot be read.
    """
    try:
        content = storage.read_bytes(url, most_bytes=most_bytes)
    except ShardNotFoundError:
        return None
    return None if content[:100].lstrip()[:1] == b"<" else content


@contextmanager
def locked_folder(folder: str) -> Iterator[None]:
    """Exclude other writers of a folder, if it is local and its file system has locks."""
    descriptor = -1
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)

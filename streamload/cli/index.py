"""`streamload index`: the index of existing shards. All of them are read before anything is written."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, BinaryIO

import typer

from streamload.cli.arguments import Json, Ray, RecordSize, StorageOption, Urls, Workers, parse_storage_options
from streamload.cli.columns import MetadataColumns
from streamload.cli.verify import missing_names, warn_of_missing_end
from streamload.errors import StorageError, without_secrets
from streamload.index.dataset_index import INDEX_FOLDER, IndexedShard
from streamload.index.index_writer import IndexFolder, update_index
from streamload.index.listing import IndexLookup, find_shards
from streamload.index.shard_names import WEB, folder_and_name
from streamload.index.streamed_table import ReadShard
from streamload.index.table_file import pack_table
from streamload.pack.failures import UsageError, reported_errors
from streamload.pack.output import print_document, print_line, say
from streamload.pack.progress import open_progress
from streamload.pack.ray_pool import open_pool
from streamload.pack.reading import Reader
from streamload.storage.protocol import protocol_of
from streamload.storage.storages import Storages
from streamload.tar.header_chain import LINK, RECORD_BYTES
from streamload.text import counted
from streamload.workers.launchers import available_processors


def index_command(
    urls: Urls,
    *,
    output: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The folder for the index, local or remote. Default: beside the shards."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMNS",
            help="Metadata to select samples by, as SOURCE:NAME,...: of a field with JSON (json:aesthetic), or of a "
            "file beside each shard (csv:width, parquet:similarity).",
        ),
    ] = None,
    record_size: RecordSize = RECORD_BYTES,
    as_document: Json = False,
    workers: Workers = None,
    ray: Ray = None,
    storage_option: StorageOption = None,
) -> None:
    """Read shards once and write their index, so that loaders start at once and know their length.

    Shards may be compressed. If a shard is damaged, the index is left unchanged.

    Examples:
      streamload index shards/train
      streamload index s3://bucket/photos --output indexes/photos
      streamload index shards --columns json:aesthetic,parquet:similarity
      streamload index s3://bucket/photos --ray auto
    """
    with reported_errors("the index is as it was, or complete"), open_pool(ray, workers) as pool:
        options = parse_storage_options(storage_option)
        wanted = None if columns is None else MetadataColumns.parse(columns)
        storages = Storages(options)
        shards = find_shards(urls, storages)
        with open_progress("indexing", len(shards), "shards") as progress:
            reader = Reader(storages, workers or available_processors(), pool, record_size)
            found = _index_shards(shards, output, reader, progress.advance)
        if not as_document:
            print_line(f"indexed {counted(len(shards), 'shard')}, {counted(found.samples, 'sample')}")
        for folder, inside in _by_index(shards, output).items() if wanted is not None else ():
            assert wanted is not None
            wanted.write(IndexFolder(storages.for_url(folder), folder), inside, options or {}, pool)
        if found.gone:
            say(
                f"note: dropped {counted(len(found.gone), 'shard')} from the index, such as {found.gone[0]!r}, "
                "because there is no such file"
            )
        if found.links:
            say(
                f"warning: skipped {counted(found.links, 'link')}, which have no content; if they belong to samples, "
                "write the shards with `tar --hard-dereference -h`"
            )
        if as_document:
            counts = {"shards": len(shards), "samples": found.samples, "skipped_links": found.links}
            print_document(counts | {"dropped": found.gone})


@dataclass(frozen=True, slots=True)
class _Indexed:
    """What was indexed.

    Attributes:
        samples: number of samples.
        links: number of hard and symbolic links, which were skipped.
        gone: shards that were dropped from the index, since they no longer exist.
    """

    samples: int
    links: int
    gone: tuple[str, ...]


def _index_shards(
    urls: Sequence[str],
    output: str | None,
    reader: Reader,
    advance: Callable[[int, int], None],
) -> _Indexed:
    """Read shards and write their index; after an error the index is unchanged.

    Args:
        urls: the shards.
        output: the folder of the index; None is `.streamload` beside the shards of each folder.
        reader: reads them, with the storages of the shards and the index.
        advance: called with numbers of shards and bytes as they are read.

    Raises:
        UsageError: two shards of one index have the same name, or the index would be on a web server.
        StorageError: a shard cannot be read, or the index cannot be written.
        ShardFormatError: a shard is damaged.
    """
    by_folder, storages = _by_index(urls, output), reader.storages
    for folder, inside in by_folder.items():
        _check(folder, inside)
    with tempfile.TemporaryFile(prefix=".streamload-") as file:
        spool = _Spool(file)
        for url, read in reader.each(urls, Reader.read, advance):
            spool.add(url, read)
        lookup, gone = IndexLookup(None, storages), []
        for folder, inside in by_folder.items():
            dropped = [] if output else missing_names(folder_and_name(inside[0])[0], lookup, storages)
            spool.write(folder, inside, storages, dropped)
            gone += dropped
    return _Indexed(spool.samples, spool.links, tuple(gone))


def _by_index(urls: Sequence[str], output: str | None) -> dict[str, list[str]]:
    """The shards of each index, by its folder."""
    by_folder: dict[str, list[str]] = {}
    for url in urls:
        by_folder.setdefault(output or f"{folder_and_name(url)[0]}/{INDEX_FOLDER}", []).append(url)
    return by_folder


def _check(folder: str, urls: Sequence[str]) -> None:
    if protocol_of(folder) in WEB:
        raise UsageError(
            f"no index can be written beside the shards in {without_secrets(folder)!r}, which is a web server; "
            "name a folder for it with --output"
        )
    names = [folder_and_name(url)[1] for url in urls]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise UsageError(f"several shards are named {twice[0]!r}; index their folders separately")


class _Spool:
    """Tables for an index, in an unnamed file, since those of many shards may not fit in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.samples = self.links = 0
        self._file = file
        self._entries: dict[str, IndexedShard] = {}
        self._fields: dict[str, tuple[str, ...]] = {}
        self._places: dict[str, tuple[int, int]] = {}

    def add(self, url: str, read: ReadShard) -> None:
        """Add a shard."""
        packed = pack_table(read.table)
        self._places[url] = self._file.tell(), len(packed)
        self._file.write(packed)
        name = folder_and_name(url)[1]
        self._entries[url] = IndexedShard.of(name, read.table, read.mtime_ns, read.etag, size=read.bytes)
        self._fields[url] = read.table.fields
        self.samples += len(read.table)
        self.links += read.table.skipped.get(LINK, 0)
        warn_of_missing_end(url, read.table)

    def write(self, folder: str, urls: Sequence[str], storages: Storages, gone: Sequence[str]) -> None:
        """Write one index without the entries of shards that are gone; `index.json` comes last."""
        entries = [self._entries[url] for url in urls]
        fields = {name for url in urls for name in self._fields[url]}
        url_of = {entry.name: url for entry, url in zip(entries, urls, strict=True)}
        update_index(
            IndexFolder(storages.for_url(folder), folder),
            entries,
            fields,
            lambda name: self._content(url_of[name]),
            gone=set(gone).__contains__,
        )

    def _content(self, url: str) -> bytes:
        start, size = self._places[url]
        self._file.seek(start)
        content = self._file.read(size)
        if len(content) != size:
            raise StorageError("a temporary file is truncated; make room in the folder for temporary files")
        return content

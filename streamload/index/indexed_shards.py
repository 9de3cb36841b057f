"""The entries of an index, one for each shard, kept by columns: an entry is made when somebody looks at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from streamload.tar.decompression import is_compressed
from streamload.tar.table import ShardTable


class TablePlace(NamedTuple):
    """Where the table of a shard lies.

    Attributes:
        file: the file's name in the index's folder.
        start: offset of the table's first byte in it.
        bytes: its length.
        crc32: its checksum.
    """

    file: str
    start: int
    bytes: int
    crc32: int


class IndexedShard(NamedTuple):
    """The entry of one shard.

    Attributes:
        name: the file's name, without a folder.
        bytes: its size; that of the compressed file where it is one, and its table says how long the archive is.
        samples: how many samples it holds.
        mtime_ns: when it was last changed, in nanoseconds since 1970; None where that was not recorded.
        etag: its version in the storage it was indexed in; None where that has none, or it was not recorded.
        table: where its table lies; None for an entry that is yet to be written.
    """

    name: str
    bytes: int
    samples: int
    mtime_ns: int | None
    etag: str | None = None
    table: TablePlace | None = None

    @classmethod
    def of(
        cls,
        name: str,
        table: ShardTable,
        mtime_ns: int | None = None,
        etag: str | None = None,
        *,
        size: int | None = None,
    ) -> IndexedShard:
        """The entry of a shard with this table; `size` is that of its file where it is compressed."""
        return cls(name, table.shard_bytes if size is None else size, len(table), mtime_ns, etag)

    def describes(self, table: ShardTable) -> bool:
        """Whether a table can be that of this shard."""
        return len(table) == self.samples and (is_compressed(self.name) or table.shard_bytes == self.bytes)


@dataclass(frozen=True, slots=True)
class IndexedShards(Sequence[IndexedShard]):
    """A sequence of entries, all of which have the place of a table.

    There may be hundreds of thousands, most of which a process never looks at.

    Attributes:
        names: as `IndexedShard.name`, of each; and so on.
        files: as `TablePlace.file`, of each; and so on.
    """

    names: Sequence[str]
    sizes: Sequence[int]
    samples: Sequence[int]
    mtimes_ns: Sequence[int | None]
    etags: Sequence[str | None]
    files: Sequence[str]
    starts: Sequence[int]
    table_sizes: Sequence[int]
    crc32s: Sequence[int]

    @classmethod
    def of(cls, entries: Iterable[IndexedShard]) -> IndexedShards:
        """Some entries with the places of their tables."""
        rows = [(*entry[:5], *entry.table) for entry in entries if entry.table is not None]
        return cls(*([*column] for column in zip(*rows, strict=True))) if rows else cls(*([] for _ in range(9)))

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, number: int) -> IndexedShard: ...
    @overload
    def __getitem__(self, number: slice) -> list[IndexedShard]: ...
    def __getitem__(self, number: int | slice) -> IndexedShard | list[IndexedShard]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return IndexedShard(
            self.names[number],
            self.sizes[number],
            self.samples[number],
            self.mtimes_ns[number],
            self.etags[number],
            self.place(number),
        )

    def __iter__(self) -> Iterator[IndexedShard]:
        return (self[number] for number in range(len(self)))

    def place(self, number: int) -> TablePlace:
        """Where the table of one lies."""
        return TablePlace(self.files[number], self.starts[number], self.table_sizes[number], self.crc32s[number])

"""The fetched shards that are known, and how many of them may be open at once: each takes a descriptor or two."""

from __future__ import annotations

from collections import Counter

from streamload.errors import StorageError
from streamload.fetch.fetched_shard import FetchedShard
from streamload.fetch.parts import shard_and_number
from streamload.fetch.window import PartWindow
from streamload.index.listing import Listing
from streamload.limits import CACHED_SHARDS_SHARE, FETCHED_SHARDS_SHARE
from streamload.memory.unnamed import descriptor_limit
from streamload.storage.download import Pin
from streamload.tar.decompression import compression_of

__all__ = ["FetchedShards"]


class FetchedShards:
    """Shards by number, from the first time that anything is needed of them until they are closed.

    A shard that is finished with is *kept* as long as some of it is there, since the next epoch may use that.

    Args:
        listing: the shards.
        most_open: how many may be open at once; by default a sixth of what this process may have open.
        cached: they may lie in the disk cache, so half as many may be open.
    """

    def __init__(self, listing: Listing, most_open: int | None = None, *, cached: bool = False) -> None:
        self._share = CACHED_SHARDS_SHARE if cached else FETCHED_SHARDS_SHARE
        self.most_open = max(1, descriptor_limit() // self._share) if most_open is None else most_open
        self._listing = listing
        self._states: dict[int, FetchedShard] = {}
        self._pins: dict[int, Pin] = {}
        self._open: dict[int, None] = {}
        self._finished: dict[int, None] = {}
        self._generations = 0
        self._closed: list[int] = []
        self._moved: list[int] = []

    def __contains__(self, shard: int) -> bool:
        return shard in self._states

    def __getitem__(self, shard: int) -> FetchedShard:
        """A shard; made if it is not known."""
        state = self._states.get(shard)
        if state is None:
            listed = self._listing.shard(shard)
            compression = compression_of(listed.url)
            # It outlives the shard's memory: where samples lie was found in the version that was read first.
            pin = self._pins.setdefault(shard, self._listing.pin(shard))
            total_bytes = None if compression is not None else pin.total_bytes
            state = FetchedShard(shard, listed.url, pin, compression, self.new_generation(), total_bytes)
            self._states[shard] = state
        return state

    def in_memory(self) -> list[FetchedShard]:
        """The open shards of which something is in memory."""
        return [self._states[shard] for shard in self._open if self._states[shard].memory is not None]

    def moved(self, shard: int) -> int:
        """A shard moves from its memory to a file; the file's generation."""
        self._moved.append(shard)
        return self.new_generation()

    def new_generation(self) -> int:
        """A number that no memory of a shard has had."""
        self._generations += 1
        return self._generations

    def opened(self, shard: int) -> None:
        """Some of it is in flight, so it is open now, and not finished with."""
        self._open[shard] = None
        self._finished.pop(shard, None)

    def to_close(self, shard: int, window: PartWindow) -> list[int] | None:
        """What to `release` so that a shard may be open: one of which nothing is needed, or that is needed last.

        Args:
            shard: the shard, of which a part is fetched next.
            window: knows who needs what of the others.

        Returns:
            The numbers of shards; None where none can be closed.
        """
        if shard in self._open or len(self._open) < self.most_open:
            return []
        if window.shards_present < len(self._open):
            return [next(each for each in self._open if not window.parts_of(each))]
        evictable: Counter[int] = Counter()
        for key in window.evictable():
            other = shard_and_number(key)[0]
            evictable[other] += 1
            if evictable[other] == len(window.parts_of(other)):
                return [other]
        return None

    def release(self, shard: int) -> None:
        """Let go of a shard's memory, of which nothing is there any more; what its answers said of it stays known."""
        self._states[shard].release(self.new_generation())
        self._open.pop(shard, None)
        self._closed.append(shard)

    def finish(self, shard: int) -> None:
        """Nothing of it will be wanted soon."""
        if shard in self._states:
            self._finished.pop(shard, None)
            self._finished[shard] = None

    def take_if_finished(self, shard: int) -> FetchedShard | None:
        """Forget a shard that is finished with, for whoever closes it; None for any other."""
        if shard not in self._finished:
            return None
        del self._finished[shard]
        self._open.pop(shard, None)
        self._closed.append(shard)
        return self._states.pop(shard)

    def take_closed(self) -> list[int]:
        """The shards whose memory was released since the last call, and that have no other one now, or a file."""
        closed, self._closed = self._closed, []
        moved, self._moved = self._moved, []
        return [*moved, *(shard for shard in closed if shard not in self._open)]

    def close(self) -> None:
        """Let go of all memory."""
        while self._states:
            self._states.popitem()[1].close()
        self._open.clear()

    def too_many(self) -> StorageError:
        """The error to raise where no shard can be closed, and another one is needed."""
        limit = descriptor_limit()
        return StorageError(
            f"more than {self.most_open} shards are needed at once, because samples in them are yet to be drawn within "
            f"shuffle_window, and this process may have only {limit} files open. Raise that limit (`ulimit -n "
            f"{self._share * limit}`, before the program is started), give a smaller shuffle_window, or pack "
            "fewer and larger shards"
        )

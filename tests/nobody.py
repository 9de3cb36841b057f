"""For whom a bringer can bring parts that nobody waits for."""

from __future__ import annotations

from streamload.fetch.cache.cache_file import CacheFile
from streamload.fetch.fetched_shard import FetchedShard


class Nobody:
    """Waits for nothing of some shards."""

    def __init__(self, states: list[FetchedShard]) -> None:
        self.states = states

    def state_of(self, shard: int) -> FetchedShard:
        return self.states[shard]

    def has(self, state: FetchedShard, number: int) -> bool:
        return False

    def is_wanted(self, state: FetchedShard, number: int) -> bool:
        return True

    def in_flight(self, state: FetchedShard) -> set[int]:
        return {0}

    def arrived(self, state: FetchedShard, number: int, size_bytes: int) -> None:
        raise AssertionError("nothing can come")

    def failed(self, state: FetchedShard, number: int, error: Exception) -> None:
        raise AssertionError(f"nobody wants it any more: {error}")

    def not_coming(self, state: FetchedShard) -> None:
        pass

    def not_cached(self, state: FetchedShard) -> None:
        raise AssertionError("nothing is looked up to its end")

    def on_disk(self, state: FetchedShard, file: CacheFile) -> None:
        raise AssertionError("nothing is written")

    def hold(self, state: FetchedShard, number: int) -> bool:
        return False

    def release(self, state: FetchedShard, number: int) -> None:
        raise AssertionError("nothing is held")

    def has_room(self) -> None:
        pass

    def cache_changed(self) -> None:
        self.has_room()

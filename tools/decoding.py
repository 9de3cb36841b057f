"""Whether the samples of shards can be decoded, as a loader does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import streamload
from streamload.errors import SampleError

__all__ = ["undecodable"]

_DECODED_TOGETHER = 64


def undecodable(
    shards: Sequence[str],
    index: str | None,
    storage_options: Mapping[str, Any],
    workers: int,
    advance: Callable[[int, int], None],
) -> Iterator[SampleError]:
    """Decode all fields of all samples as a loader does; the samples of which one cannot be decoded.

    Samples are decoded in batches by a StreamLoader and let go at once, within its budget of memory.

    Args:
        shards: whole shards.
        index: the folder with their index, if it is not beside them.
        storage_options: of the storage, as for the loader.
        workers: processes.
        advance: called with samples, and 0, as they are done.

    Raises:
        StreamloadError: a shard cannot be read, or a sample kills the processes that decode it.
    """
    with streamload.StreamLoader(
        shards,
        _DECODED_TOGETHER,
        transform=_nothing,
        on_error="skip",
        num_workers=workers,
        index=index,
        storage_options=storage_options or None,
    ) as loader:
        seen = 0
        for batch in chain(loader, [()]):
            new = loader.statistics().skipped_samples - seen
            advance(len(batch) + new, 0)
            if new:
                yield from loader.skipped[-new:]
                seen += new


def _nothing(_: object) -> int:
    return 0

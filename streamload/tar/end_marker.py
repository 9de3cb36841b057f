"""What stands behind the last member of an archive: the end-of-archive marker, and nothing but zeros from there on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streamload.errors import ShardFormatError
from streamload.tar.archive_part import ArchivePart, NotArrivedError
from streamload.tar.header import BLOCK_BYTES, ZERO_BLOCK, looks_like_header
from streamload.tar.not_a_tar import what_else

__all__ = ["EndNotArrivedError", "check_end", "check_zeros_behind", "is_cut_in"]

_MARK_BYTES = 2 * BLOCK_BYTES
_USUAL_RECORD_BYTES = 20 * BLOCK_BYTES
_LONG_RECORDS = [1 << power for power in range(5, 16)]
"""Blocks of a longer record that is usual too: `tar -b 32` to `-b 32768`."""

_MOST_RECORD_BLOCKS = 32_768
"""The longest record, 16 MiB, that is taken for one: `tar -b 32768`."""


class EndNotArrivedError(NotArrivedError):
    """The end-of-archive marker is there, and what follows it has not come as a whole; so far it is as it must be.

    Attributes:
        reached: the check can go on from here as if this were where the mark begins.
    """

    def __init__(self, needs: int, reached: int) -> None:
        super().__init__(needs)
        self.reached = reached


def check_end(part: ArchivePart, position: int, url: str, *, strict: bool) -> bool:
    """Check what stands where the headers end: the mark and nothing but zeros behind it.

    Args:
        part: the bytes that have come.
        position: where a header would start; the block there is zero, or does not lie within the archive.
        url: the shard, for errors.
        strict: False accepts that the mark is missing.

    Returns:
        Whether it is missing.

    Raises:
        ShardFormatError: the mark is missing or broken, or something follows it.
        EndNotArrivedError: the mark is in order; zeros behind it have not come.
        NotArrivedError: other bytes are wanted before anything can be said.
    """
    total = part.limit
    if total - position < BLOCK_BYTES and total != position:
        if position == 0 and (what := what_else(part.read(0, total))) is not None:
            raise ShardFormatError(what, url=url, offset=0)
        raise _cut_in_block(total, min(position, total), url)
    if total - position <= BLOCK_BYTES:
        if strict:
            raise ShardFormatError(
                "the end-of-archive marker (two blocks of zeros) is missing, so the shard was probably cut; "
                "fetch or pack it again, or pass strict=False if it is known to be whole",
                url=url,
                offset=position,
            )
        return True
    if total - position >= _MARK_BYTES and part.read(position + BLOCK_BYTES, BLOCK_BYTES) != ZERO_BLOCK:
        raise ShardFormatError(
            "a block of zeros stands in place of a tar header, and more follows; fetch or pack the shard again",
            url=url,
            offset=position,
        )
    _check_zeros(part, position + _MARK_BYTES, url)
    if not part.whole:
        # The last two blocks that have come are zeros like the mark itself, and can stand for it.
        reached = max(position, part.available // BLOCK_BYTES * BLOCK_BYTES - _MARK_BYTES)
        raise EndNotArrivedError(min(part.available + BLOCK_BYTES, total), reached)
    if total % BLOCK_BYTES:
        raise _cut_in_block(total, total, url)
    return False


def is_cut_in(read: Callable[[int, int], bytes], offset: NDArray[np.int64], size: NDArray[np.int64]) -> bool:
    """Whether zeros may have taken the place of the end of the last payload, or of everything.

    A file that was given its size at once and not written to its end breaks off within a payload, nearly always: then
    at least the payload's last block is zeros.

    Args:
        read: gives the bytes from one place, in which the offsets are counted, to another.
        offset: int64[M], the first byte of each payload of a sample.
        size: int64[M], the bytes of each.
    """
    if not len(offset):
        return True
    start, end = int(offset[-1]), int(offset[-1] + size[-1])
    return end > start and not any(read(max(start, (end - 1) // BLOCK_BYTES * BLOCK_BYTES), end))


def check_zeros_behind(end: int, total: int, url: str, *, strict: bool, cut: bool) -> None:
    """Refuse an archive that goes on with zeros where no writer puts so many, after all else has been checked.

    Tar fills up its last record with zeros: 10,240 bytes unless told otherwise, and `tar -b` takes any number of
    blocks. Where a file that was given its size at once was not written to its end, the rest of it is zeros too, and
    the archive would only seem to be shorter; so unusual records are believed only where the last payload is whole.

    Args:
        end: where the end-of-archive marker begins.
        total: the size of the archive.
        url: the shard, for errors.
        strict: False accepts it.
        cut: as `is_cut_in` finds.

    Raises:
        ShardFormatError: no record that divides the archive into whole ones is as long.
    """
    zeros = total - end
    if not strict or zeros < _USUAL_RECORD_BYTES + _MARK_BYTES:
        return
    least_blocks = (zeros - _MARK_BYTES) // BLOCK_BYTES + 1
    records = _LONG_RECORDS if cut else range(least_blocks, _MOST_RECORD_BLOCKS + 1)
    if not any(total % (blocks * BLOCK_BYTES) == 0 for blocks in records if blocks >= least_blocks):
        raise ShardFormatError(
            f"the archive ends here, and the {zeros} bytes that follow are all zeros, so the shard was probably not "
            "downloaded or copied to its end; fetch or pack it again, or pass strict=False if it is known to be whole",
            url=url,
            offset=end,
        )


def _check_zeros(part: ArchivePart, start: int, url: str) -> None:
    found = part.first_nonzero(start)
    if found is not None:
        block = part.read(found, min(BLOCK_BYTES, part.limit - found))
        what = "a second archive follows" if looks_like_header(block) else "other bytes follow"
        raise ShardFormatError(
            f"{what} behind the end-of-archive marker and would not be read; if archives were put together "
            "with `cat`, keep them as separate shards or use `tar --concatenate`",
            url=url,
            offset=found,
        )


def _cut_in_block(total: int, position: int, url: str) -> ShardFormatError:
    return ShardFormatError(
        f"the shard ends in the middle of a block ({total} bytes, not a multiple of 512), so it was cut; "
        "fetch or pack it again",
        url=url,
        offset=position // BLOCK_BYTES * BLOCK_BYTES,
    )

"""The byte budget: how much there is by default, and whether an order can be read within it."""

from __future__ import annotations

import os
from contextlib import suppress

from streamload.errors import StorageError
from streamload.fetch.parts import PART_BYTES
from streamload.surroundings.cgroups import free_memory_bytes
from streamload.wording import counted

__all__ = ["available_bytes", "budget_error", "budget_for", "bytes_for_parts", "check_budget", "default_budget"]

_SHARE = 4
_LEAST_BYTES = 64 << 20
_SMALL_BYTES = 128 << 20
_REQUESTS_BYTES = 112 << 20
"""About so much the feeder was seen to grow by with 32 requests on their way."""

_GUESS_BYTES = 4 << 30
_STEPS_FOR_A_MEAN = 4


def available_bytes(root: str = "/") -> int:
    """The memory that this machine, or the cgroup (the container, the job) of this process, could still give out.

    Args:
        root: the folder below which `proc` and `sys` are.
    """
    found = []
    meminfo = os.path.join(root, "proc/meminfo")
    with suppress(OSError, ValueError, IndexError), open(meminfo, encoding="ascii") as file:
        found += [1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")]
    allowed = free_memory_bytes(root)
    if allowed is not None:
        found.append(allowed)
    if not found:
        with suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return min(found, default=_GUESS_BYTES)


def default_budget(local_ranks: int) -> int:
    """A quarter of the memory that is free now, divided among the ranks of this machine."""
    return max(_LEAST_BYTES, available_bytes() // (_SHARE * local_ranks))


def bytes_for_parts(budget_bytes: int) -> int:
    """What of a budget parts and slots may take: the requests themselves take some tens of megabytes."""
    return budget_bytes - min(_REQUESTS_BYTES, max(0, budget_bytes - _SMALL_BYTES) // 4)


def budget_for(parts_bytes: int) -> int:
    """The budget of which so much is for parts and slots: `bytes_for_parts` the other way round."""
    return parts_bytes + min(_REQUESTS_BYTES, max(0, parts_bytes - _SMALL_BYTES) // 3)


def check_budget(
    budget_bytes: int,
    *,
    window: int,
    batch_size: int,
    samples: int,
    data_bytes: int,
    lanes_read: int,
    lanes: int,
    shards: int,
    ranks: int = 1,
    drop_last: bool = False,
) -> None:
    """Refuse an order of which more must be held at once than fits.

    A part is held from the first of its samples that is drawn until the last, which is a window later. So what lies
    within the window is held, and at each end of it a part that lies there only partly; never more than there is. A
    batch is made of all its samples at once.

    Args:
        budget_bytes: for everything.
        window: samples; 0 without shuffle.
        batch_size: samples, of each rank.
        samples: of the dataset.
        data_bytes: of the dataset.
        lanes_read: how many lanes this rank reads.
        lanes: how many there are.
        shards: how many there are.
        ranks: the world size.
        drop_last: samples that fill no batch of all ranks are left out.

    Raises:
        ValueError: it does not fit; the message has the arithmetic and what to do.
    """
    if data_bytes <= budget_bytes:
        return  # nothing has to go before it is used
    sample_bytes = data_bytes / max(1, samples)
    part_bytes = min(PART_BYTES, data_bytes / max(1, shards))
    if window:
        _check_window(
            budget_bytes,
            window,
            lane_samples=-(-samples // lanes),
            sample_bytes=sample_bytes,
            part_bytes=part_bytes,
            lanes_read=lanes_read,
        )
    _check_batch(
        budget_bytes, _samples_of_a_batch(samples, batch_size, ranks, drop_last=drop_last), sample_bytes, part_bytes
    )


def _samples_of_a_batch(samples: int, batch_size: int, ranks: int, *, drop_last: bool) -> float:
    """How many samples of mean size are as large as the largest batch surely is.

    Of few batches the last one may have all the large samples, or they may be those that are left out.
    """
    whole_steps, rest = divmod(samples, batch_size * ranks)
    if whole_steps >= _STEPS_FOR_A_MEAN:
        return batch_size
    if drop_last:
        return 0
    return samples / ((whole_steps + (rest > 0)) * ranks)


def _check_window(
    budget_bytes: int, window: int, *, lane_samples: int, sample_bytes: float, part_bytes: float, lanes_read: int
) -> None:
    """Refuse a window in each lane that does not fit, with a part at both of its ends."""
    held = min(window, lane_samples) * lanes_read * sample_bytes
    edges = 2 * lanes_read * part_bytes
    if held + edges <= budget_bytes:
        return
    fitting = max(1, int((budget_bytes - edges) / (lanes_read * sample_bytes)))
    of_lanes = f"{lanes_read} lanes x " if lanes_read > 1 else ""
    within = f"{of_lanes}{counted(min(window, lane_samples), 'sample')} x {sample_bytes / 1e3:.1f} kB"
    raise ValueError(
        f"memory_budget of {_shown(budget_bytes)} is too small for shuffle_window={window}: {within} = "
        f"{held / 1e6:.0f} MB are held while they wait to be drawn, and {edges / 1e6:.0f} MB of parts at the edges. "
        f"Give a memory_budget of at least {budget_for(int((held + edges) * 1.05)) / 1e6:.0f} MB, "
        f"a shuffle_window of at most {fitting}, "
        "or a cache_dir on a disk with room"
    )


def _check_batch(budget_bytes: int, batch_size: float, sample_bytes: float, part_bytes: float) -> None:
    """Refuse a batch whose samples are more than there may be at once."""
    batch_bytes = batch_size * sample_bytes
    if batch_bytes <= budget_bytes:
        return
    # With it, the batch that is made of it and one that the loop still has.
    enough_bytes = budget_for(int(3 * batch_bytes + 2 * part_bytes))
    samples = counted(max(1, round(batch_size)), "sample")
    raise ValueError(
        f"memory_budget of {_shown(budget_bytes)} is too small for a batch of {samples} x "
        f"{sample_bytes / 1e3:.1f} kB: {_shown(batch_bytes)} of shards are needed at once. Give a memory_budget of "
        f"{enough_bytes / 1e6 * 1.05:.0f} MB, which has room for what is made of them too, a smaller batch_size, or a "
        "cache_dir on a disk with room"
    )


def budget_error(
    budget_bytes: int,
    missing_bytes: int,
    needed_bytes: int,
    slot_bytes: int,
    unpacking_bytes: int,
    *,
    counting: bool,
) -> StorageError:
    """The error to raise when nothing goes on within the budget: what takes it, and what to do."""
    budget, missing, needed, slots, unpacking = (
        _shown(size_bytes) for size_bytes in (budget_bytes, missing_bytes, needed_bytes, slot_bytes, unpacking_bytes)
    )
    advice = "an index (`streamload index`), which gives len() without reading" if counting else "a smaller batch_size"
    return StorageError(
        f"memory_budget of {budget} is too small: {missing} more are needed now, while {needed} of shards are held "
        f"because samples in them are wanted too or are yet to be drawn within shuffle_window, {slots} are batches, "
        f"and {unpacking} hold what is being decompressed. Give a larger memory_budget, a smaller shuffle_window, "
        f"{advice}, or a cache_dir on a disk with more room"
    )


def _shown(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.0f} MB" if size_bytes >= 1e6 or not size_bytes else f"{size_bytes / 1e3:.0f} kB"

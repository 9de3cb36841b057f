"""How much of each resource a loader may take. A share is a divisor: 4 is a quarter.

Shares of one resource add up, so they stand together; what is never shared, such as limits of formats, stays with its
module.
"""

from __future__ import annotations

__all__ = [
    "BATCHES_AT_ONCE",
    "BATCHES_OF_LOOP",
    "BLOCK_ROWS",
    "CACHED_SHARDS_SHARE",
    "CALLER_SHARDS_SHARE",
    "DECOMPRESSED_AT_ONCE",
    "EXPANSION_SHARE",
    "FETCHED_SHARDS_SHARE",
    "FIRST_BLOCK_ROWS",
    "FIRST_REQUESTS",
    "FREE_MEMORY_SHARE",
    "FREE_SLOTS_BYTES",
    "GUESSED_PARTS",
    "GUESSED_PARTS_SHARE",
    "LEAST_BUDGET_BYTES",
    "LEAST_FREE_SLOTS",
    "LEAST_TABLES_BYTES",
    "MOST_FREE_SLOTS",
    "MOST_KEPT_SLOTS",
    "MOST_REQUESTS",
    "MOST_TABLES_BYTES",
    "MOST_WORKERS_PER_PROCESSOR",
    "PARTS_PROPORTION",
    "REQUESTS_BYTES",
    "REQUESTS_PROPORTION",
    "REQUEST_BYTES",
    "RESIDENT_BYTES",
    "RESIDENT_SHARDS",
    "SCANNED_PARTS",
    "SCANNED_PARTS_SHARE",
    "SCANNED_SHARDS",
    "SCHEDULED_SHARDS_SHARE",
    "SLOTS_IN_FLIGHT_SHARE",
    "SLOTS_KEPT_SHARE",
    "SLOTS_SHARE",
    "SMALL_REQUESTS",
    "TABLES_SHARE",
    "WORKER_SHARDS_SHARE",
]

# -- memory: the byte budget and its parts --------------------------------------------------------------------------

FREE_MEMORY_SHARE = 4
"""Of the memory that is free at the start: the default budget of all ranks of this machine together."""

LEAST_BUDGET_BYTES = 64 << 20
"""The smallest default budget of a rank."""

REQUESTS_BYTES = 112 << 20
"""For the buffers of requests; measured: the feeder grows by about as much with as many in flight as there may be."""

REQUEST_BYTES = REQUESTS_BYTES // 28

PARTS_PROPORTION, REQUESTS_PROPORTION = 25, 7
"""How a budget is divided that is too small for `REQUESTS_BYTES`: parts and batches to requests."""

EXPANSION_SHARE = 4
"""Of the budget, for what fields expand to in all workers together; nothing where no field can expand."""

BATCHES_AT_ONCE = 3
"""At least: one is being made or is ready, one is the loop's, and one replaces it before the loop releases it."""

BATCHES_OF_LOOP = 2
"""Of these the loop's: it holds one while it gets the next. What the user keeps beyond them is no part of a budget."""

SLOTS_SHARE = 4
"""Of the budget, for batches; the rest is for what they are made of."""

GUESSED_PARTS, GUESSED_PARTS_SHARE = 32, 4
"""The most parts that are fetched on a guess, and their share of the budget."""

SCANNED_SHARDS = 32
"""Remote shards that are scanned before the plan comes to them."""

SCANNED_PARTS, SCANNED_PARTS_SHARE = 64, 4
"""The most parts that scans hold ahead of the one that is read, and their share of the budget."""

DECOMPRESSED_AT_ONCE = 4
"""Compressed shards that are decompressed side by side for scans: each on a thread, and no faster than that."""

TABLES_SHARE, LEAST_TABLES_BYTES, MOST_TABLES_BYTES = 16, 32 << 20, 256 << 20
"""The share of the budget that bounds the tables held in memory, and the bounds of that; without a budget the most."""

FIRST_BLOCK_ROWS, BLOCK_ROWS = 256, 2048
"""Rows of a remote dataset that are planned at once: first, so that the first batch comes soon, and later."""

# -- memory beside the budget -----------------------------------------------------------------------------------------

RESIDENT_BYTES, RESIDENT_SHARDS = 256 << 20, 64
"""Small local shards that stay mapped between epochs: bytes together, and how many."""

LEAST_FREE_SLOTS, FREE_SLOTS_BYTES = 8, 128 << 20
"""Free slots that are kept whatever their size, and the bytes up to which more are."""

MOST_FREE_SLOTS = 640
"""More than the batches that are ever in flight, so that slots are reused."""

MOST_KEPT_SLOTS = 128
"""The most slots that a user who keeps batches can hold before the pool gives some away."""

# -- descriptors: shares of what a process may have open --------------------------------------------------------------

FETCHED_SHARDS_SHARE = 6
"""Feeder: fetched shards, each with a descriptor or two."""

CACHED_SHARDS_SHARE = 12
"""The same with a disk cache: a shard has one for its memory and one for its file, and one more while it is copied."""

SCHEDULED_SHARDS_SHARE = 8
"""Feeder: the shards of tasks that are scheduled at the same time."""

SLOTS_IN_FLIGHT_SHARE, SLOTS_KEPT_SHARE = 4, 8
"""Feeder: the slots of batches in flight, and those that the user keeps."""

WORKER_SHARDS_SHARE = 4
"""Worker: the shards that it keeps open."""

CALLER_SHARDS_SHARE = 6
"""The caller's process in place of a worker: its own descriptors are open there too."""

# -- processors -----------------------------------------------------------------------------------------------------

MOST_WORKERS_PER_PROCESSOR = 4
"""Workers beyond that take long to start, and are hardly ever faster, unless they sleep."""

# -- requests at once -------------------------------------------------------------------------------------------------

FIRST_REQUESTS, MOST_REQUESTS = 32, 64
"""For parts: how many at the start, and the most as long as the storage keeps up."""

SMALL_REQUESTS = 16
"""For anything else, each by itself: sizes, tables, labels, ranges of single samples, files of the cache,
copies of whole files."""

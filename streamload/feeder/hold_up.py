"""What holds up the next batch, in words: which stage, which shard and sample, and in which line of whose code.

On its own because it puts together what the pool, the tables and the fetcher know, for messages only.
"""

from __future__ import annotations

from streamload.decode.tasks import RowTask
from streamload.errors import without_secrets
from streamload.fetch.prerequisites import Prerequisites
from streamload.index.tables import Tables
from streamload.text import counted
from streamload.workers.protocol import Pool, WorkerActivity

_SHOWN_WORKERS = 2


async def what_holds_up(pool: Pool, tables: Tables, prerequisites: Prerequisites | None) -> str:
    """What the next batch waits for now; empty where nothing shows."""
    busy = await pool.inspect()
    if busy:
        others = len(busy) - _SHOWN_WORKERS
        shown = [_doing(worker, tables) for worker in busy[:_SHOWN_WORKERS]]
        return "\n".join([*shown, *([f"{counted(others, 'more worker')} at work"] if others > 0 else [])])
    return "" if prerequisites is None else _fetching(prerequisites)


def _doing(worker: WorkerActivity, tables: Tables) -> str:
    if worker.stopped:
        return f"{worker.name} is stopped, by a signal (SIGSTOP) or a debugger, {_work(worker, tables)}"
    stack = f":\n{worker.stack}" if worker.stack else ""
    return f"{worker.name} is at work, {_work(worker, tables)}{stack}"


def _work(worker: WorkerActivity, tables: Tables) -> str:
    task = worker.task
    if task is None:
        return "still starting: it imports the modules that the user's functions need"
    if not isinstance(task, RowTask):
        return f"scanning the shard {without_secrets(tables.url(task.shards[0]))!r}"
    if worker.row < 0:
        return "before or after the samples of a batch, as in collating"
    shard, sample = int(task.table.shards[worker.row]), int(task.table.samples[worker.row])
    table = tables.at_hand(shard)
    key = "" if table is None else f", sample {table.key(sample)!r}"
    return f"decoding or transforming shard {without_secrets(tables.url(shard))!r}{key}"


def _fetching(prerequisites: Prerequisites) -> str:
    fetcher = prerequisites.fetcher
    slowest, counts = fetcher.slowest(), fetcher.counts
    if slowest is None:
        asked = fetcher.asked_version()
        if asked is None:
            return prerequisites.loading_now()
        return f"the storage does not answer which version of {without_secrets(asked)!r} it has"
    failed = counts.broken + counts.throttled
    return (
        f"the storage: a request for {without_secrets(slowest.url)!r} from byte {slowest.start} on has taken "
        f"{slowest.seconds:.1f} s, in which {slowest.received_bytes:,} bytes came; "
        f"{failed:,} of {counted(counts.requests, 'request')} have failed so far"
    )

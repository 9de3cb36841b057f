"""Packs on the nodes of a cluster: what `Workforce` is for the processes of one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from streamload_tools.packing.node_work import do_in_bucket, do_in_shared_folder
from streamload_tools.packing.remote_staging import RemoteStaging
from streamload_tools.packing.staging import Staging
from streamload_tools.packing.work import Report, Result, Task
from streamload_tools.packing.workforce import Workforce
from streamload_tools.ray_pool import RayPool
from streamload_tools.sources.listing import Listing

from streamload.environment.ray_cluster import FileOfAll

__all__ = ["Force", "force_for"]

_PROBE = ".seen-by-all"


class Force(Protocol):
    """Does the tasks of a run; a context manager, after which none is being done."""

    def start(self, number: int) -> None:
        """Start what will do at least this number of tasks."""
        ...

    def results(self, tasks: Iterable[Task], number: int, report: Report) -> Iterator[Result]:
        """The results of tasks, in their order; see `Workforce.results`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


def force_for(staging: Staging, listing: Listing, workers: int, pool: RayPool | None) -> Force:
    """Who packs into a staging folder.

    Args:
        staging: the folder.
        listing: the files that are packed.
        workers: how many processes, without a pool.
        pool: does it on a cluster.
    """
    if pool is None:
        return Workforce(workers, staging.lock)
    return _NodesForce(pool, staging, listing)


class _NodesForce:
    """Tasks of a cluster, whose nodes write to the staging folder, or upload where the destination is a bucket."""

    def __init__(self, pool: RayPool, staging: Staging, listing: Listing) -> None:
        self._pool, self._staging, self._listing = pool, staging, listing
        self._running: list[Generator[Result, None, None]] = []

    def start(self, number: int) -> None:
        """Ray starts its processes itself."""

    def results(self, tasks: Iterable[Task], number: int, report: Report) -> Iterator[Result]:
        """See `Workforce.results`."""
        del number
        results = self._results(tasks, report)
        self._running.append(results)
        return results

    def _results(self, tasks: Iterable[Task], report: Report) -> Generator[Result, None, None]:
        staging = self._staging
        if isinstance(staging, RemoteStaging):
            calls: Iterator[Callable[[Report], Any]] = (
                partial(do_in_bucket, staging.on_a_node(task)) for task in tasks
            )
            for shard, result in self._pool.results(calls, report):
                if shard is not None:
                    staging.uploaded_by_node(shard, result)
                yield result
        else:
            yield from self._pool.results((partial(do_in_shared_folder, task) for task in tasks), report)

    def __enter__(self) -> Self:
        """Find out whether the nodes see the files, and have the destination ready for their uploads."""
        files = list(_some(self._listing.paths))
        if isinstance(self._staging, RemoteStaging):
            self._pool.check_nodes(files)
            self._staging.begin_uploads()
        else:
            with _probe(self._staging) as probe:
                self._pool.check_nodes([probe, *files])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._running:  # an error elsewhere has left them as they are
            self._running.pop().close()


@contextmanager
def _probe(staging: Staging) -> Iterator[FileOfAll]:
    path = staging.path(_PROBE)
    try:
        with open(path, "wb") as file:
            file.write(os.urandom(16))
        yield FileOfAll.at(path, "the destination as it is here")
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _some(paths: Sequence[str]) -> Iterator[FileOfAll]:
    """The first and the last one of the files, where they are local."""
    for path in dict.fromkeys([*paths[:1], *paths[-1:]]):
        with suppress(OSError):  # a url, an input that is no file, or a file that is reported when it is packed
            yield FileOfAll.at(path, "the files to pack as they are here")

"""The hidden folder in the destination where shards grow until all of them are whole, and what a later run may keep."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from streamload_tools.failures import UsageError
from streamload_tools.packing.records import DONE, Finished
from streamload_tools.sources.listing import Listing

from streamload.index.unfinished import STAGING
from streamload.storage.local_files import replace_file

__all__ = [
    "STAGING",
    "Run",
    "Staging",
    "has_finished",
    "is_being_published",
    "is_unfinished",
    "locked_folder",
    "remove_remains",
    "remove_unfinished",
    "staging_folder",
]

_OPTIONS = "run.json"
_LISTING = "source.npz"
_PUBLISHING = "publishing"
_FORMAT = 2
_PATIENCE_S = 0.5  # what a killed run's workers have to end, which hold its lock as well


class Staging:
    """The folder, locked against other runs.

    Attributes:
        folder: its path.
        lock: the descriptor that holds the lock, until every process that has it is gone.
        resumed: whether there is something from an earlier run.
        keeps: whether finished shards stay for a later run if this one fails.
    """

    def __init__(self, folder: str, lock: int, *, resumed: bool) -> None:
        self.folder, self.lock, self.resumed, self.keeps = folder, lock, resumed, True

    def path(self, *names: str) -> str:
        """A path in the folder; the folders on the way are made. Raises OSError."""
        path = os.path.join(self.folder, *names)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def note(self, name: str, value: Any) -> None:
        """Keep a value for a later run, whole or not at all. Raises OSError."""
        content = json.dumps(value).encode("ascii")
        replace_file(self.path(name), lambda file: file.write(content), durable=False)

    def noted(self, name: str) -> Any:
        """The value that was kept, or None. Raises OSError, ValueError."""
        try:
            with open(self.path(name), "rb") as file:
                return json.load(file)
        except FileNotFoundError:
            return None

    def begin_publishing(self, shards: Mapping[str, Sequence[str]]) -> None:
        """Note that from now on shards get their final names, so that a later run ends what was begun.

        Args:
            shards: the paths of each part's shards, in order.
        """
        self.note(_PUBLISHING, shards)

    def publishing(self) -> dict[str, list[str]] | None:
        """What `begin_publishing` was told, by an earlier run, or None."""
        found: dict[str, list[str]] | None = self.noted(_PUBLISHING)
        return found

    def known(self, path: str, fingerprint: Callable[[], str]) -> Finished | None:
        """What has become of a task, if it need not even be given to a worker.

        Args:
            path: the tar file that it makes.
            fingerprint: makes what stands for all that its content comes from.
        """
        del path, fingerprint
        return None

    def take(self, part: str, path: str, fingerprint: Callable[[], str], finished: Finished) -> None:
        """Take over a shard, in the order of its part's shards; here it waits for its publishing where it is.

        Args:
            part: its name.
            path: the tar file of its task.
            fingerprint: makes that of the task.
            finished: the shard.
        """
        del part, path, fingerprint, finished

    def abandon(self) -> None:
        """Keep nothing for a later run, which could not use it."""
        self.keeps = False

    def remove(self) -> None:
        """Remove everything, first of all what makes it a run that can be resumed. Raises OSError."""
        with suppress(FileNotFoundError):
            os.unlink(self.path(_OPTIONS))
        shutil.rmtree(self.folder)


def is_being_published(destination: str) -> bool:
    """Whether a run was stopped while it gave the shards their final names."""
    return all(os.path.exists(os.path.join(destination, STAGING, name)) for name in (_OPTIONS, _PUBLISHING))


def is_unfinished(destination: str) -> bool:
    """Whether a run in a folder can be resumed."""
    folder = os.path.join(destination, STAGING)
    return os.path.isdir(folder) and _earlier(Staging(folder, -1, resumed=False)) is not None


def remove_remains(destination: str) -> None:
    """Remove what is left of a run that published everything and was stopped while it cleared up.

    Raises:
        UsageError: another run is at work there.
        OSError: it cannot be removed.
    """
    folder = os.path.join(destination, STAGING)
    if os.path.isdir(folder):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(lock, destination)
            if _is_at(lock, folder) and not is_unfinished(destination):
                shutil.rmtree(folder)
        finally:
            os.close(lock)


@dataclass(frozen=True, slots=True)
class Run:
    """What a run is about, for comparison with one before it.

    Attributes:
        destination: where the shards will be.
        options: all that the shards' bytes depend on beside the files, by the names that users know.
        listing: the files.
        resume: keep what an earlier run finished.
        overwrite: throw that away.
    """

    destination: str
    options: Mapping[str, Any]
    listing: Listing
    resume: bool
    overwrite: bool


@contextmanager
def staging_folder(run: Run) -> Iterator[Staging]:
    """Open the staging folder in a destination, both of which are made if needed.

    If the block is left by an error, finished shards stay there for a run with `resume`; if there are none, nothing
    stays. If it is left otherwise, nothing stays either.

    Raises:
        UsageError: another run is at work there; or an earlier one has left something, and it is neither to be resumed
            nor to be thrown away, or its files or options were others.
        OSError: it cannot be made.
    """
    destination = run.destination
    made = not os.path.isdir(destination)
    folder = os.path.join(destination, STAGING)
    try:
        with locked_folder(folder, destination) as lock:
            staging = Staging(folder, lock, resumed=_prepared(Staging(folder, lock, resumed=False), run))
            try:
                yield staging
            except BaseException as exc:
                _explain(exc, folder, destination)
                if staging.keeps and _earlier(staging) is not None:
                    remove_unfinished(folder)
                    _advise(exc, staging)
                else:
                    staging.remove()
                raise
            else:
                _remove_after(staging)
    finally:
        if made:
            with suppress(OSError):  # most often it holds the shards
                os.rmdir(destination)


@contextmanager
def locked_folder(folder: str, destination: str) -> Iterator[int]:
    """Make the folder and hold its lock."""
    while True:
        os.makedirs(folder, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(lock, destination)
            if _is_at(lock, folder):  # else the run that had the lock has ended and removed the folder
                yield lock
                return
        finally:
            os.close(lock)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether a path still leads to what was opened there."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _advise(exc: BaseException, staging: Staging) -> None:
    """Say how to go on with what is kept."""
    if not is_being_published(os.path.dirname(staging.folder)):
        exc.add_note(
            "what is finished is kept: run the same command with --resume to go on, or with --overwrite to start anew"
        )
        return
    if isinstance(exc, KeyboardInterrupt):
        exc.args = ("publishing was begun and is not complete",)
    exc.add_note("run the same command with --resume to finish publishing")


def _remove_after(staging: Staging) -> None:
    """Remove the folder of a run that has done everything."""
    try:
        staging.remove()
    except KeyboardInterrupt as exc:
        exc.args = ("everything is published, but not all of what was needed for it is removed",)
        exc.add_note("run the same command with --resume to remove it")
        raise


def _explain(exc: BaseException, folder: str, destination: str) -> None:
    """Name the place that users know, and say what helps."""
    if isinstance(exc, OSError):
        if exc.filename is None or str(exc.filename).startswith(folder):
            exc.filename = destination
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            exc.add_note("make room there")


def _lock(descriptor: int, destination: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UsageError(f"another shardify is writing to {destination!r}; wait until it ends") from None
            time.sleep(0.02)


def _prepared(staging: Staging, run: Run) -> bool:
    """What `_prepare` says; if it fails, nothing stays but an earlier run that can be resumed."""
    try:
        return _prepare(staging, run)
    except BaseException as exc:
        _explain(exc, staging.folder, run.destination)
        if _earlier(staging) is None:
            staging.remove()
        raise


def _prepare(staging: Staging, run: Run) -> bool:
    """Leave in the folder what this run may use and nothing else; whether that is something."""
    before = _earlier(staging)
    if before is not None and run.resume:
        _refuse_differences(before, {"format": _FORMAT, **run.options}, run.destination)
        difference = run.listing.difference(staging.path(_LISTING))
        if difference is not None:
            raise UsageError(
                f"the unfinished run in {run.destination!r} cannot be resumed: {difference}; start anew with "
                "--overwrite"
            )
        remove_unfinished(staging.folder)
        return True
    if before is not None and not run.overwrite:
        begun = "was being published" if is_being_published(run.destination) else "was not finished"
        raise UsageError(
            f"{run.destination!r} holds a run that {begun}; go on with --resume, or throw it away with --overwrite"
        )
    _clear(staging.folder)
    run.listing.save(staging.path(_LISTING))
    staging.note(_OPTIONS, {"format": _FORMAT, **run.options})
    return False


def _earlier(staging: Staging) -> dict[str, Any] | None:
    """The options of a run that has finished something."""
    try:
        before = staging.noted(_OPTIONS)
        if not has_finished(staging.folder) and staging.noted(_PUBLISHING) is None:
            return None
    except ValueError:
        return None
    return before if isinstance(before, dict) else None


def _refuse_differences(before: Mapping[str, Any], now: Mapping[str, Any], destination: str) -> None:
    before = {name: before.get(name) for name in (*now, *before)}
    different = [
        f"{name} was {value!r} and is {now.get(name)!r}" for name, value in before.items() if value != now.get(name)
    ]
    if different:
        raise UsageError(
            f"the unfinished run in {destination!r} cannot be resumed: {', '.join(different)}; "
            "give the same options, or start anew with --overwrite"
        )


def has_finished(folder: str) -> bool:
    """Whether a staging folder holds anything that a later run may use."""
    return any(name.endswith(DONE) for _, _, names in os.walk(folder) for name in names)


def remove_unfinished(folder: str) -> None:
    """Remove the hidden files of shards that were in flight."""
    for top, _, names in os.walk(folder):
        for name in names:
            if name.startswith("."):
                os.unlink(os.path.join(top, name))


def _clear(folder: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, _OPTIONS))  # first, for without it nothing of the rest can be resumed
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)

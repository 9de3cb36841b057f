"""The folder in which a run packs, its lock and records, and what of it a later run may use.

A run into a local folder packs in a hidden folder there. A run into a bucket packs in a folder on this machine
(`streamload.pack.remote_staging`), and differs only in where its records and its finished shards go.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from streamload.index.shard_names import ShardNaming
from streamload.index.unfinished import STAGING
from streamload.pack.failures import UsageError
from streamload.pack.publishing import NAMES, Part, publish
from streamload.pack.records import DONE, Finished, kept
from streamload.pack.sources.listing import Listing
from streamload.storage.local_files import replace_file

RUN = "run.json"
"""The name of the record of a run."""
LISTING = "source.npz"
"""The name of the listing of its files."""

_PUBLISHING = "publishing"
_MADE_BY_A_RUN = "made-by-a-run"
_FORMAT = 4
_LOCK_TIMEOUT_S = 0.5  # the workers of a killed run hold its lock too, until they have ended


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as far as it is compared with an earlier one, and how it starts.

    Attributes:
        destination: where the shards will be.
        options: everything besides the files that the bytes of the shards depend on, by the users' names.
        listing: the files.
        resume: keep what an earlier run finished.
        overwrite: discard it.
        sync: flush to disk what is published.
        naming: what the shards are called.
    """

    destination: str
    options: Mapping[str, Any]
    listing: Listing
    resume: bool
    overwrite: bool
    sync: bool
    naming: ShardNaming = NAMES

    def document(self) -> dict[str, Any]:
        """The record of this run, with an identity of its own."""
        return {"format": _FORMAT, "id": secrets.token_hex(8), "options": dict(self.options)}

    def difference(self, before: Mapping[str, Any], listing_path: Callable[[], str]) -> str | None:
        """How this run differs from an earlier one, or None.

        Args:
            before: the record of the earlier run.
            listing_path: called to get the file with its listing.

        Raises:
            OSError, StorageError: the listing cannot be read.
        """
        if before.get("format") != _FORMAT:
            return "it is of another version of streamload"
        options = before["options"]
        options = {name: options.get(name) for name in (*self.options, *options)}
        different = [
            f"{name} was {value!r} and is {self.options.get(name)!r}"
            for name, value in options.items()
            if value != self.options.get(name)
        ]
        return ", ".join(different) or self.listing.difference(listing_path())


class Staging:
    """The staging folder of a run; the base class is that of a local destination.

    Attributes:
        folder: its path.
        run: the run.
        lock: the descriptor that holds the lock, until every process that has it is gone; -1 where it is not open.
        resumed: whether there is something from an earlier run.
        keeps: whether finished shards stay for a later run if this one fails.
    """

    def __init__(self, folder: str, run: Run) -> None:
        self.folder, self.run = folder, run
        self.lock, self.resumed, self.keeps = -1, False, True

    def path(self, *names: str) -> str:
        """A path in the folder; parent folders are created. Raises OSError."""
        path = os.path.join(self.folder, *names)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path

    def note(self, name: str, value: Any) -> None:
        """Save a value for a later run, atomically. Raises OSError."""
        content = json.dumps(value).encode("ascii")
        replace_file(self.path(name), lambda file: file.write(content), durable=False)

    def noted(self, name: str) -> Any:
        """The saved value, or None. Raises OSError, ValueError."""
        return _noted(self.folder, name)

    def earlier(self) -> dict[str, Any] | None:
        """The record of an earlier run that can be resumed, or None. Raises OSError, StorageError."""
        return _earlier(self.folder)

    def begin(self) -> None:
        """Record a new run, in place of any other. Raises OSError, StorageError."""
        clear(self.folder)
        self.run.listing.save(self.path(LISTING))
        self.note(RUN, self.run.document())

    def earlier_listing(self) -> str:
        """The file with the listing of the earlier run. Raises OSError, StorageError."""
        return self.path(LISTING)

    def reuse(self, before: dict[str, Any]) -> None:
        """Leave in the folder what can be used of an earlier run. Raises OSError, StorageError."""
        del before
        remove_unfinished(self.folder)

    def known(self, path: str, fingerprint: Callable[[], str]) -> Finished | None:
        """The result of a task that need not even be given to a worker.

        Args:
            path: the tar file that it makes.
            fingerprint: makes the task's fingerprint.
        """
        del path, fingerprint
        return None

    def take(self, part: str, path: str, fingerprint: Callable[[], str], finished: Finished) -> None:
        """Take a finished shard, in the order of its part's shards; a local one stays where it is until `publish`.

        Args:
            part: its name.
            path: the tar file of its task.
            fingerprint: makes the task's fingerprint.
            finished: the shard.
        """
        del part, path, fingerprint, finished

    def half_published(self) -> list[Part] | None:
        """The parts of an earlier run that was stopped while it published them, or None.

        Raises:
            ValueError: its records are damaged.
        """
        begun: dict[str, list[str]] | None = self.noted(_PUBLISHING)
        return None if begun is None else [_recorded_part(name, paths) for name, paths in begun.items()]

    def publish(self, parts: Sequence[Part], classes: Sequence[str] | None) -> None:
        """Give the shards of all parts their final names; a run that is stopped in here is completed by a later one.

        Raises:
            OSError, StreamloadError: something cannot be written.
        """
        again = self.noted(_PUBLISHING) is not None
        if not again:
            self.note(_PUBLISHING, {part.name: [shard.path for shard in part.shards] for part in parts})
        run = self.run
        publish(parts, run.destination, classes, run.options, naming=run.naming, sync=run.sync, again=again)

    def abandon(self) -> None:
        """Keep nothing for a later run, which could not use it."""
        self.keeps = False

    def has_results(self) -> bool:
        """Whether a later run could use anything of this one."""
        return self.earlier() is not None

    def kept_where(self) -> str:
        """Words on where and how much a later run can use."""
        return ""

    def stop(self) -> None:
        """End what runs in the background. Idempotent."""

    def withdraw(self) -> None:
        """Remove what this run has left outside of the folder. Raises StorageError."""

    def remove(self) -> None:
        """Remove everything, starting with what makes it a run that can be resumed. Raises OSError."""
        _remove(self.folder)

    def finish(self) -> None:
        """Remove the folder and all records, since everything is published. Raises OSError, StorageError."""
        self.remove()


@contextmanager
def open_staging(staging: Staging) -> Iterator[None]:
    """Create and lock the folder, and take over or discard an earlier run.

    If the block is left by an error, what is finished stays for a run with `resume`, unless it was abandoned or there
    is nothing. If it is left otherwise, nothing stays but what was published.

    Raises:
        UsageError: another run is active there; or an earlier one has left something, and it is neither to be resumed
            nor to be discarded, or its files or options were others.
        OSError, StorageError: something cannot be written.
    """
    parent = os.path.dirname(staging.folder)
    made = not os.path.isdir(parent)
    prepared = False
    try:
        with _locked_folder(staging.folder, staging.run.destination) as staging.lock:
            try:
                _prepare(staging)
                prepared = True
                yield
            except BaseException as exc:
                staging.stop()
                _explain(exc, staging.folder)
                if prepared:
                    _keep_results(staging, exc)
                elif _earlier(staging.folder) is None:
                    staging.remove()
                raise
            staging.stop()
            _remove_after(staging)
    finally:
        for folder in [staging.folder, parent] if made else [staging.folder]:
            with suppress(OSError):  # usually there are shards in it, or results
                os.rmdir(folder)


def _prepare(staging: Staging) -> None:
    """Leave in the folder what this run may use and nothing else."""
    run, before = staging.run, staging.earlier()
    if before is not None and run.resume:
        difference = run.difference(before, staging.earlier_listing)
        if difference is not None:
            raise UsageError(
                f"the unfinished run in {run.destination!r} cannot be resumed: {difference}; give the same options and "
                "files, or start over with --overwrite"
            )
        staging.resumed = True
        staging.reuse(before)
        return
    if before is not None and not run.overwrite:
        begun = "was being published" if _is_being_published(staging.folder) else "was not finished"
        raise UsageError(
            f"{run.destination!r} holds a run that {begun}; go on with --resume, or discard it with --overwrite"
        )
    staging.begin()


def _keep_results(staging: Staging, exc: BaseException) -> None:
    """Keep what a later run can use, and nothing else; say how to go on."""
    if not (staging.keeps and staging.has_results()):
        staging.withdraw()
        staging.remove()
        if isinstance(exc, KeyboardInterrupt):
            exc.args = ("nothing is published or kept; run the same command again, with or without --resume",)
        return
    if not _is_being_published(staging.folder):
        if isinstance(exc, KeyboardInterrupt):
            exc.args = ("no unfinished shard is published",)
        exc.add_note(
            f"what is finished is kept{staging.kept_where()}: run the same command with --resume to go on, or with "
            "--overwrite to start over"
        )
    else:
        if isinstance(exc, KeyboardInterrupt):
            exc.args = ("publishing was begun and is not complete",)
        exc.add_note("run the same command with --resume to finish publishing")
    if _earlier(staging.folder) is not None:
        remove_unfinished(staging.folder)
    else:
        staging.remove()


def _remove_after(staging: Staging) -> None:
    """Remove what a run needed that has published everything."""
    try:
        staging.finish()
    except KeyboardInterrupt as exc:
        exc.args = ("everything is published, but not all temporary files are removed",)
        exc.add_note("run the same command with --resume to remove them")
        raise


def _explain(exc: BaseException, folder: str) -> None:
    """Name the place that users know, and say what helps."""
    if isinstance(exc, OSError):
        if exc.filename is None or str(exc.filename).startswith(folder):
            exc.filename = os.path.dirname(folder)
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            exc.add_note("make room there")


def _recorded_part(name: str, paths: Sequence[str]) -> Part:
    shards = [kept(path, check=False) for path in paths]
    if None in shards:
        raise ValueError("the unfinished run is damaged; start over with --overwrite")
    return Part(name, [shard for shard in shards if shard is not None])


def is_being_published(destination: str) -> bool:
    """Whether a run into a local folder was stopped while it gave the shards their final names."""
    return _is_being_published(os.path.join(destination, STAGING))


def _is_being_published(folder: str) -> bool:
    return all(os.path.exists(os.path.join(folder, name)) for name in (RUN, _PUBLISHING))


def is_unfinished(destination: str) -> bool:
    """Whether a run into a local folder can be resumed."""
    return _earlier(os.path.join(destination, STAGING)) is not None


def remove_remains(folder: str, destination: str) -> None:
    """Remove the staging folder of a run that published everything and was stopped while it cleaned up.

    Raises:
        UsageError: another run is active there.
        OSError: it cannot be removed.
    """
    if os.path.isdir(folder):
        with _locked_folder(folder, destination):
            if _earlier(folder) is None:
                _remove(folder)


@contextmanager
def _locked_folder(folder: str, destination: str) -> Iterator[int]:
    """Create the folder and hold its lock; refuse a folder that no run of this user made."""
    parent = os.path.dirname(folder)
    os.makedirs(parent, exist_ok=True)
    with tempfile.TemporaryFile(dir=parent) as file:  # some mounts give all files to another user than this process's
        user = os.fstat(file.fileno()).st_uid
    while True:
        with suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        if os.path.islink(folder):
            raise UsageError(f"{folder!r} is a symbolic link, and is left as it is; remove it")
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            _lock(lock, destination)
            if _is_at(lock, folder):  # else the run that had the lock has ended and removed the folder
                names = os.listdir(lock)
                if os.fstat(lock).st_uid != user or (names and _MADE_BY_A_RUN not in names):
                    raise UsageError(f"{folder!r} was not made by a run of this user, and is left as it is; remove it")
                with open(os.path.join(folder, _MADE_BY_A_RUN), "wb"):
                    pass
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


def _lock(descriptor: int, destination: str) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UsageError(f"another shardify is writing to {destination!r}; wait until it ends") from None
            time.sleep(0.02)


def _noted(folder: str, name: str) -> Any:
    try:
        with open(os.path.join(folder, name), "rb") as file:
            return json.load(file)
    except FileNotFoundError:
        return None


def _earlier(folder: str) -> dict[str, Any] | None:
    """The record of a run that has finished something in a folder."""
    try:
        before = _noted(folder, RUN)
        if not has_finished(folder) and _noted(folder, _PUBLISHING) is None:
            return None
    except ValueError:
        return None
    return before if isinstance(before, dict) else None


def has_finished(folder: str) -> bool:
    """Whether a staging folder holds anything that a later run may use."""
    return any(name.endswith(DONE) for _, _, names in os.walk(folder) for name in names)


def remove_unfinished(folder: str) -> None:
    """Remove the hidden files of shards that were being written."""
    for top, _, names in os.walk(folder):
        for name in names:
            if name.startswith("."):
                os.unlink(os.path.join(top, name))


def clear(folder: str) -> None:
    """Remove everything in a folder, starting with what makes it a run that can be resumed. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, RUN))
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif entry.name != _MADE_BY_A_RUN:
                os.unlink(entry.path)


def _remove(folder: str) -> None:
    """Remove a folder, the mark that a run made it last. Raises OSError."""
    clear(folder)
    os.unlink(os.path.join(folder, _MADE_BY_A_RUN))
    os.rmdir(folder)

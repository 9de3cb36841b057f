"""`shardify` at its edges: what is kept for a later run, what is removed, and what is waited for."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from image_folders import files_below, images, pack, packed_samples

from streamload.index.unfinished import STAGING
from streamload.pack import packing, publishing, source_to_shards, staging, work

JOINING = ["--resize", 4, "--max-count", 2, "--workers", 1]


def stopped_at(
    call: int,
    owner: object,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    source: Path,
    dest: Path,
    *options: object,
    **limits: int,
) -> str:
    """Ctrl-C at one call of a function; standard error."""
    real, calls = getattr(owner, name), []

    def interrupted(*arguments: object, **named: object) -> object:
        calls.append(name)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        status, _, err = pack(source, dest, *options, **limits)
    assert status == 130
    return err


def test_another_order_of_the_splits_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    options = ["--max-count", 2, "--workers", 1]
    stopped_at(3, work, "keep", monkeypatch, source, dest, *options, "--split", "a=0.5,b=0.5")
    status, _, err = pack(source, dest, *options, "--split", "b=0.5,a=0.5", "--resume")
    assert status == 2
    assert "--split was [['a', 0.5], ['b', 0.5]] and is [['b', 0.5], ['a', 0.5]]" in err


def test_a_kept_shard_is_the_one_that_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    stopped_at(4, work, "keep", monkeypatch, source, dest, "--max-count", 2, "--workers", 1)
    folder = dest / STAGING / "shards" / "all"
    for end in ("", ".table", ".done"):  # whole, but in the place of another
        shutil.copy(folder / f"shard-000000.tar{end}", folder / f"shard-000001.tar{end}")
    assert pack(source, dest, "--max-count", 2, "--resume")[0] == 0
    assert pack(source, tmp_path / "whole", "--max-count", 2)[0] == 0
    assert files_below(dest) == files_below(tmp_path / "whole")


@pytest.mark.parametrize("damage", [lambda record: record.unlink(), lambda record: record.write_bytes(b"")])
def test_a_piece_without_its_record_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: object) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    stopped_at(3, work, "scanned_table", monkeypatch, source, dest, *JOINING, piece_files=3)
    damage(dest / STAGING / "pieces" / "all" / "shard-000002.tar.done")  # type: ignore[operator]
    status, _, err = pack(source, dest, *JOINING, "--resume", piece_files=3)
    assert status == 1
    assert "what was packed before is missing or damaged; start over with --overwrite" in err
    assert not list(dest.glob("*.tar"))
    assert pack(source, dest, *JOINING, "--overwrite")[0] == 0
    assert len(packed_samples(dest)) == 12


def test_a_split_that_became_empty_loses_its_old_shards(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert pack(source, dest, "--split", "train=0.5,val=0.5")[0] == 0
    (dest / "val" / "notes.txt").write_text("not from here")
    status, out, _ = pack(source, dest, "--split", "train=1,val=0", "--overwrite")
    assert (status, "val:" in out) == (0, False)
    assert [name for name in files_below(dest) if name.startswith("val")] == ["val/notes.txt"]
    assert len(packed_samples(dest / "train")) == 12
    assert pack(source, tmp_path / "other", "--split", "train=1,val=0")[0] == 0
    assert os.listdir(tmp_path / "other") == ["train"]


def test_a_lock_on_a_folder_that_was_removed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    real, removed = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        if not removed and os.path.samestat(os.fstat(descriptor), os.stat(dest / STAGING)):
            removed.append(descriptor)
            os.rename(dest / STAGING, tmp_path / "gone")  # another run ends just before
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    seen: list[bool] = []
    real_pack = source_to_shards.pack

    def packing(*arguments: object) -> object:
        held = arguments[3].lock  # type: ignore[attr-defined]
        seen.append(os.path.samestat(os.fstat(held), os.stat(dest / STAGING)))
        return real_pack(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(source_to_shards, "pack", packing)
    assert pack(source, dest)[0] == 0
    assert (len(removed), seen) == (1, [True])


def test_shards_that_another_run_publishes_meanwhile_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    real = source_to_shards.list_files

    def list_files(found: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(source_to_shards, "list_files", real)
            assert pack(source, dest, "--seed", 1)[0] == 0
        return real(found)  # type: ignore[arg-type]

    monkeypatch.setattr(source_to_shards, "list_files", list_files)
    status, _, err = pack(source, dest)
    assert status == 2
    assert "holds 1 shard already; replace them with --overwrite" in err
    monkeypatch.undo()
    assert pack(source, tmp_path / "whole", "--seed", 1)[0] == 0
    assert files_below(dest) == files_below(tmp_path / "whole")


def test_a_disk_that_takes_a_part_of_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = images(tmp_path)
    assert pack(source, tmp_path / "whole", *JOINING)[0] == 0
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:700]))
    assert pack(source, tmp_path / "dest", *JOINING)[0] == 0
    assert files_below(tmp_path / "dest") == files_below(tmp_path / "whole")


def test_a_shard_that_cannot_be_joined_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "write", full)
        work.do(work.JoinTask(str(tmp_path / "shard.tar"), (), False), lambda items, item_bytes: None)
    assert os.listdir(tmp_path) == []


def test_shards_of_a_run_that_did_not_wait_for_the_disk_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, dest = images(tmp_path), tmp_path / "new" / "dest"
    options = ["--max-count", 2, "--workers", 1, "--split", "a=1"]
    stopped_at(5, work, "keep", monkeypatch, source, dest, *options)
    real, synced = os.fsync, []

    def fsync(descriptor: int) -> None:
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert pack(source, dest, *options, "--sync", "--resume")[0] == 0
    names = {os.path.basename(path) for path in synced}
    assert {f"shard-{number:06d}.tar" for number in range(6)} <= names
    assert {str(dest), str(tmp_path / "new"), str(tmp_path)} <= set(synced)
    after_index = synced[synced.index(str(dest / "a" / ".streamload")) :]
    assert str(dest / "a") in after_index


def test_ctrl_c_while_publishing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    err = stopped_at(1, publishing, "write_index", monkeypatch, source, dest)
    assert err.splitlines()[-1] == (
        "interrupted: publishing was begun and is not complete; run the same command with --resume to finish publishing"
    )
    assert pack(source, dest, "--resume")[0] == 0
    assert len(packed_samples(dest)) == 12
    err = stopped_at(1, staging.shutil, "rmtree", monkeypatch, source, dest, "--overwrite")
    assert "interrupted: everything is published, but not all temporary files are removed" in err


def test_a_resized_image_that_is_too_large_for_a_shard_ends_the_run(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    options = ["--resize", 100, "--workers", 1]
    status, _, err = pack(source, dest, *options, "--max-bytes", 2000)
    assert status == 1
    needed = int(err.split("raise --max-bytes to ")[1].split()[0])
    assert "--resume" not in err
    assert not dest.exists()
    assert pack(source, dest, *options, "--max-bytes", needed - 1)[0] == 1
    assert pack(source, dest, *options, "--max-bytes", needed)[0] == 0


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ([], 1),
        (["--max-count", 5], 3),
        (["--max-bytes", 5000], None),
        (["--resize", 4, "--max-count", 1], 3),
        (["--split", "a=0.5,b=0.5", "--skip-bad", "--max-count", 1], 1),
    ],
)
def test_no_more_processes_are_started_than_there_are_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[object], processes: int | None
) -> None:
    source, requested = images(tmp_path), []
    if processes is None:
        processes = -(-sum(map(len, files_below(source).values())) // 5000)
        assert processes > 1
    monkeypatch.setattr(packing.Workforce, "start", lambda self, number: requested.append(number))
    assert pack(source, tmp_path / "dest", *options, piece_files=5, many_files=12)[0] == 0
    assert requested == [processes]


def test_processes_are_started_up_to_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def launch(module: str, **_: object) -> SimpleNamespace:
        made.append(module)
        return SimpleNamespace(socket=None)

    monkeypatch.setattr(packing, "launch", launch)
    for workers, tasks, wanted in ((4, 2, 2), (4, 1, 0), (3, 9, 3), (1, 9, 0)):
        made.clear()
        packing.Workforce(workers, 7).start(tasks)
        assert len(made) == wanted


def test_a_full_disk_before_anything_is_packed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("streamload.pack.sources.listing.Listing.save", full)
    status, _, err = pack(source, dest)
    assert status == 1
    assert f"error: {dest}: No space left on device; make room there\n" in err
    assert not dest.exists()

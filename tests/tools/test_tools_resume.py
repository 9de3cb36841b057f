"""What `--resume` makes of a run of `shardify` that was stopped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from image_folders import files_below, image_bytes, images, pack, packed_samples

from streamload.index.unfinished import STAGING
from streamload.pack import packing, source_to_shards, work
from streamload.write.shard_file import ShardFile


def stopped_in_the_middle(source: Path, dest: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> str:
    """Ctrl-C while the fifth shard is packed; standard error."""
    real, calls = work.keep, []

    def interrupted(*finished: object) -> None:
        calls.append(finished)
        if len(calls) == 5:
            half = dest / STAGING / "shards" / "all" / ".shard-000009.tar.1-1.partial"
            half.write_bytes(b"what a killed worker leaves")
            raise KeyboardInterrupt
        real(*finished)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(work, "keep", interrupted)
        status, out, err = pack(source, dest, "--max-count", 2, "--workers", 1, *options)
    assert (status, out) == (130, "")
    return err


def test_ctrl_c_is_one_line_and_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    err = stopped_in_the_middle(source, dest, monkeypatch)
    assert [line for line in err.splitlines() if not line.startswith("packing")] == [
        "interrupted: no unfinished shard is published; what is finished is kept: run the same command with "
        "--resume to go on, or with --overwrite to start over"
    ]
    assert os.listdir(dest) == [STAGING]
    assert not [*dest.rglob("*.partial")]
    packed: list[str] = []
    monkeypatch.setattr(work, "ShardFile", lambda path: packed.append(path) or ShardFile(path))
    assert pack(source, dest, "--max-count", 2, "--workers", 1, "--resume")[0] == 0
    assert [os.path.basename(path) for path in packed] == ["shard-000004.tar", "shard-000005.tar"]
    assert pack(source, tmp_path / "whole", "--max-count", 2)[0] == 0
    assert files_below(dest) == files_below(tmp_path / "whole")


def test_a_run_that_was_stopped_is_not_thrown_away_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    stopped_in_the_middle(source, dest, monkeypatch)
    before = files_below(dest)
    status, _, err = pack(source, dest, "--max-count", 2)
    assert (status, files_below(dest)) == (2, before)
    assert "holds a run that was not finished; go on with --resume, or discard it with --overwrite" in err
    assert pack(source, dest, "--max-count", 3, "--overwrite")[0] == 0
    assert STAGING not in os.listdir(dest)
    assert len(list(dest.glob("*.tar"))) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda source: (source / "cat" / "9.jpg").write_bytes(image_bytes(1)), "9.jpg' is new"),
        (lambda source: (source / "cat" / "0.jpg").unlink(), "0.jpg' is gone"),
        (lambda source: (source / "cat" / "0.jpg").write_bytes(image_bytes(77)), "1 file changed since"),
        (lambda source: ["--seed", 3], "--seed was 0 and is 3"),
        (lambda source: ["--resize", 4], "--resize was None and is 4"),
    ],
)
def test_another_source_or_other_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: object, message: str
) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    stopped_in_the_middle(source, dest, monkeypatch)
    before = files_below(dest)
    options = change(source)  # type: ignore[operator]
    status, _, err = pack(source, dest, "--max-count", 2, "--resume", *(options if isinstance(options, list) else ()))
    assert (status, files_below(dest)) == (2, before)
    assert message in err
    assert "start over with --overwrite" in err
    assert err.count("error:") == 1


def test_a_kept_shard_that_was_damaged_is_packed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    stopped_in_the_middle(source, dest, monkeypatch)
    shard = next(dest.rglob("shard-000001.tar"))
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    assert pack(source, dest, "--max-count", 2, "--resume")[0] == 0
    assert pack(source, tmp_path / "whole", "--max-count", 2)[0] == 0
    assert files_below(dest) == files_below(tmp_path / "whole")


def test_resuming_where_there_is_nothing_to_resume(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    (dest / STAGING / "shards" / "all").mkdir(parents=True)
    (dest / STAGING / "made-by-a-run").touch()
    (dest / STAGING / "shards" / "all" / ".shard-000000.tar.1-1.partial").write_bytes(b"half")
    status, _, err = pack(source, dest, "--resume")
    assert status == 0
    assert "note: there is no unfinished run to resume; packing from the start" in err
    before = files_below(dest)
    assert STAGING not in os.listdir(dest)
    status, out, err = pack(source, dest, "--resume")
    assert (status, out, files_below(dest)) == (0, "", before)
    assert "holds 1 shard already" in err


def test_two_runs_do_not_meet_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    seen: list[tuple[int, str, str]] = []
    real = packing.pack

    def meanwhile(*arguments: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(source_to_shards, "pack", real)
            seen.append(pack(source, dest, "--overwrite"))
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(source_to_shards, "pack", meanwhile)
    assert pack(source, dest)[0] == 0
    assert seen[0][0] == 2
    assert "another shardify is writing" in seen[0][2]
    assert len(packed_samples(dest)) == 12


@pytest.mark.parametrize("kind", ["a link", "a link to a run's folder", "files of the user"])
@pytest.mark.parametrize("option", [(), ("--overwrite",), ("--resume",)])
def test_a_folder_that_no_run_made_is_neither_cleared_nor_packed_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, option: tuple[str, ...]
) -> None:
    source, dest, theirs = images(tmp_path), tmp_path / "dest", tmp_path / "theirs"
    if kind == "a link to a run's folder":
        stopped_in_the_middle(source, theirs, monkeypatch)
        theirs /= STAGING
    else:
        theirs.mkdir()
        (theirs / "shards").mkdir()
        (theirs / "shards" / "thesis.txt").write_text("all of it")
    dest.mkdir()
    if kind == "files of the user":
        theirs = theirs.rename(dest / STAGING)
    else:
        (dest / STAGING).symlink_to(theirs)
    before = files_below(theirs)
    status, _, err = pack(source, dest, "--max-count", 2, *option)
    assert (status, files_below(theirs)) == (2, before)
    assert (
        f"{str(dest / STAGING)!r} {'is a symbolic link' if kind != 'files of the user' else 'was not made by'}" in err
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders to others")
def test_the_folder_of_another_users_run_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    stopped_in_the_middle(source, dest, monkeypatch)
    os.chown(dest / STAGING, 12345, 12345)
    before = files_below(dest)
    status, _, err = pack(source, dest, "--max-count", 2, "--overwrite")
    assert (status, files_below(dest)) == (2, before)
    assert "was not made by a run of this user" in err


@pytest.mark.parametrize("options", [[], ["--resize", 4]])
def test_only_with_sync_is_the_disk_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[object]
) -> None:
    source, synced = images(tmp_path), []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert pack(source, tmp_path / "a", *options)[0] == 0
    assert synced == []
    assert pack(source, tmp_path / "b", "--sync", *options)[0] == 0
    names = [".shard-000000.tar", ".classes.json", "b", ".tables-", ".index.json", ".streamload"]
    assert all(any(found.startswith(name) for found in synced) for name in names)
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b")


def test_a_finished_dataset_is_resumed_with_its_own_options_only(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert pack(source, dest, "--max-count", 2)[0] == 0
    before = files_below(dest)
    status, _, err = pack(source, dest, "--max-count", 2, "--resume")
    assert (status, "there is no unfinished run to resume" in err) == (0, True)
    status, _, err = pack(source, dest, "--max-count", 3, "--seed", 4, "--resume")
    assert status == 2
    assert "packed with other options: --max-count was 2 and is 3, --seed was 0 and is 4; to pack again, " in err
    assert files_below(dest) == before
    assert pack(source, dest, "--max-count", 3, "--seed", 4, "--overwrite")[0] == 0
    assert pack(source, dest, "--max-count", 3, "--seed", 4, "--resume")[0] == 0

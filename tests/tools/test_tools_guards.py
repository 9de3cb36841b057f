"""`shardify` at its edges: what is kept for a later run, what is removed, and what is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from image_folders import files_below, images, pack, packed_samples

from streamload.pack import source_to_shards

JOINING = ["--resize", 4, "--max-count", 2, "--workers", 1]


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

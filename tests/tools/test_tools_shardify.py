"""`shardify` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from image_folders import files_below, image_bytes, image_folder, images, pack, packed_samples, packs, refusal
from matrix import exhaustive

from streamload import ShardWriter
from streamload.pack.source_to_shards import open_source
from streamload.pack.sources.loading import load
from streamload.pack.sources.source import SourceFile, SourceOptions

CLASSES = {"classes": ["bee", "cat"], "class_to_idx": {"bee": 0, "cat": 1}}


def test_every_image_is_packed_untouched_with_its_label(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "new" / "dest"
    out, _ = packs(source, dest, "--max-count", 5)
    expected = {
        os.path.splitext(path)[0]: {os.path.splitext(path)[1][1:]: data, "cls": b"01"[cls : cls + 1]}
        for path, data in files_below(source).items()
        for cls in (int(path.startswith("cat")),)
    }
    assert packed_samples(dest) == expected
    assert list(packed_samples(dest)) != sorted(expected)
    assert json.loads((dest / "classes.json").read_text()) == CLASSES
    assert sorted(os.listdir(dest)) == [".streamload", "classes.json", *(f"shard-00000{n}.tar" for n in range(3))]
    assert "packed 3 shards, 12 samples" in out
    transform = 'transform={"jpg;png": RandomResizedCrop(224)}'
    assert f'StreamLoader(\'{dest}\', batch_size=64, shuffle=True, fields=("jpg;png", "cls"), {transform})' in out


def test_splits_are_datasets_of_their_own(tmp_path: Path) -> None:
    source, dest = images(tmp_path, 10), tmp_path / "dest"
    out, _ = packs(source, dest, "--split", "train=0.8,val=0.15,test=0.05")
    parts = {name: packed_samples(dest / name) for name in ("train", "val", "test")}
    assert sum(len(part) for part in parts.values()) == 20 == len({key for part in parts.values() for key in part})
    for name, part in parts.items():
        assert len({key.split("/")[0] for key in part}) == 2
        assert json.loads((dest / name / "classes.json").read_text()) == CLASSES
        assert f"{name}: 1 shard, {len(part)} samples" in out
    assert sorted(os.listdir(dest)) == ["test", "train", "val"]
    assert f"StreamLoader('{dest}/train'" in out


def with_faults(source: Path) -> Path:
    (source / "cat" / "notes.txt").write_text("x")
    (source / "cat" / "empty.jpg").write_bytes(b"")
    (source / "cat" / "page.png").write_text("<html>")
    (source / "bee" / "cut.jpg").write_bytes(image_bytes(1)[:-20])
    (source / "bee" / "gone.jpg").symlink_to("nowhere")
    os.mkfifo(source / "bee" / "pipe.jpg")
    return source


FAULTS = ["notes.txt", "empty.jpg", "page.png", "cut.jpg", "gone.jpg", "pipe.jpg"]


def test_files_that_are_no_images_are_all_named_and_nothing_is_left(tmp_path: Path) -> None:
    source, dest = with_faults(images(tmp_path)), tmp_path / "dest"
    err = refusal(source, dest, status=1)
    assert all(sum(f"/{name}: " in line for line in err.splitlines()) == 1 for name in FAULTS)
    assert "error: 6 of 18 files are damaged or of an unexpected type; " in err


SPLIT = ["--split", "train=0.5,val=0.5"]


def test_overwriting_replaces_everything_of_ours(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert pack(source, dest, "--max-count", 2)[0] == 0
    (dest / "mine.txt").write_text("stays")
    assert "already holds 6 shards; replace them with --overwrite" in refusal(source, dest)
    assert pack(source, dest, "--overwrite", "--max-count", 7)[0] == 0
    assert (dest / "mine.txt").read_text() == "stays"
    assert len(list(dest.glob("*.tar"))) == 2
    assert len(packed_samples(dest)) == 12
    index, tables = sorted(os.listdir(dest / ".streamload"))
    assert (index, tables.startswith("tables-")) == ("index.json", True)


def test_another_split_does_not_stay_beside_the_new_ones(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert pack(source, dest, "--split", "train=0.5,test=0.5")[0] == 0
    err = refusal(source, dest, "--split", "train=0.5,val=0.5", "--overwrite")
    assert f"'{dest}/test' holds shards outside this run's splits; choose another DEST" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "dest"], "does not exist"),
        (["source/cat/0.jpg", "dest"], "is a file"),
        (["empty", "dest"], "no class folder"),
        (["source", "dest", "--stems", "--labels", "source/cat/0.jpg"], "--stems would have no effect"),
        (["source", "source/dest"], "lies in SOURCE"),
        (["source", "source"], "lies in SOURCE"),
        (["link", "source/dest"], "lies in SOURCE"),
        (["source", "source/cat/0.jpg"], "is a file"),
        (["source", "file"], "is a file"),
        (["s3://bucket/x", "dest"], "local files only"),
        (["source", "https://127.0.0.1/x"], "cannot be written to"),
        (["source", "s3://"], "not name a bucket"),
        (["source", "dest", "--max-bytes", "many"], "--max-bytes"),
        (["source", "dest", "--split", "train=0.5"], "add up to 0.5"),
        (["source", "dest", "--max-count", "0"], "max-count"),
        (["source"], "dest"),
    ],
)
def test_wrong_use_is_one_message_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    images(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("source")
    monkeypatch.chdir(tmp_path)
    before = files_below(tmp_path)
    status, out, err = pack(*arguments)
    assert (status, out) == (2, "")
    assert message.lower() in err.lower()
    assert err.lower().count("error") == 1
    assert "Traceback" not in err
    assert files_below(tmp_path) == before


def test_an_image_larger_than_a_shard_names_itself(tmp_path: Path) -> None:
    err = refusal(images(tmp_path), tmp_path / "dest", "--max-bytes", "1KB", status=1)
    assert "a shard may have 1,000; raise --max-bytes" in err


def test_as_a_program_of_its_own(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    command = [sys.executable, "-W", "error", "-m", "streamload.cli.shardify", str(source), str(dest)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "\npacking: 12 of 12 samples" in done.stderr
    assert len(packed_samples(dest)) == 12
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize("options", [*map(exhaustive, [([],), (["--skip-bad"],), (SPLIT,)]), ["--skip-bad", *SPLIT]])
def test_the_shards_do_not_depend_on_the_number_of_workers(tmp_path: Path, options: list[str]) -> None:
    source = images(tmp_path, 20)
    if "--skip-bad" in options:
        with_faults(source)
    for workers in (1, 3):
        packs(source, tmp_path / str(workers), "--max-bytes", "12KB", "--workers", workers, *options)
    assert files_below(tmp_path / "1") == files_below(tmp_path / "3")


def test_shards_are_cut_where_a_shard_writer_cuts_them(tmp_path: Path) -> None:
    source = images(tmp_path, 20)
    long_name = "ü" + "x" * 90
    image_folder(source, f"bee/{long_name}.jpg", f"cat/{long_name}/y.jpg")
    assert pack(source, tmp_path / "dest", "--max-bytes", "11KB", "--max-count", 9, "--no-shuffle")[0] == 0
    with ShardWriter(tmp_path / "written", max_bytes=11_000, max_count=9) as writer:
        for sample in open_source(str(source), SourceOptions()).samples:
            (file,) = sample.members
            data = Path(file.path).read_bytes()
            writer.write({"__key__": sample.key, str(file.field): data, "cls": sample.label})
    packed = files_below(tmp_path / "dest")
    del packed["classes.json"]
    assert packed == files_below(tmp_path / "written")


def test_a_shard_that_loses_all_its_images_is_not_written(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", *(f"a/{number}.jpg" for number in range(6)))
    for number in (2, 3):
        (source / "a" / f"{number}.jpg").write_bytes(b"")
    assert pack(source, tmp_path / "dest", "--max-count", 2, "--no-shuffle", "--skip-bad")[0] == 0
    assert sorted(path.name for path in (tmp_path / "dest").glob("*.tar")) == ["shard-000000.tar", "shard-000002.tar"]
    assert list(packed_samples(tmp_path / "dest")) == ["a/0", "a/1", "a/4", "a/5"]


def test_a_file_that_changes_while_it_is_packed_is_named(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", "a/0.jpg")
    file = open_source(str(source), SourceOptions()).samples[0].members[0]
    assert isinstance(file, SourceFile)
    with pytest.raises(ValueError, match=f"it had 10,000 bytes when packing began, but has {file.size} now"):
        load(file._replace(size=10_000))


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

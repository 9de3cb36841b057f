"""`shardify` as a user runs it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from image_folders import files_below, image_bytes, image_folder, images, pack, packed_samples
from streamload_tools import packing
from streamload_tools.imagefolder import find_images
from streamload_tools.progress import LineProgress

CLASSES = {"classes": ["bee", "cat"], "class_to_idx": {"bee": 0, "cat": 1}}


def test_every_image_is_packed_untouched_with_its_label(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "new" / "dest"
    status, out, _ = pack(source, dest, "--max-count", 5)
    assert status == 0
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


def test_the_same_images_give_the_same_bytes_and_another_seed_others(tmp_path: Path) -> None:
    source = images(tmp_path)
    for name, options in (("a", []), ("b", []), ("c", ["--seed", 1]), ("d", ["--no-shuffle"])):
        assert pack(source, tmp_path / name, "--max-count", 5, *options)[0] == 0
    a, b, c, d = (files_below(tmp_path / name) for name in "abcd")
    assert a == b
    assert c["shard-000000.tar"] != a["shard-000000.tar"] != d["shard-000000.tar"]
    assert list(packed_samples(tmp_path / "d")) == sorted(packed_samples(tmp_path / "d"))


def test_splits_are_datasets_of_their_own(tmp_path: Path) -> None:
    source, dest = images(tmp_path, 10), tmp_path / "dest"
    status, out, _ = pack(source, dest, "--split", "train=0.8,val=0.15,test=0.05")
    assert status == 0
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


def test_files_that_are_no_images_are_named_and_nothing_is_published(tmp_path: Path) -> None:
    source, dest = with_faults(images(tmp_path)), tmp_path / "dest"
    status, out, err = pack(source, dest)
    assert status == 1
    assert out == ""
    assert all(sum(f"/{name}: " in line for line in err.splitlines()) == 1 for name in FAULTS)
    assert "error: 6 of 18 files are no whole images, so nothing was published" in err
    assert not dest.exists()


def test_writing_ends_with_the_first_fault_and_checking_goes_on(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", *(f"a/{number}.jpg" for number in range(5)))
    (source / "a" / "1.jpg").write_bytes(b"")
    (source / "a" / "4.jpg").write_bytes(b"")
    files, progress = find_images(str(source)).files, LineProgress("packing", 5, "images", io.StringIO())
    packed, faults = packing.pack(
        {"": files}, str(tmp_path / "staging"), progress, max_bytes=10**6, max_count=None, skip_faults=False
    )
    assert [os.path.basename(fault.path) for fault in faults] == ["1.jpg", "4.jpg"]
    assert [part.writer.samples for part in packed] == [1]


SPLIT = ["--split", "train=0.5,val=0.5"]


@pytest.mark.parametrize("options", [[], SPLIT])
def test_files_that_are_no_images_can_be_left_out(tmp_path: Path, options: list[str]) -> None:
    source, dest = with_faults(images(tmp_path)), tmp_path / "dest"
    status, out, err = pack(source, dest, "--skip-bad", *options)
    assert status == 0
    assert "6 files left out" in out
    assert all(err.count(f"/{name}: ") == 1 for name in FAULTS)
    folders = [dest / "train", dest / "val"] if options else [dest]
    assert [len(packed_samples(folder)) for folder in folders] == [12 // len(folders)] * len(folders)


def test_bad_images_do_not_take_a_class_out_of_a_split(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", *(f"a/{n}.jpg" for n in range(6)))
    for bad in [(0, 1, 2, 3), (2, 3, 4, 5), (0, 2, 3, 5)]:
        image_folder(tmp_path / "source", *(f"a/{n}.jpg" for n in range(6)))
        for n in bad:
            (source / "a" / f"{n}.jpg").write_bytes(b"")
        dest = tmp_path / f"dest{bad}"
        assert pack(source, dest, "--skip-bad", "--split", "x=0.5,y=0.5")[0] == 0
        assert [len(packed_samples(dest / name)) for name in "xy"] == [1, 1]


def test_at_most_twenty_faults_are_listed(tmp_path: Path) -> None:
    source = images(tmp_path)
    for number in range(25):
        (source / "cat" / f"x{number}.txt").write_text("x")
    status, _, err = pack(source, tmp_path / "dest")
    assert status == 1
    assert err.count("its extension is not that of an image") == 20
    assert "... and 5 more" in err


@pytest.mark.parametrize("options", [[], SPLIT])
def test_nothing_but_bad_images_is_a_failure(tmp_path: Path, options: list[str]) -> None:
    source = image_folder(tmp_path / "source", "a/0.jpg")
    (source / "a" / "0.jpg").write_bytes(b"")
    status, _, err = pack(source, tmp_path / "dest", "--skip-bad", *options)
    assert status == 1
    assert "no image is left" in err
    assert not (tmp_path / "dest").exists()


def test_overwriting_replaces_everything_of_ours(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert pack(source, dest, "--max-count", 2)[0] == 0
    (dest / "mine.txt").write_text("stays")
    before = files_below(dest)
    status, _, err = pack(source, dest)
    assert (status, files_below(dest)) == (2, before)
    assert "holds 6 shards already" in err
    assert "--overwrite" in err
    assert pack(source, dest, "--overwrite", "--max-count", 7)[0] == 0
    assert (dest / "mine.txt").read_text() == "stays"
    assert len(list(dest.glob("*.tar"))) == 2
    assert len(packed_samples(dest)) == 12
    assert sorted(os.listdir(dest / ".streamload")) == ["index.json", "shard-000000.tar.npz", "shard-000001.tar.npz"]


def test_what_fails_while_overwriting_leaves_the_old_shards(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert pack(source, dest)[0] == 0
    before = files_below(dest)
    assert pack(with_faults(source), dest, "--overwrite")[0] == 1
    assert files_below(dest) == before


def test_another_split_does_not_stay_beside_the_new_ones(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    assert pack(source, dest, "--split", "train=0.5,test=0.5")[0] == 0
    status, _, err = pack(source, dest, "--split", "train=0.5,val=0.5", "--overwrite")
    assert status == 2
    assert f"'{dest}/test' holds shards of another split" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "dest"], "does not exist"),
        (["source/cat/0.jpg", "dest"], "is a file"),
        (["empty", "dest"], "no class folder"),
        (["source/cat", "dest"], "belong to no class"),
        (["source", "source/dest"], "lies in SOURCE"),
        (["source", "source"], "lies in SOURCE"),
        (["link", "source/dest"], "lies in SOURCE"),
        (["source", "source/cat/0.jpg"], "lies in SOURCE"),
        (["source", "file"], "is a file"),
        (["source", "s3://bucket/x"], "local folders only"),
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
    assert status == 2
    assert out == ""
    assert message.lower() in err.lower()
    assert err.lower().count("error:") == 1
    assert "Traceback" not in err
    assert files_below(tmp_path) == before
    assert not (tmp_path / "dest").exists()


def test_an_image_larger_than_a_shard_names_itself(tmp_path: Path) -> None:
    status, _, err = pack(images(tmp_path), tmp_path / "dest", "--max-bytes", "1KB")
    assert status == 1
    assert "max_bytes is 1,000" in err
    assert not (tmp_path / "dest").exists()


def test_folders_that_look_like_splits_are_pointed_out(tmp_path: Path) -> None:
    image_folder(tmp_path / "source", "train/cat/0.jpg", "val/cat/0.jpg")
    _, _, err = pack(tmp_path / "source", tmp_path / "dest")
    assert "if these are splits, pack each of them by itself" in err


def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    seen: list[bytes] = []

    def interrupted(data: bytes) -> str | None:
        seen.append(data)
        if len(seen) == 7:
            raise KeyboardInterrupt
        return None

    monkeypatch.setattr(packing, "fault_of_image", interrupted)
    status, out, err = pack(source, dest)
    assert (status, out) == (130, "")
    assert [line for line in err.splitlines() if not line.startswith("packing")] == [
        "interrupted: what was under way is not published, and no temporary file is left"
    ]
    assert not dest.exists()


def test_what_a_killed_run_left_is_cleared_and_a_running_one_is_not_disturbed(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    left = dest / ".shardify-unfinished" / "train"
    left.mkdir(parents=True)
    (left / "shard-000000.tar").write_bytes(b"half")
    with packing.staging_folder(str(dest)):
        status, _, err = pack(source, dest)
        assert status == 2
        assert "another shardify is writing" in err
    left.mkdir(parents=True)
    (left.parent / ".shard-000000.tar.1-1.partial").write_bytes(b"half")
    assert pack(source, dest)[0] == 0
    assert sorted(os.listdir(dest)) == [".streamload", "classes.json", "shard-000000.tar"]


def test_as_a_program_of_its_own(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    command = [sys.executable, "-W", "error", "-m", "streamload_tools.shardify", str(source), str(dest)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("packing: 12 of 12 images")
    assert len(packed_samples(dest)) == 12
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "Traceback" not in again.stderr


def test_a_real_ctrl_c(tmp_path: Path) -> None:
    source, dest = images(tmp_path), tmp_path / "dest"
    os.mkfifo(tmp_path / "gate")
    # The program stops at a pipe that nobody opens for writing, so that it is surely at work when the signal comes.
    program = (
        "import sys, streamload_tools.packing as p, streamload_tools.shardify as s\n"
        "p.publish = lambda *a: open(sys.argv.pop())\n"
        "s.publish = p.publish\n"
        "print('ready', flush=True)\n"
        "gate = sys.argv.pop()\n"
        "s.publish = lambda *a: (print('publishing', flush=True), open(gate))\n"
        "s.main()\n"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(source), str(dest), str(tmp_path / "gate")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline() == "publishing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err
    assert out == ""
    assert not dest.exists()

"""Folders that `shardify` packs: class folders, files that share a stem, folders that pair, and splits of these."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from image_folders import files_below, image_bytes, image_folder, pack, packed_samples, packs, refusal
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from streamload import StreamLoader


def sixteen_bits() -> bytes:
    """A PNG of 16 bits, which loaders do not decode by default."""
    buffer = io.BytesIO()
    Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 999).save(buffer, "PNG")
    return buffer.getvalue()


def written(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def labels_in(folder: Path) -> dict[str, int]:
    return {key: int(fields["cls"]) for key, fields in packed_samples(folder).items()}


def fields_in(folder: Path) -> dict[str, list[str]]:
    return {key: sorted(fields) for key, fields in packed_samples(folder).items()}


def classes_in(folder: Path) -> list[str]:
    classes: list[str] = json.loads((folder / "classes.json").read_bytes())["classes"]
    return classes


def test_classes_are_numbered_in_the_order_of_their_names(tmp_path: Path) -> None:
    """As torchvision's ImageFolder(allow_empty=True) numbers them; links to folders are followed on request."""
    names = ("b/1.JPG", "B/2.PNG", "a/deep/er/3.jpeg", "a/0.webp", "a.b/x.y.tif", "b/4.jfif", "b/5.jpe")
    source = image_folder(tmp_path / "source", *names)
    (source / "linked").symlink_to(source / "a")
    (source / "a" / "up").symlink_to(source)
    (source / "empty").mkdir()
    _, err = packs(source, tmp_path / "dest", "--no-shuffle", "--follow-symlinks")
    assert classes_in(tmp_path / "dest") == ["B", "a", "a.b", "b", "empty", "linked"]
    assert "note: 6 classes: B, a, a.b, b, empty, linked" in err
    assert "1 empty class folder, numbered like the others: empty" in err
    assert "skipped folders that are links: 'a/up', 'linked/up'; they lead back to a folder above them" in err
    packed = packed_samples(tmp_path / "dest")
    assert list(packed) == ["B/2", "a/0", "a/deep/er/3", "a.b/x_y", "b/1", "b/4", "b/5", "linked/0", "linked/deep/er/3"]
    assert [next(iter(sample)) for sample in packed.values()] == [
        *("png", "webp", "jpg", "tif", "jpg", "jpg", "jpg", "webp", "jpg"),
    ]
    assert [int(sample["cls"]) for sample in packed.values()] == [0, 1, 1, 2, 3, 3, 3, 5, 5]
    _, _, err = pack(source, tmp_path / "without")
    assert "skipped folders that are links: 'a/up', 'linked'; --follow-symlinks follows them" in err
    assert len(packed_samples(tmp_path / "without")) == 7


def test_a_folder_of_links_alone_is_told_how_to_follow_them(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "source", "cat/1.jpg")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "cat").symlink_to(source / "cat")
    assert "holds no class folder, nor files of another layout" in (
        err := refusal(tmp_path / "links", tmp_path / "dest")
    )
    assert "skipped folders that are links: 'cat'; --follow-symlinks follows them" in err


def test_keys_are_safe_and_unlike_each_other(tmp_path: Path) -> None:
    names = ["c/a.jpg", "c/a.png", "c/a-2.jpg", "c/v1.2.jpg", "c/v1_2.jpg", "c/__x.jpg", "c.d/e.f/g.jpg", "c/n\n.jpg"]
    source = image_folder(tmp_path / "source", *names)
    Path(os.fsdecode(os.fsencode(source) + b"/c/\xff.jpg")).write_bytes(image_bytes(9))
    assert pack(source, tmp_path / "dest")[0] == 0
    key_of = {next(iter(sample.values())): key for key, sample in packed_samples(tmp_path / "dest").items()}
    keys = [key_of[image_bytes(number, Path(name).suffix)] for number, name in enumerate(names)]
    assert keys == ["c/a", "c/a-3", "c/a-2", "c/v1_2", "c/v1_2-2", "c/x__x", "c.d/e.f/g", "c/n_"]
    assert key_of[image_bytes(9)] == "c/_"


@pytest.mark.parametrize("names", [("a/0.jpg", "b/0.jpg"), ("0.jpg", "0.txt"), ("images/0.jpg", "masks/0.jpg")])
def test_what_systems_leave_in_folders_is_ignored_and_counted(tmp_path: Path, names: tuple[str, str]) -> None:
    source = image_folder(tmp_path / "source", names[0])
    folder = Path(names[0]).parent
    junk = [str(folder / name) for name in ("Thumbs.db", "desktop.ini", ".DS_Store")]
    written(source, dict.fromkeys([names[1], *junk, "__MACOSX/0.jpg"], image_bytes(1)))
    assert "note: ignored 4 hidden or system paths, such as " in packs(source, tmp_path / "dest")[1]
    assert sum(len(sample) for sample in packed_samples(tmp_path / "dest").values()) == (4 if names[0][0] == "a" else 2)


@pytest.mark.parametrize("extension", ["wav", "flac", "mp3", "npy", "txt", "nii.gz"])
def test_class_folders_of_any_kind_of_file(tmp_path: Path, extension: str) -> None:
    names = [f"cat/1.{extension}", f"bee/2.{extension}", f"bee/3.{extension}"]
    source = written(tmp_path / "source", dict.fromkeys(names, b"" if extension != "npy" else npy()))
    out, err = packs(source, tmp_path / "dest")
    assert "2 classes: bee, cat" in err
    assert labels_in(tmp_path / "dest") == {"bee/2": 0, "bee/3": 0, "cat/1": 1}
    assert f'fields=("{extension}", "cls"))' in out
    written(source, {"cat/notes.pdf": b""})
    err = refusal(source, tmp_path / "odd", status=1)
    assert "notes.pdf: its type differs from most files in the class folders" in err
    assert pack(source, tmp_path / "odd", "--skip-bad")[0] == 0
    assert labels_in(tmp_path / "odd") == {"bee/2": 0, "bee/3": 0, "cat/1": 1}


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(3))
    return buffer.getvalue()


def test_validation_packed_apart_takes_the_numbers_of_the_training_data(tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text(json.dumps({"classes": ["bee", "cat", "dog"]}))
    source = image_folder(tmp_path / "val", "cat/2.jpg", "dog/2.jpg")
    (tmp_path / "val.csv").write_text("path,label\nval/dog/2.jpg,dog\n")
    known = ("--classes", tmp_path / "classes.json")
    assert pack(source, tmp_path / "shards", *known)[0] == 0
    assert labels_in(tmp_path / "shards") == {"cat/2": 1, "dog/2": 2}
    assert classes_in(tmp_path / "shards") == ["bee", "cat", "dog"]
    assert pack(tmp_path / "val.csv", tmp_path / "of-table", *known)[0] == 0
    assert list(labels_in(tmp_path / "of-table").values()) == [2]
    image_folder(source, "cow/2.jpg")
    (tmp_path / "val.csv").write_text("path,label\nval/cow/2.jpg,cow\n")
    for where in (source, tmp_path / "val.csv"):
        assert "is 'cow', which is not in --classes (3 classes)" in refusal(where, tmp_path / "dest", *known)


@pytest.mark.parametrize(("train", "val"), [("train", "val"), ("Training", "Testing"), ("TRAIN", "Validation")])
def test_folders_named_as_splits_are_packed_as_splits_with_one_numbering(tmp_path: Path, train: str, val: str) -> None:
    names = [f"{train}/bee/1.jpg", f"{train}/cat/1.jpg", f"{train}/dog/1.jpg", f"{val}/cat/2.jpg", f"{val}/dog/2.jpg"]
    source = image_folder(tmp_path / "data", *names)
    (source / "README.md").write_text("about")
    out, err = packs(source, tmp_path / "shards")
    assert f"{train}, {val} are packed as splits of one dataset" in err
    assert f"shards/{train}" in out
    assert f"data/{val}/' has no folder for 1 class" in err
    assert labels_in(tmp_path / "shards" / train) == {"bee/1": 0, "cat/1": 1, "dog/1": 2}
    assert labels_in(tmp_path / "shards" / val) == {"cat/2": 1, "dog/2": 2}
    assert classes_in(tmp_path / "shards" / train) == classes_in(tmp_path / "shards" / val) == ["bee", "cat", "dog"]
    assert pack(source / train, tmp_path / "alone")[0] == 0
    assert files_below(tmp_path / "alone") == files_below(tmp_path / "shards" / train)
    assert "leave out --split" in refusal(source, tmp_path / "again", "--split", "train=0.5,val=0.5")


def test_splits_whose_files_have_no_classes(tmp_path: Path) -> None:
    source = image_folder(tmp_path / "data", "Training/cat/1.jpg", "Testing/1.jpg", "Testing/2.jpg")
    assert "files in Testing that share a name up to its first dot" in packs(source, tmp_path / "dest")[1]
    assert labels_in(tmp_path / "dest" / "Training") == {"cat/1": 0}
    assert fields_in(tmp_path / "dest" / "Testing") == {"1": ["jpg"], "2": ["jpg"]}
    flat = image_folder(tmp_path / "flat", "train/1.jpg", "train/1.png", "test/1.jpg")
    assert "without labels; --no-stems takes folders as classes" in packs(flat, tmp_path / "flat-dest")[1]
    assert fields_in(tmp_path / "flat-dest" / "train") == {"1": ["jpg", "png"]}
    assert pack(flat, tmp_path / "classes", "--no-stems")[0] == 0
    assert classes_in(tmp_path / "classes") == ["test", "train"]


@pytest.mark.parametrize(
    "names",
    [
        ("train/cat/1.jpg", "plane/fast/1.jpg"),
        ("train/cat/1.jpg", "train/dog/1.jpg"),
        ("cat/1.jpg", "dog/1.jpg"),
        ("images/1.jpg", "drawings/1.jpg"),
        ("images/1.jpg", "masks/1.png", "--no-stems"),
    ],
)
def test_folders_that_only_look_like_splits_or_pairs_are_classes(tmp_path: Path, names: tuple[str, ...]) -> None:
    names, options = names[:2], names[2:]
    assert pack(image_folder(tmp_path / "data", *names), tmp_path / "shards", *options)[0] == 0
    assert classes_in(tmp_path / "shards") == sorted({name.split("/")[0] for name in names})


@pytest.mark.parametrize(
    ("names", "options", "samples"),
    [
        (["images/1.jpg", "masks/1.png", "images/2.jpg"], [], {"1": ["jpg", "masks.png"], "2": ["jpg"]}),
        (["Images/a/1.jpg", "Labels/a/1.txt"], [], {"a/1": ["jpg", "labels.txt"]}),
        (["photos/1.jpg", "words/1.txt"], [], {"1": ["jpg", "words.txt"]}),
        (["words/1.txt", "sounds/1.wav"], [], {"1": ["wav", "words.txt"]}),
        (["images/1.jpg", "masks/1.png"], ["--stems"], {"1": ["jpg", "masks.png"]}),
        (["JPEGImages/1.jpg", "Annotations/1.xml", "ImageSets/train.txt"], [], {"1": ["annotations.xml", "jpg"]}),
    ],
)
def test_folders_that_hold_the_same_stems_are_parts_of_samples(
    tmp_path: Path, names: list[str], options: list[str], samples: dict[str, list[str]]
) -> None:
    source = written(tmp_path / "data", {name: image_bytes(1, ".jpg") for name in names})
    out, err = packs(source, tmp_path / "dest", *options)
    assert fields_in(tmp_path / "dest") == samples
    assert ("left out 1 file outside of packed folders, such as 'ImageSets/" in err) == ("ImageSets/train.txt" in names)
    if "masks/1.png" in names:
        assert 'fields=("jpg", "masks.png"))' in out or "1 without 'masks.png'" in out


def test_a_single_class_of_several_folders_is_said(tmp_path: Path) -> None:
    image_folder(tmp_path / "data", "photos/cat/1.jpg", "photos/dog/1.jpg")
    assert "'photos' is the only class; if the folders in it are" in packs(tmp_path / "data", tmp_path / "dest")[1]


@pytest.mark.parametrize("names", ["{}/images/1.jpg {}/masks/1.png", "images/{}/1.jpg masks/{}/1.png"])
def test_splits_of_folders_that_pair(tmp_path: Path, names: str) -> None:
    image_folder(tmp_path / "data", *f"{names} {names}".format("train", "train", "val", "val").split())
    assert pack(tmp_path / "data", tmp_path / "dest")[0] == 0
    for part in ("train", "val"):
        assert fields_in(tmp_path / "dest" / part) == {"1": ["jpg", "masks.png"]}


FILES = {
    "0.jpg": image_bytes(0),
    "0.txt": b"zero",
    "0.mask.png": sixteen_bits(),
    "0.json": b'{"a": 1}',
    "1.JPEG": image_bytes(1),
    "1.txt": b"",
    "1.cls": b" 7\n",
    "deep/er.x/2.wav": b"RIFF",
    "deep/er.x/2.tokens.npy.gz": b"what it is",
}
SAMPLES = {
    "0": {"jpg": FILES["0.jpg"], "json": FILES["0.json"], "mask.png": FILES["0.mask.png"], "txt": b"zero"},
    "1": {"jpg": FILES["1.JPEG"], "txt": b"", "cls": b"7"},
    "deep/er.x/2": {"tokens.npy.gz": b"what it is", "wav": b"RIFF"},
}


def test_files_that_share_a_stem_are_a_sample(tmp_path: Path) -> None:
    source, dest = written(tmp_path / "source", FILES | {"README": b"x", ".hidden": b"x"}), tmp_path / "dest"
    out, err = packs(source, dest)
    assert packed_samples(dest) == SAMPLES
    assert "note: files that share a name up to its first dot are packed as one sample; " in err
    assert "note: skipped 1 file without an extension, such as 'README'" in err
    assert re.search("not every sample has every field: .*1 without 'txt'.*2 without 'json'", out)
    assert 'fields=("jpg", "txt?"), where=\'"jpg"\', transform={"jpg": RandomResizedCrop(224)})' in out
    assert not (dest / "classes.json").exists()
    with open(dest / "shard-000000.tar", "rb") as shard:
        read = list(group_by_keys(tar_file_expander([{"stream": shard, "url": "x"}])))
    assert {one["__key__"]: {name: one[name] for name in one if name[0] != "_"} for one in read} == SAMPLES
    with StreamLoader(dest, 3, fields=("__key__", "txt?"), num_workers=0) as loader:
        (keys, texts) = next(iter(loader))
    assert dict(zip(keys, texts, strict=True)) == {"0": "zero", "1": "", "deep/er.x/2": None}


@pytest.mark.parametrize(
    ("names", "options", "keys"),
    [
        (["a/0.jpg", "a/0.txt", "b/1.jpg"], [], ["a/0", "b/1"]),
        (["a/0.jpg", "a/0.png", "b/1.jpg"], ["--stems"], ["a/0", "b/1"]),
        (["a/0.jpg", "a/0.png", "b/1.jpg"], [], ["a/0", "a/0-2", "b/1"]),  # images of two classes
        (["0.jpg", "0.txt", "b/1.jpg"], [], ["0", "b/1"]),
        (["0.wav", "1.wav"], [], ["0", "1"]),
        (["0.jpg"], [], ["0"]),
    ],
)
def test_what_is_taken_for_files_by_stem(tmp_path: Path, names: list[str], options: list[str], keys: list[str]) -> None:
    source = written(tmp_path / "source", {name: image_bytes(1, ".jpg") for name in names})
    _, err = packs(source, tmp_path / "dest", "--no-shuffle", *options)
    assert list(packed_samples(tmp_path / "dest")) == keys
    has_labels = len(keys) == 3
    assert ("without labels" in err) != has_labels
    assert all(("cls" in sample) == has_labels for sample in packed_samples(tmp_path / "dest").values())


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a/0.jpg", "a/0.txt", "b/1.jpg", "b/2.jpg"], [], "0.txt: its type differs from most files"),
        (["a/0.jpg", "a/0.txt", "a/1.jpg"], ["--no-stems"], "0.txt: its type differs from most files"),
        (["0.jpg", "a/1.jpg", "a/2.jpg"], [], "'0.jpg' lie directly in"),
        (["images/1.jpg", "masks/1_mask.png"], [], "fields of the same samples, but the names of their files differ"),
        (["0.jpg", "0.JPEG"], [], "would both be the field 'jpg' of one sample; rename or remove one of them"),
        (["0.jpg", "0.__key__"], [], "'__key__' cannot be a field of a sample"),
        (["0.jpg", "0..jpg"], [], "'.jpg' cannot be a field of a sample"),
        (["0.jpg", "0.cls"], [], "but a label is an integer; if it is a name, call the file .txt"),
        (["shard-000000.tar"], [], "no class folder"),
        (["photos.csv"], [], "if 'photos.csv' is a table or an array, give its own path"),
        (["x"], ["--stems"], "holds no file to pack"),
        (
            ["0.jpg", "0.txt"],
            ["--stems", "--classes", "{0}/c.json"],
            "--classes would have no effect on files that share",
        ),
        (["0.left.jpg", "0.right.jpg"], ["--resize", 4], "the source has other data, such as masks or arrays"),
        (["0.wav"], ["--resize", 4], "the source has other data, such as masks or arrays"),
        (["a/0.jpg"], ["--label-column", "x"], "--label-column would have no effect on a folder"),
        (["a/0.jpg"], ["--keep-columns", "--split-column", "x"], "--keep-columns and --split-column would have no eff"),
        (["a/0.jpg"], ["--no-shuffle", "--seed", 1], "--seed has no effect with --no-shuffle"),
        (["a/0.jpg"], ["--quality", 80], "--quality is the quality of the JPEG files that --resize writes"),
    ],
)
def test_folders_and_options_that_are_refused(
    tmp_path: Path, names: list[str], options: list[object], message: str
) -> None:
    source = written(tmp_path / "source", {name: image_bytes(1) for name in names})
    (tmp_path / "c.json").write_text(json.dumps({"classes": ["a"]}))
    status, out, err = pack(source, tmp_path / "dest", *(str(option).format(tmp_path) for option in options))
    assert (status in (1, 2), out) == (True, "")
    assert message in err
    assert err.count("error:") == 1
    assert not (tmp_path / "dest").exists()


def test_only_damage_that_is_certain_is_a_fault_and_takes_its_whole_sample(tmp_path: Path) -> None:
    bad = {"0.json": b'{"a": ', "3.jpg": image_bytes(3)[:-9], "3.png": b"", "4.npy": b"text", "5.wav": b""}
    source, dest = written(tmp_path / "source", FILES | bad), tmp_path / "dest"
    err = refusal(source, dest, status=1)
    assert "0.json: it is not JSON (Expecting value" in err
    assert [err.count(f"/{name}: ") for name in bad] == [1, 1, 1, 1, 0]
    assert "error: 4 of 12 files are damaged or of an unexpected type; repair or remove them" in err
    for options in ([], ["--split", "a=0.5,b=0.5"]):
        status, out, err = pack(source, dest, "--skip-bad", "--overwrite", *options)
        assert (status, "3 samples left out" in out) == (0, True), err
        folders = [dest / "a", dest / "b"] if options else [dest]
        samples = {key: sample for folder in folders for key, sample in packed_samples(folder).items()}
        assert samples == {"1": SAMPLES["1"], "deep/er.x/2": SAMPLES["deep/er.x/2"], "5": {"wav": b""}}
        for path in dest.glob("*.tar"):
            path.unlink()


def bitmap(number: int) -> bytes:
    head = (54 + 48, 0, 0, 54, 40, 4, 4, 1, 24, 0, 48, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", *head) + bytes((number * 7 + i) % 256 for i in range(48))


DIGESTS = {
    "classes": "2c22a39b6afc6f99d2baf3b7c4a2d4b24fe476afe9ce18ea0f3eb2104e519cf1",
    "table": "29799dd1fc60cb3708cda926317590077a546228ac95a981777ea3b5ee76a668",
    "ids": "117d572415bdf639c3b6643adda66f9be4e1f1feb9ab31590b3197a020cf802b",
}


def test_the_bytes_of_shards_stay_the_same_from_one_version_to_the_next(tmp_path: Path) -> None:
    names = [f"{'cat' if n % 2 else 'bee'}/{n}.bmp" for n in range(8)]
    written(tmp_path / "photos", {name: bitmap(n) for n, name in enumerate(names)})
    rows = [f"photos/{name},{n % 3},x{n}\n" for n, name in enumerate(names)]
    (tmp_path / "t.csv").write_text(f"path,label,by\n{''.join(rows)}")
    (tmp_path / "data").mkdir()
    for number in range(5):
        np.save(tmp_path / "data" / f"id{number}.npy", np.arange(number, dtype=np.int32))
    (tmp_path / "data" / "labels.json").write_text(json.dumps({f"id{n}": "ab"[n % 2] for n in range(5)}))
    for source, name, options in (
        ("photos", "a", ["--max-count", 3, "--split", "train=0.5,val=0.5"]),
        ("t.csv", "b", ["--keep-columns", "--max-bytes", "9KB"]),
        ("data", "c", ["--no-shuffle"]),
    ):
        assert pack(tmp_path / source, tmp_path / name, *options)[0] == 0
    digests = {}
    for kind, name in zip(DIGESTS, "abc", strict=True):
        digest = hashlib.sha256()
        for path in sorted((tmp_path / name).rglob("*.tar")):
            digest.update(path.relative_to(tmp_path).as_posix().encode() + path.read_bytes())
        digests[kind] = digest.hexdigest()
    assert digests == DIGESTS

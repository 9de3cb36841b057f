"""Files that share a stem, which `shardify` packs as one sample."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from image_folders import files_below, image_bytes, pack, packed_samples
from PIL import Image
from webdataset.tariterators import group_by_keys, tar_file_expander

from streamload import StreamLoader


def depths() -> bytes:
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


FILES = {
    "0.jpg": image_bytes(0),
    "0.txt": b"zero",
    "0.mask.png": depths(),
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


def test_members_of_any_kind_and_samples_that_lack_some(tmp_path: Path) -> None:
    source, dest = written(tmp_path / "source", FILES | {"README": b"x", ".hidden": b"x"}), tmp_path / "dest"
    status, out, err = pack(source, dest)
    assert status == 0, err
    assert packed_samples(dest) == SAMPLES
    assert "note: files that share a name up to its first dot are packed as one sample; " in err
    assert "note: skipped 1 file without an extension, such as " in err
    assert "not every sample has every field: 1 without 'jpg', 2 without 'json', " in out
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
    status, _, err = pack(source, tmp_path / "dest", "--no-shuffle", *options)
    assert status == 0, err
    assert list(packed_samples(tmp_path / "dest")) == keys
    has_labels = len(keys) == 3
    assert ("without labels" in err) != has_labels
    assert all(("cls" in sample) == has_labels for sample in packed_samples(tmp_path / "dest").values())


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        (["a/0.jpg", "a/0.txt", "b/1.jpg", "b/2.jpg"], [], "0.txt: its extension is not that of an image"),
        (["a/0.jpg", "a/0.txt"], ["--no-stems"], "0.txt: its extension is not that of an image"),
        (["0.jpg", "0.JPEG"], [], "would both be the field 'jpg' of one sample; rename or remove one of them"),
        (["0.jpg", "0.__key__"], [], "'__key__' cannot be a field of a sample"),
        (["0.jpg", "0..jpg"], [], "'.jpg' cannot be a field of a sample"),
        (["0.jpg", "0.cls"], [], "and a label is an integer; if it is a name, call the file .txt"),
        (["shard-000000.tar"], [], "no class folder"),
        (["photos.csv"], [], "no class folder"),
        (["x"], ["--stems"], "holds no file with an extension"),
        (["0.jpg", "0.txt"], ["--stems", "--classes", "{0}/c.json"], "takes labels from files .cls alone"),
        (["0.left.jpg", "0.right.jpg"], ["--resize", 4], "there are several, of which one may be a mask"),
        (["0.wav"], ["--resize", 4], "the source holds other files, such as arrays"),
    ],
)
def test_what_cannot_be_samples_by_stem(tmp_path: Path, names: list[str], options: list[object], message: str) -> None:
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
    status, _, err = pack(source, dest)
    assert status == 1
    assert "0.json: it is not JSON (Expecting value" in err
    assert [err.count(f"/{name}: ") for name in bad] == [1, 1, 1, 1, 0]
    assert "error: 4 of 12 files are damaged or of another kind, so nothing was published" in err
    for options in ([], ["--split", "a=0.5,b=0.5"]):
        status, out, err = pack(source, dest, "--skip-bad", "--overwrite", *options)
        assert (status, "3 samples left out" in out) == (0, True), err
        folders = [dest / "a", dest / "b"] if options else [dest]
        samples = {key: sample for folder in folders for key, sample in packed_samples(folder).items()}
        assert samples == {"1": SAMPLES["1"], "deep/er.x/2": SAMPLES["deep/er.x/2"], "5": {"wav": b""}}
        for path in dest.glob("*.tar"):
            path.unlink()


def pairs(root: Path, count: int = 12) -> Path:
    files = {f"{n}.jpg": image_bytes(n) for n in range(count)}
    return written(root, files | {f"{n}.txt": b"%d" % n for n in range(count)})


def test_without_labels_a_split_is_at_random_and_repeatable(tmp_path: Path) -> None:
    source = pairs(tmp_path / "source", 20)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert pack(source, tmp_path / name, "--split", "train=0.8,val=0.2", "--seed", seed)[0] == 0
    found = {name: set(packed_samples(tmp_path / name / "val")) for name in "abc"}
    assert len(found["a"]) == 4
    assert found["a"] != found["c"]
    assert files_below(tmp_path / "a") == files_below(tmp_path / "b")


def test_folders_named_as_splits_are_splits(tmp_path: Path) -> None:
    pairs(tmp_path / "source" / "train", 4)
    pairs(tmp_path / "source" / "val", 2)
    status, _, err = pack(tmp_path / "source", tmp_path / "dest")
    assert (status, "train, val are taken as splits" in err) == (0, True)
    assert [sorted(packed_samples(tmp_path / "dest" / name)) for name in ("train", "val")] == [list("0123"), list("01")]


def test_images_beside_captions_are_resized(tmp_path: Path) -> None:
    source = written(tmp_path / "source", {"0.png": image_bytes(0, ".png"), "0.txt": b"x", "1.txt": b"y"})
    status, out, _ = pack(source, tmp_path / "dest", "--resize", 4)
    assert status == 0
    samples = packed_samples(tmp_path / "dest")
    assert {key: sorted(sample) for key, sample in samples.items()} == {"0": ["jpg", "txt"], "1": ["txt"]}
    assert 'fields=("txt",))' in out


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
    found = {}
    for kind, name in zip(DIGESTS, "abc", strict=True):
        digest = hashlib.sha256()
        for path in sorted((tmp_path / name).rglob("*.tar")):
            digest.update(path.relative_to(tmp_path).as_posix().encode() + path.read_bytes())
        found[kind] = digest.hexdigest()
    assert found == DIGESTS

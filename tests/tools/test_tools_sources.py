"""What `shardify` packs beside an ImageFolder: tables of paths, and folders of files with IDs and labels."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from image_folders import image_bytes, image_folder, pack, packed_samples

from streamload import StreamLoader
from streamload.pack.sources.loading import fault_of
from streamload.pack.sources.source import numbered_labels


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with photos in it and beside it."""
    image_folder(tmp_path, "data/a.jpg", "data/deep/b.png", "other/c.jpg")
    return tmp_path / "data"


TABLES = {
    "t.csv": "filename,label,by\na.jpg,cat,Ann\ndeep/b.png,bee,Bob\n../other/c.jpg,cat,Ann\n",
    "semicolons.csv": 'Image Path;Class;by\n"a.jpg";cat;Ann\n"deep/b.png";bee;Bob\n"../other/c.jpg";cat;Ann\n',
    "t.tsv": "by\tpath\tlabel\nAnn\ta.jpg\tcat\nBob\tdeep/b.png\tbee\nAnn\t../other/c.jpg\tcat\n",
    "t.jsonl": '{"file_name": "a.jpg", "label": "cat", "by": "Ann"}\n\n'
    '{"file_name": "deep/b.png", "label": "bee", "by": "Bob"}\n'
    '{"file_name": "../other/c.jpg", "label": "cat", "by": "Ann"}\n',
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_paths_and_names_of_classes(photos: Path, tmp_path: Path, name: str) -> None:
    (photos / name).write_text(TABLES[name], encoding="utf-8-sig")
    status, out, err = pack(photos / name, tmp_path / "dest", "--keep-columns")
    assert status == 0, err
    assert "packed 1 shard, 3 samples" in out
    assert packed_samples(tmp_path / "dest") == {
        "a": {"jpg": image_bytes(0), "cls": b"1", "json": b'{"by":"Ann"}'},
        "deep/b": {"png": image_bytes(1, ".png"), "cls": b"0", "json": b'{"by":"Bob"}'},
        "other/c": {"jpg": image_bytes(2), "cls": b"1", "json": b'{"by":"Ann"}'},
    }
    assert json.loads((tmp_path / "dest" / "classes.json").read_text())["classes"] == ["bee", "cat"]


def test_whole_numbers_stay_what_they_are_and_have_no_names(photos: Path, tmp_path: Path) -> None:
    (photos / "t.csv").write_text("a.jpg,7\ndeep/b.png,-3\n")  # no header: the first line names a file
    assert pack(photos / "t.csv", tmp_path / "dest")[0] == 0
    samples = packed_samples(tmp_path / "dest")
    assert {key: sample["cls"] for key, sample in samples.items()} == {"a": b"7", "deep/b": b"-3"}
    assert not (tmp_path / "dest" / "classes.json").exists()
    assert numbered_labels(["01", "1"], str) == ([0, 1], ("01", "1"))
    assert numbered_labels([3, "a"], str) == ([0, 1], ("3", "a"))


@pytest.mark.parametrize("odd", ["nan", "0.5", "1.0", "?", "inf", "03"])
def test_one_label_that_is_no_whole_number_among_them_is_refused_by_its_line(
    photos: Path, tmp_path: Path, odd: str
) -> None:
    (photos / "t.csv").write_text(f"path,label\na.jpg,11\ndeep/b.png,{odd}\n../other/c.jpg,2\n")
    status, _, err = pack(photos / "t.csv", tmp_path / "dest")
    assert status == 2
    assert f"t.csv', line 3: the label is '{odd}', and most labels are numbers: correct it, or give --" in err
    assert not (tmp_path / "dest").exists()
    assert pack(photos / "t.csv", tmp_path / "dest", "--labels-as-names")[0] == 0
    classes = sorted(["11", odd, "2"])
    assert json.loads((tmp_path / "dest" / "classes.json").read_text())["classes"] == classes
    assert packed_samples(tmp_path / "dest")["deep/b"]["cls"] == b"%d" % classes.index(odd)


def test_columns_can_be_named(photos: Path, tmp_path: Path) -> None:
    (photos / "t.csv").write_text("where,what,label\na.jpg,x,y\n")
    status, _, err = pack(photos / "t.csv", tmp_path / "dest", "--label-column", "what")
    assert status == 2
    assert "no column that looks like a path, of 'where', 'what', 'label'; name it with --path-column" in err
    assert pack(photos / "t.csv", tmp_path / "dest", "--path-column", "where", "--label-column", "what")[0] == 0
    assert json.loads((tmp_path / "dest" / "classes.json").read_text())["classes"] == ["x"]
    assert pack(photos / "t.csv", tmp_path / "other", "--path-column", "nope")[0] == 2


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "holds no row"),
        ("t.csv", "path,label\n", "holds no row"),
        ("t.csv", "path,label\na.jpg\n", "line 2: 1 column, and the first line has 2"),
        ("t.csv", "path,label,label\na.jpg,1,2\n", "two columns called 'label'"),
        ("t.csv", "path,label\na.jpg,\n", "line 2: the label in column 'label' is ''"),
        ("t.jsonl", '{"path": "a.jpg", "label": 1}\n{"path": 3.5, "label": 1}', "line 2: column 'path' holds 3.5"),
        ("t.jsonl", '{"path": "a.jpg", "label": 1.5}', "line 1: the label in column 'label' is 1.5"),
        ("t.jsonl", '{"path": "a.jpg", "label": 1}\nnonsense', "line 2: not JSON"),
        ("t.jsonl", "[1]", "line 1: not a JSON object"),
        ("t.csv", b"path,label\n\xff,1\n", "not UTF-8"),
        ("t.txt", "path,label\n", "is a file; give the folder"),
    ],
)
def test_a_table_that_cannot_be_understood(photos: Path, name: str, text: str | bytes, message: str) -> None:
    (photos / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    status, out, err = pack(photos / name, photos.parent / "dest")
    assert (status, out) == (2, "")
    assert message in err
    assert not (photos.parent / "dest").exists()


def test_a_file_that_a_table_names_and_that_is_not_there(photos: Path, tmp_path: Path) -> None:
    (photos / "t.csv").write_text("path,label\na.jpg,1\ngone.jpg,2\nx,1\n")
    status, _, err = pack(photos / "t.csv", tmp_path / "dest")
    assert status == 1
    assert "gone.jpg: it cannot be read: No such file or directory" in err
    assert "/x: it has no extension to name its field" in err


def tensors(folder: Path, count: int = 6) -> Path:
    folder.mkdir()
    for number in range(count):
        torch.save(torch.full((2, 3), number), folder / f"id-{number}.pt")
    return folder


LABELS = {f"id-{number}": number % 2 for number in range(6)}


def test_one_file_for_each_id_as_in_the_tutorial(tmp_path: Path) -> None:
    data = tensors(tmp_path / "data")
    (tmp_path / "labels.json").write_text(json.dumps(LABELS))
    partition = {"train": ["id-0", "id-1", "id-2", "id-5"], "validation": ["id-3", "id-4"]}
    (tmp_path / "partition.json").write_text(json.dumps(partition))
    labels = ["--labels", tmp_path / "labels.json"]
    status, out, err = pack(data, tmp_path / "dest", *labels, "--partition", tmp_path / "partition.json")
    assert status == 0, err
    assert 'batch_size=64, shuffle=True, fields=("pt", "cls"))' in out
    for part, names in partition.items():
        samples = packed_samples(tmp_path / "dest" / part)
        assert samples == {
            name: {"pt": (data / f"{name}.pt").read_bytes(), "cls": b"%d" % LABELS[name]} for name in names
        }
    with StreamLoader(tmp_path / "dest" / "validation", 2, fields=("pt", "cls"), num_workers=0) as loader:
        (values, classes) = next(iter(loader))
    assert sorted(zip(values[:, 0, 0].tolist(), classes.tolist(), strict=True)) == [(3, 1), (4, 0)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.json", json.dumps({f"id-{n}": "ab"[n % 2] for n in range(3)})),
        ("labels.csv", "id,label\n" + "".join(f"id-{n},{'ab'[n % 2]}\n" for n in range(3))),
        ("labels.tsv", "ID\tlabel\n" + "".join(f"id-{n}.npy\t{'ab'[n % 2]}\n" for n in range(3))),
        ("labels.jsonl", "".join(f'{{"id": "id-{n}", "label": "{"ab"[n % 2]}"}}\n' for n in range(3))),
    ],
)
def test_labels_that_lie_in_the_folder_are_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "data").mkdir()
    for number in range(3):
        np.save(tmp_path / "data" / f"id-{number}.npy", np.arange(number))
    (tmp_path / "data" / name).write_text(text)
    status, _, err = pack(tmp_path / "data", tmp_path / "dest")
    assert status == 0, err
    samples = packed_samples(tmp_path / "dest")
    assert {key: (sorted(s), s["cls"]) for key, s in samples.items()} == {
        f"id-{n}": (["cls", "npy"], b"01"[n % 2 : n % 2 + 1]) for n in range(3)
    }


@pytest.mark.parametrize(
    ("labels", "partition", "message"),
    [
        ({**LABELS, "id-9": 1}, None, "1 ID of '{0}/labels.json' without a file in '{0}/data': 'id-9'"),
        ({"id-0": 1}, None, "5 files without a label in '{0}/labels.json': 'id-1'"),
        ({**LABELS, "id-0": 0.5}, None, "the label of 'id-0' is 0.5"),
        ([], None, "holds no mapping"),
        (LABELS, {"train": ["id-7"]}, "1 ID of the split 'train' in '{0}/partition.json' without a file: 'id-7'"),
        (LABELS, {"train": ["id-1"]}, "5 files in no split"),
        (LABELS, {"a": list(LABELS), "b": ["id-1"]}, "the ID 'id-1' stands in 'a' and in 'b'"),
        (LABELS, {"../a": list(LABELS)}, "'../a' is no split"),
    ],
)
def test_ids_that_do_not_agree(tmp_path: Path, labels: object, partition: object, message: str) -> None:
    data = tensors(tmp_path / "data")
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    options = ["--labels", tmp_path / "labels.json"]
    if partition is not None:
        (tmp_path / "partition.json").write_text(json.dumps(partition))
        options += ["--partition", tmp_path / "partition.json"]
    status, out, err = pack(data, tmp_path / "dest", *options)
    assert (status, out) == (2, "")
    assert message.format(tmp_path) in err
    assert not (tmp_path / "dest").exists()


def test_ids_without_labels_say_what_is_missing(tmp_path: Path) -> None:
    data = tensors(tmp_path / "data")
    status, _, err = pack(data, tmp_path / "without")
    assert (status, "without labels; --labels FILE gives labels" in err) == (0, True)
    (data / "folder").mkdir()
    status, _, err = pack(data, tmp_path / "dest")
    assert status == 2
    assert "say what their labels are with --labels FILE" in err
    torch.save(LABELS, tmp_path / "labels.pt")
    status, _, err = pack(data, tmp_path / "dest", "--labels", tmp_path / "labels.pt")
    assert status == 2
    assert "is a pickle, which can run any code" in err
    status, _, err = pack(data, tmp_path / "dest", "--labels", tmp_path / "label.pt")
    assert status == 2
    assert f"did you mean '{tmp_path}/labels.pt'?" in err


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def pt(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_arrays_and_tensors_are_checked_without_unpickling() -> None:
    whole = npy(np.arange(50))
    assert fault_of("npy", whole) is None
    assert fault_of("npy", whole[:-1]) == "the array is cut short: 527 of 528 bytes are there"
    assert fault_of("npy", npy(np.array([{}], object))) is not None
    assert fault_of("npy", b"text that is long enough") is not None
    tensor = pt(torch.arange(1000))
    assert fault_of("pt", tensor) is None
    for data in (
        tensor[:-1],
        tensor[:-300],
        tensor[: len(tensor) // 2],
        b"",
        b"PK",
        b"text",
        b"PK\x05\x06" + bytes(18),
    ):
        assert fault_of("pt", data) is not None


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    data = tensors(tmp_path / "data")
    (data / "labels.json").write_text(json.dumps(LABELS))
    (data / "id-2.pt").write_bytes((data / "id-2.pt").read_bytes()[:-40])
    status, _, err = pack(data, tmp_path / "dest")
    assert status == 1
    assert "id-2.pt: the file is damaged or cut short" in err
    assert "error: 1 of 6 files is damaged or of another kind" in err
    assert pack(data, tmp_path / "dest", "--skip-bad")[0] == 0
    assert len(packed_samples(tmp_path / "dest")) == 5
    assert "--resize is for images" in pack(data, tmp_path / "other", "--resize", 8)[2]


def test_one_id_under_two_names_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "labels.csv").write_text("id,label\na.npy,0\na.pt,1\n")
    status, _, err = pack(tmp_path, tmp_path.with_name("dest"), "--labels", tmp_path / "labels.csv")
    assert status == 2
    assert "line 3: the ID 'a' stands in line 2 too" in err


def test_negative_labels_can_be_split(tmp_path: Path) -> None:
    data = tensors(tmp_path / "data")
    (tmp_path / "labels.json").write_text(json.dumps({name: -label for name, label in LABELS.items()}))
    options = ["--labels", tmp_path / "labels.json", "--split", "a=0.5,b=0.5"]
    assert pack(data, tmp_path / "dest", *options)[0] == 0
    samples = packed_samples(tmp_path / "dest" / "a") | packed_samples(tmp_path / "dest" / "b")
    assert sorted(sample["cls"] for sample in samples.values()) == [b"-1"] * 3 + [b"0"] * 3


@pytest.mark.parametrize("label", [2**63, -(2**63) - 1])
def test_labels_of_more_than_64_bits_are_refused(tmp_path: Path, label: int) -> None:
    data = tensors(tmp_path / "data")
    (tmp_path / "labels.json").write_text(json.dumps(LABELS | {"id-3": label}))
    status, _, err = pack(data, tmp_path / "dest", "--labels", tmp_path / "labels.json")
    assert status == 2
    assert f"the label {label} is too large" in err

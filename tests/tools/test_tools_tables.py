"""Tables that `shardify` packs: of paths and labels, of several files, of texts and numbers, of stored files."""

from __future__ import annotations

import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from image_folders import image_bytes, image_folder, pack, packed_samples, packs, refusal
from pyarrow import parquet
from test_tools_folders import classes_in, fields_in, sixteen_bits

from streamload import StreamLoader

ROWS = [
    {"image": "a.jpg", "mask": "m/a.png", "caption": "one", "kind": "x", "by": None},
    {"image": "b.png", "mask": "m/b.PNG", "caption": None, "kind": "y", "by": "Ann"},
    {"image": "deep/c.jpeg", "mask": None, "caption": "three", "kind": "x", "by": "Bob"},
]

TEXTS = [f"translation {n}" for n in range(21)]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Images, and masks of 16 bits."""
    image_folder(tmp_path / "data", "a.jpg", "b.png", "deep/c.jpeg", "m/a.png")
    (tmp_path / "data" / "m" / "a.png").write_bytes(sixteen_bits())
    (tmp_path / "data" / "m" / "b.PNG").write_bytes(sixteen_bits())
    return tmp_path / "data"


def table(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        comma = "\t" if path.suffix == ".tsv" else ";" if path.stem == "semicolons" else ","
        lines = [rows[0].keys(), *(["" if value is None else str(value) for value in row.values()] for row in rows)]
        path.write_text("".join(comma.join(line) + "\n" for line in lines), encoding="utf-8-sig")
    return path


def json_in(folder: Path) -> dict[str, Any]:
    return {key: json.loads(sample["json"]) for key, sample in packed_samples(folder).items()}


@pytest.mark.parametrize("name", ["t.csv", "semicolons.csv", "t.tsv", "t.jsonl", "t.parquet"])
def test_paths_and_names_of_classes(data: Path, tmp_path: Path, name: str) -> None:
    rows = [{"by": "Ann", "File Name": row["image"], "Class": row["kind"]} for row in ROWS]
    out, err = packs(table(data / name, rows), tmp_path / "dest", "--keep-columns")
    assert "packed 1 shard, 3 samples" in out
    assert packed_samples(tmp_path / "dest") == {
        "a": {"jpg": image_bytes(0), "cls": b"0", "json": b'{"by":"Ann"}'},
        "b": {"png": image_bytes(1, ".png"), "cls": b"1", "json": b'{"by":"Ann"}'},
        "deep/c": {"jpg": image_bytes(2), "cls": b"0", "json": b'{"by":"Ann"}'},
    }
    assert classes_in(tmp_path / "dest") == ["x", "y"]
    _, err = packs(data / name, tmp_path / "without")
    assert "left out: column 'by'; --keep-columns stores such columns as json" in err


def test_whole_numbers_are_labels_without_names(data: Path, tmp_path: Path) -> None:
    (data / "t.csv").write_text("a.jpg,7\nb.png,-3.0\n")  # no header: the first line names a file
    _, err = packs(data / "t.csv", tmp_path / "csv", "--keep-columns")
    assert "--keep-columns has no effect: all columns are used anyway" in err
    table(data / "t.parquet", [{"path": "a.jpg", "label": 7.0}, {"path": "b.png", "label": -3.0}])
    assert pack(data / "t.parquet", tmp_path / "parquet")[0] == 0
    for name in ("csv", "parquet"):
        assert {key: one["cls"] for key, one in packed_samples(tmp_path / name).items()} == {"a": b"7", "b": b"-3"}
        assert not (tmp_path / name / "classes.json").exists()


@pytest.mark.parametrize("odd", ["nan", "0.5", "?"])
def test_one_label_that_is_no_whole_number_is_named(data: Path, tmp_path: Path, odd: str) -> None:
    (data / "t.csv").write_text(f"path,label\na.jpg,11\nb.png,{odd}\ndeep/c.jpeg,2\n")
    err = refusal(data / "t.csv", tmp_path / "dest")
    assert f"t.csv', line 3, column 'label' is '{odd}', but most labels are numbers; correct it, give --" in err
    assert pack(data / "t.csv", tmp_path / "dest", "--labels-as-names")[0] == 0
    assert classes_in(tmp_path / "dest") == sorted(["11", odd, "2"])
    assert packed_samples(tmp_path / "dest")["b"]["cls"] == b"%d" % sorted(["11", odd, "2"]).index(odd)


def test_labels_of_over_64_bits_are_not_left_out(tmp_path: Path) -> None:
    source = table(tmp_path / "t.jsonl", [{"text": "a", "label": 2**63 + number} for number in range(3)])
    assert "or have over 64 bits" in refusal(source, tmp_path / "dest")
    packs(source, tmp_path / "dest", "--labels-as-names")
    assert classes_in(tmp_path / "dest") == [str(2**63 + number) for number in range(3)]


@pytest.mark.parametrize("values", [[0.5, 1.25, 3.0], [[1, 2], [3], []], [True, False, True], TEXTS])
def test_a_column_with_the_name_of_labels_that_holds_other_things_is_kept(tmp_path: Path, values: list[Any]) -> None:
    source = table(tmp_path / "t.jsonl", [{"x": n, "target": value} for n, value in enumerate(values)])
    assert "so samples get none without --label-column" in packs(source, tmp_path / "dest")[1]
    assert [row["target"] for row in sorted(json_in(tmp_path / "dest").values(), key=lambda row: row["x"])] == values


def test_numbers_of_a_csv_stay_numbers_and_an_odd_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n,x,zip,fold,mixed,label\n1,0.5,01,1_2,3,1\n2,nan,02,1_3,4,0\n,1e3,03,1_2,n/a,1\n")
    out, err = packs(tmp_path / "t.csv", tmp_path / "dest")
    assert json_in(tmp_path / "dest") == {
        "000000000": {"n": 1, "x": 0.5, "zip": "01", "fold": "1_2", "mixed": "3"},
        "000000001": {"n": 2, "x": None, "zip": "02", "fold": "1_3", "mixed": "4"},
        "000000002": {"n": None, "x": 1000.0, "zip": "03", "fold": "1_2", "mixed": "n/a"},
    }
    assert "t.csv', line 4, column 'mixed' is 'n/a', so the whole column is stored as text" in err
    assert "column 'zip'" not in err
    assert 'fields=("json", "cls"))' in out


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_several_files_and_texts_without_labels(data: Path, tmp_path: Path, name: str) -> None:
    pairs = ["--path-column", "image", "--path-column", "mask"]
    out, err = packs(table(data / name), tmp_path / "dest", *pairs, "--text-column", "caption")
    samples = {
        "a": {"jpg": image_bytes(0), "mask.png": sixteen_bits(), "txt": b"one"},
        "b": {"png": image_bytes(1, ".png"), "mask.png": sixteen_bits()},
        "deep/c": {"jpg": image_bytes(2), "txt": b"three"},
    }
    assert packed_samples(tmp_path / "dest") == samples
    assert "files are columns 'image', 'mask'; texts are column 'caption'; there are no labels" in err
    assert "not every sample has every field: 1 without 'mask.png', 1 without 'txt'" in out
    assert 'fields=("jpg;png", "txt?"), transform={"jpg;png": RandomResizedCrop(224)})' in out
    assert pack(data / name, tmp_path / "labels", *pairs, "--label-column", "kind", "--keep-columns")[0] == 0
    packed = packed_samples(tmp_path / "labels")
    assert {key: sample["cls"] for key, sample in packed.items()} == {"a": b"0", "b": b"1", "deep/c": b"0"}
    assert json.loads(packed["b"]["json"])["by"] == "Ann"
    assert set(json.loads(packed["b"]["json"])) == {"caption", "by"}


def test_any_file_may_stand_in_a_table(tmp_path: Path) -> None:
    for name, content in (("1.wav", b"RIFF"), ("v1.2.tokens.npy.gz", b"tokens"), ("1.json", b"{}")):
        (tmp_path / name).write_bytes(content)
    rows = [
        {"path": "1.wav", "other": "1.json", "label": 3, "text": "a", "more": 0.5},
        {"path": "v1.2.tokens.npy.gz", "other": "1.json", "label": 4, "text": "b", "more": math.nan},
    ]
    columns = ["--path-column", "path", "--path-column", "other", "--text-column", "text", "--text-column", "more"]
    packs(table(tmp_path / "t.parquet", rows), tmp_path / "dest", *columns)
    assert packed_samples(tmp_path / "dest") == {
        "1": {"wav": b"RIFF", "json": b"{}", "cls": b"3", "txt": b"a", "more.txt": b"0.5"},
        "v1_2_tokens": {"npy.gz": b"tokens", "json": b"{}", "cls": b"4", "txt": b"b"},
    }


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_a_table_of_texts(tmp_path: Path, name: str) -> None:
    rows = [{"id": n, "text": f"text {n}", "label": n % 2, "score": n / 2} for n in range(4)]
    out, err = packs(table(tmp_path / name, rows), tmp_path / "dest", "--no-shuffle")
    assert "no column holds paths or files; texts are column 'text'; json holds" in err
    assert 'fields=("txt", "cls"))' in out
    with StreamLoader(tmp_path / "dest", 4, fields=("__key__", "txt", "cls", "json"), num_workers=0) as loader:
        keys, texts, labels, others = next(iter(loader))
    assert list(keys) == [f"{n:09d}" for n in range(4)]
    assert list(texts) == [row["text"] for row in rows]
    assert labels.tolist() == [row["label"] for row in rows]
    assert {name: column.tolist() for name, column in others.items()} == {"id": [0, 1, 2, 3], "score": [0, 0.5, 1, 1.5]}


def test_files_that_a_table_stores(tmp_path: Path) -> None:
    """As in tables of Hugging Face: bytes with the path that they had, or without one."""
    (tmp_path / "beside.png").write_bytes(image_bytes(3, ".png"))
    wave = b"RIFF\x24\0\0\0WAVEfmt "
    rows = [
        {
            "image": {"bytes": image_bytes(0), "path": "x/0.JPEG"},
            "audio": {"bytes": wave, "path": None},
            "raw": b"\x00",
        },
        {"image": {"bytes": image_bytes(1, ".png"), "path": None}, "audio": None, "raw": b"\x01"},
        {"image": {"bytes": None, "path": "beside.png"}, "audio": None, "raw": b"\x02"},
    ]
    source = table(tmp_path / "t.parquet", [row | {"text": f"t{n}", "label": n} for n, row in enumerate(rows)])
    packs(source, tmp_path / "dest", "--workers", 2, "--max-count", 1)
    assert packed_samples(tmp_path / "dest") == {
        "000000000": {"jpg": image_bytes(0), "wav": wave, "bin": b"\x00", "cls": b"0", "txt": b"t0"},
        "000000001": {"png": image_bytes(1, ".png"), "bin": b"\x01", "cls": b"1", "txt": b"t1"},
        "000000002": {"png": image_bytes(3, ".png"), "bin": b"\x02", "cls": b"2", "txt": b"t2"},
    }
    assert pack(source, tmp_path / "small", "--path-column", "image", "--resize", 4)[0] == 0
    assert all("jpg" in fields for fields in fields_in(tmp_path / "small").values())
    rows[1]["image"] = {"bytes": image_bytes(1)[:-9], "path": "1.jpg"}
    table(source, rows)
    assert "t.parquet', row 2, column 'image': the JPEG is cut short" in refusal(source, tmp_path / "bad", status=1)
    assert pack(source, tmp_path / "bad", "--skip-bad")[0] == 0
    assert sorted(packed_samples(tmp_path / "bad")) == ["000000000", "000000002"]


def test_a_column_of_splits(data: Path, tmp_path: Path) -> None:
    rows = [row | {"split": name} for row, name in zip(ROWS, ("val", "train", "train"), strict=True)]
    _, err = packs(table(data / "t.csv", rows), tmp_path / "all")
    assert "column 'split' may name splits: --split-column split packs each into a folder of its own" in err
    status, out, err = pack(data / "t.csv", tmp_path / "dest", "--split-column", "split", "--label-column", "kind")
    assert "may name splits" not in err
    assert (status, "train: 1 shard, 2 samples" in out) == (0, True)
    assert f"StreamLoader('{tmp_path}/dest/train'" in out, "what is read first, whichever split the table begins with"
    assert [sorted(packed_samples(tmp_path / "dest" / name)) for name in ("train", "val")] == [["b", "deep/c"], ["a"]]
    assert classes_in(tmp_path / "dest" / "val") == ["x", "y"]
    err = refusal(data / "t.csv", tmp_path / "no", "--split-column", "split", "--split", "a=0.5,b=0.5")
    assert "leave out --split" in err


def test_what_small_rows_cost_is_said(tmp_path: Path) -> None:
    source = table(tmp_path / "t.jsonl", [{"text": "short", "label": n % 2} for n in range(600)])
    out, _ = packs(source, tmp_path / "dest")
    assert "of content became 1.2 MB: tar adds 512 bytes to each field" in out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "has no rows"),
        ("t.csv", "path,label\n", "has no rows"),
        ("t.csv", "path,label\na.jpg\n", "line 2: 1 column, but the first line has 2"),
        ("t.csv", "path,label,label\na.jpg,1,2\n", "two columns called 'label'"),
        ("t.csv", "path,label\na.jpg,\nb.png,1", "line 2, column 'label' is ''; a label is a whole number or"),
        ("t.csv", "path,label\na.jpg,1\n,1", "line 3, column 'path' holds '', which is not the path"),
        ("t.jsonl", '{"path": "a.jpg", "label": 1}\n{"path": 3.5, "label": 1}', "line 2, column 'path' holds 3.5"),
        ("t.jsonl", '{"path": "a.jpg", "label": 1}\nnonsense', "line 2: not JSON"),
        ("t.jsonl", "[1]", "line 1: not a JSON object"),
        ("t.jsonl", '{"label": 1}', "holds only labels"),
        ("t.csv", b"path,label\n\xff,1\n", "not UTF-8"),
        ("t.txt", "path,label\n", "is a file; give the folder"),
    ],
)
def test_a_table_that_cannot_be_understood(data: Path, name: str, text: str | bytes, message: str) -> None:
    (data / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert message in refusal(data / name, data.parent / "dest")


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"image": "a.jpg"}, ["--text-column", "caption"], "has no column 'caption'; its columns are"),
        ({"image": "a.jpg"}, ["--path-column", "image", "--text-column", "image"], "'image' is named twice"),
        ({"image": "a.jpg", "x": {"y": b"\x00"}}, ["--keep-columns"], "JSON cannot hold b'\\x00'"),
        ({"image": "a.jpg", "s": "../x"}, ["--split-column", "s"], "row 1, column 's' is '../x', which cannot be the"),
        ({"image": "a.jpg"}, ["--classes", "{0}/c.json"], "has no column of labels"),
        ({"image": "a.jpg"}, ["--labels-as-names"], "has no column of labels"),
        ({"image": "a.jpg"}, ["--labels", "{0}/c.json"], "--labels would have no effect on a table"),
        ({"image": "a.jpg"}, ["--stems", "--follow-symlinks"], "--stems and --follow-symlinks would have no effect"),
        (
            {"image": "a.jpg", "a.b": "a.jpg", "a b": "a.jpg"},
            ["--path-column", "image", "--path-column", "a.b", "--path-column", "a b"],
            "two columns would be the field 'a_b.jpg'; rename 'a b'",
        ),
    ],
)
def test_columns_and_options_that_are_refused(
    data: Path, tmp_path: Path, row: dict[str, Any], options: list[str], message: str
) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"classes": ["a"]}))
    source = table(data / "t.parquet", [row])
    assert message in refusal(source, tmp_path / "dest", *(option.format(tmp_path) for option in options))


def test_files_that_are_not_there_or_have_no_extension(data: Path, tmp_path: Path) -> None:
    (data / "t.csv").write_text("path,label\na.jpg,1\ngone.jpg,2\nx,1\n")
    err = refusal(data / "t.csv", tmp_path / "dest", status=1)
    assert "gone.jpg: it cannot be read: No such file or directory" in err
    assert "or its extension names no field" in err


def test_values_of_parquet_that_json_has_no_form_for(data: Path, tmp_path: Path) -> None:
    rows = [{"image": "a.jpg", "day": datetime.date(2020, 1, 31), "list": [1, 2], "x": math.nan}]
    assert pack(table(data / "t.parquet", rows), tmp_path / "dest", "--keep-columns")[0] == 0
    assert json_in(tmp_path / "dest")["a"] == {"day": "2020-01-31", "list": [1, 2], "x": None}


def test_parquet_that_cannot_be_read(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = table(data / "t.parquet")
    (data / "cut.parquet").write_bytes(source.read_bytes()[:-9])
    parquet.write_table(pyarrow.table({"path": pyarrow.array([], pyarrow.string())}), data / "empty.parquet")
    for name, message in (("cut", "cannot be read as parquet"), ("empty", "has no rows")):
        status, _, err = pack(data / f"{name}.parquet", tmp_path / "dest")
        assert (status, message in err) == (2, True)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "install pyarrow: pip install 'streamload[parquet]'" in refusal(source, tmp_path / "dest")

"""Tables of several paths in a row, of texts, without labels, and in parquet."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from image_folders import image_bytes, image_folder, pack, packed_samples
from pyarrow import parquet
from test_tools_kinds import sixteen_bits

ROWS = [
    {"image": "a.jpg", "mask": "m/a.png", "caption": "one", "kind": "x", "by": None},
    {"image": "b.png", "mask": "m/b.PNG", "caption": None, "kind": "y", "by": "Ann"},
    {"image": "deep/c.jpeg", "mask": None, "caption": "three", "kind": "x", "by": "Bob"},
]


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
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        lines = [rows[0].keys(), *(["" if value is None else value for value in row.values()] for row in rows)]
        path.write_text("".join(",".join(line) + "\n" for line in lines))
    return path


PAIRS = ["--path-column", "image", "--path-column", "mask"]
SAMPLES = {
    "a": {"jpg": image_bytes(0), "mask.png": sixteen_bits()},
    "b": {"png": image_bytes(1, ".png"), "mask.png": sixteen_bits()},
    "deep/c": {"jpg": image_bytes(2)},
}


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_columns_of_paths_and_of_texts_without_labels(data: Path, tmp_path: Path, name: str) -> None:
    source = table(data / name)
    status, out, err = pack(source, tmp_path / "dest", *PAIRS, "--text-column", "caption")
    assert status == 0, err
    texts = {"a": {"txt": b"one"}, "b": {}, "deep/c": {"txt": b"three"}}
    assert packed_samples(tmp_path / "dest") == {key: sample | texts[key] for key, sample in SAMPLES.items()}
    assert "columns 'image', 'mask', texts from column 'caption', and there are no labels" in err
    assert "not every sample has every field: 1 without 'mask.png', 1 without 'txt'" in out
    assert 'fields=("jpg;png", "txt?"), transform={"jpg;png": RandomResizedCrop(224)})' in out
    assert not (tmp_path / "dest" / "classes.json").exists()
    columns = ["--label-column", "kind", "--keep-columns"]
    assert pack(source, tmp_path / "labels", *PAIRS, *columns)[0] == 0
    samples = packed_samples(tmp_path / "labels")
    assert {key: sample["cls"] for key, sample in samples.items()} == {"a": b"0", "b": b"1", "deep/c": b"0"}
    assert json.loads(samples["b"]["json"])["by"] == "Ann"
    assert set(json.loads(samples["b"]["json"])) == {"caption", "by"}


def test_any_file_may_stand_in_a_table(tmp_path: Path) -> None:
    (tmp_path / "1.wav").write_bytes(b"RIFF")
    (tmp_path / "v1.2.tokens.npy.gz").write_bytes(b"tokens")
    (tmp_path / "1.json").write_bytes(b"{}")
    rows = [
        {"path": "1.wav", "other": "1.json", "label": 3, "text": "a", "more": 0.5},
        {"path": "v1.2.tokens.npy.gz", "other": "1.json", "label": 4, "text": "b", "more": None},
    ]
    source = table(tmp_path / "t.parquet", rows)
    columns = ["--path-column", "path", "--path-column", "other", "--text-column", "text", "--text-column", "more"]
    status, _, err = pack(source, tmp_path / "dest", *columns, "--keep-columns")
    assert status == 0, err
    assert packed_samples(tmp_path / "dest") == {
        "1": {"wav": b"RIFF", "other.json": b"{}", "cls": b"3", "txt": b"a", "more.txt": b"0.5", "json": b"{}"},
        "v1_2_tokens": {"npy.gz": b"tokens", "other.json": b"{}", "cls": b"4", "txt": b"b", "json": b"{}"},
    }


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"image": "a.jpg", "kind": "x"},
            [],
            "looks like a label, of 'image', 'kind'; name it with --label-column, or",
        ),
        ({"image": "a.jpg"}, ["--text-column", "caption"], "has no column 'caption' (--text-column); its columns are"),
        ({"image": "a.jpg"}, ["--path-column", "image", "--text-column", "image"], "'image' is named twice"),
        ({"image": {"bytes": b"x" * 999, "path": "a.jpg"}}, [], "with streamload.pack"),
        (
            {"image": "a.jpg", "text": ["a", "b"]},
            ["--text-column", "text"],
            "line 1: the text in column 'text' is ['a', 'b']",
        ),
        (
            {"image": "a.jpg", "x": b"\x00"},
            ["--keep-columns"],
            "line 1: a column holds b'\\x00', which JSON cannot hold",
        ),
        ({"image": "a.jpg"}, ["--classes", "{0}/c.json"], "has no column of labels, which --classes numbers"),
        ({"image": "a.jpg", "A-B": "a.jpg", "a b": "a.jpg"}, ["--path-column", "image", "--path-column", "A-B"], None),
        (
            {"image": "a.jpg", "a.b": "a.jpg", "a b": "a.jpg"},
            ["--path-column", "image", "--path-column", "a.b", "--path-column", "a b"],
            "two columns would be the field 'a_b.jpg'; rename 'a b'",
        ),
    ],
)
def test_tables_that_cannot_be_samples(
    data: Path, tmp_path: Path, row: dict[str, Any], options: list[str], message: str | None
) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"classes": ["a"]}))
    source = table(data / "t.parquet", [row])
    status, _, err = pack(source, tmp_path / "dest", *(option.format(tmp_path) for option in options))
    assert status == (2 if message else 0), err
    assert len(err) < 600
    assert (message or "") in err
    assert (tmp_path / "dest").exists() == (message is None)


def test_values_of_parquet_that_json_has_no_form_for(data: Path, tmp_path: Path) -> None:
    rows = [{"image": "a.jpg", "day": datetime.date(2020, 1, 31), "list": [1, 2]}]
    assert pack(table(data / "t.parquet", rows), tmp_path / "dest", "--keep-columns")[0] == 0
    assert json.loads(packed_samples(tmp_path / "dest")["a"]["json"]) == {"day": "2020-01-31", "list": [1, 2]}


def test_parquet_that_cannot_be_read(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = table(data / "t.parquet")
    (data / "cut.parquet").write_bytes(source.read_bytes()[:-9])
    parquet.write_table(pyarrow.table({"path": pyarrow.array([], pyarrow.string())}), data / "empty.parquet")
    for name, message in (("cut", "cannot be read as parquet"), ("empty", "holds no row")):
        status, _, err = pack(data / f"{name}.parquet", tmp_path / "dest")
        assert (status, message in err) == (2, True)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, _, err = pack(source, tmp_path / "dest")
    assert (status, "install pyarrow: pip install 'streamload[parquet]'" in err) == (2, True)


def test_labels_by_id_in_parquet(tmp_path: Path) -> None:
    image_folder(tmp_path / "data", "a.jpg", "b.jpg")
    table(tmp_path / "data" / "labels.parquet", [{"id": "a", "label": 1}, {"id": "b", "label": 0}])
    assert pack(tmp_path / "data", tmp_path / "dest")[0] == 0
    assert {key: one["cls"] for key, one in packed_samples(tmp_path / "dest").items()} == {"a": b"1", "b": b"0"}

"""Folders of files that `shardify` packs by their IDs, and what it checks of a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from image_folders import pack, packed_samples, packs, refusal

from streamload import StreamLoader


def tensors(folder: Path, count: int = 6) -> Path:
    folder.mkdir()
    for number in range(count):
        torch.save(torch.full((2, 3), number), folder / f"id-{number}.pt")
    return folder


LABELS = {f"id-{number}": number % 2 for number in range(6)}


def test_one_file_for_each_id_with_a_column_of_splits(tmp_path: Path) -> None:
    data = tensors(tmp_path / "data")
    part_of = {name: "validation" if name in ("id-3", "id-4") else "train" for name in LABELS}
    rows = [f"{name},{label},{part_of[name]}\n" for name, label in LABELS.items()]
    (tmp_path / "labels.csv").write_text("id,label,part\n" + "".join(rows))
    options = ["--labels", tmp_path / "labels.csv", "--split-column", "part"]
    out, _ = packs(data, tmp_path / "dest", *options)
    assert 'batch_size=64, shuffle=True, fields=("pt", "cls"))' in out
    for part in ("train", "validation"):
        assert packed_samples(tmp_path / "dest" / part) == {
            name: {"pt": (data / f"{name}.pt").read_bytes(), "cls": b"%d" % LABELS[name]}
            for name in LABELS
            if part_of[name] == part
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
    packs(tmp_path / "data", tmp_path / "dest")
    samples = packed_samples(tmp_path / "dest")
    assert {key: (sorted(s), s["cls"]) for key, s in samples.items()} == {
        f"id-{n}": (["cls", "npy"], b"01"[n % 2 : n % 2 + 1]) for n in range(3)
    }


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({**LABELS, "id-9": 1}, "1 ID of '{0}/labels.json' without a file in '{0}/data': 'id-9'"),
        ({"id-0": 1}, "5 files without a label in '{0}/labels.json': 'id-1'"),
        ({**LABELS, "id-0": 0.5}, "labels.json', ID 'id-0', column 'label' is 0.5, but most labels are numbers"),
        ({**LABELS, "id-0": 2**63}, f"'id-0', column 'label' is {2**63}, but most labels are numbers"),
        ([], "holds no mapping"),
    ],
)
def test_ids_that_do_not_agree(tmp_path: Path, labels: object, message: str) -> None:
    data = tensors(tmp_path / "data")
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    assert message.format(tmp_path) in refusal(data, tmp_path / "dest", "--labels", tmp_path / "labels.json")


def test_ids_without_labels_say_what_is_missing(tmp_path: Path) -> None:
    data = tensors(tmp_path / "data")
    assert "one sample without labels; " in packs(data, tmp_path / "without")[1]
    (data / "folder").mkdir()
    assert "give their labels with --labels FILE" in refusal(data, tmp_path / "dest")
    torch.save(LABELS, tmp_path / "labels.pt")
    assert "is not JSON" in refusal(data, tmp_path / "dest", "--labels", tmp_path / "labels.pt")
    assert "did you mean 'labels.pt'?" in refusal(data, tmp_path / "dest", "--labels", tmp_path / "label.pt")


def test_damaged_tensors_are_named_without_unpickling(tmp_path: Path) -> None:
    data = tensors(tmp_path / "data")
    (data / "labels.json").write_text(json.dumps(LABELS))
    whole = (data / "id-2.pt").read_bytes()
    for damaged in (whole[:-40], whole[: len(whole) // 2], b"", b"text", b"PK\x05\x06" + bytes(18)):
        (data / "id-2.pt").write_bytes(damaged)
        err = refusal(data, tmp_path / "dest", status=1)
        assert "error: 1 of 6 files is damaged or of an unexpected type" in err
        assert "id-2.pt: " in err
    assert "id-2.pt: it is not PT (torch.save did not write it)" in err  # an archive without tensors
    assert pack(data, tmp_path / "dest", "--skip-bad")[0] == 0
    assert len(packed_samples(tmp_path / "dest")) == 5
    assert "--resize is for images" in pack(data, tmp_path / "other", "--resize", 8)[2]


@pytest.mark.parametrize(("rows", "message"), [("a.npy,0\na.pt,1\n", "1 ID of"), ("a,0\na,1\n", "1 ID in two rows of")])
def test_one_id_under_two_names_is_refused(tmp_path: Path, rows: str, message: str) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    (tmp_path / "labels.csv").write_text(f"id,label\n{rows}")
    assert message in refusal(tmp_path, tmp_path.with_name("dest"), "--labels", tmp_path / "labels.csv")

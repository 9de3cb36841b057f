"""Arrays in `.npz` and `.npy` files, which `shardify` packs row by row."""

from __future__ import annotations

import io
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_folders import files_below, pack, packed_samples, packs, refusal

from streamload import ShardWriter, StreamLoader, StreamloadError
from streamload.pack.sources.arrays import closing_arrays, row_content, rows_of_arrays
from streamload.pack.sources.source import SourceOptions

X = np.arange(60, dtype=np.float32).reshape(10, 2, 3)
Y = np.arange(10) % 3


def npy(row: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, row)
    return buffer.getvalue()


def test_a_compressed_archive_that_was_rewritten_is_read_anew(tmp_path: Path) -> None:
    for value in (1, 2):
        np.savez_compressed(tmp_path / "data.npz", X=np.full((3, 2), value))
        packs(tmp_path / "data.npz", tmp_path / f"dest{value}")
        with StreamLoader(tmp_path / f"dest{value}", 3, fields=("x.npy",), num_workers=0) as loader:
            assert next(iter(loader))[0].unique().tolist() == [value]


@closing_arrays()
def test_arrays_that_are_rewritten_while_they_are_packed(tmp_path: Path) -> None:
    np.save(tmp_path / "data.npy", X)
    (row, *_), *_ = (sample.members for sample in rows_of_arrays(str(tmp_path / "data.npy"), SourceOptions()).samples)
    assert row_content(row, check=True) == npy(X[0])
    os.utime(tmp_path / "data.npy", (0, 0))
    with pytest.raises(StreamloadError, match="changed while it was packed"):
        row_content(row, check=True)


def test_rows_are_what_a_shard_writer_writes_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "data.npz", X=X, y=Y, weight=np.linspace(0, 1, 10), name=np.array([f"n{n}" for n in range(10)]))
    with ShardWriter(tmp_path / "written", max_count=4) as writer:
        arrays = dict(np.load(tmp_path / "data.npz"))
        writer.write_arrays(X=arrays["X"], weight=arrays["weight"], name=arrays["name"], cls=arrays["y"])
    monkeypatch.setattr(np, "load", None)  # nothing is read as a whole
    out, err = packs(tmp_path / "data.npz", tmp_path / "dest", "--no-shuffle", "--max-count", 4)
    assert "files are arrays 'X', 'weight', 'name'; labels are array 'y'" in err
    assert 'fields=("x.npy", "weight.npy", "name.npy", "cls"))' in out
    assert files_below(tmp_path / "dest") == files_below(tmp_path / "written")
    with StreamLoader(tmp_path / "dest", 10, fields=("x.npy", "cls"), num_workers=0) as loader:
        values, labels = next(iter(loader))
    assert (values.numpy() == X).all()
    assert labels.tolist() == Y.tolist()


@pytest.mark.parametrize("form", ["compressed", "by_columns", "npy", "npy_by_columns", "big_endian"])
def test_other_forms_give_the_same_rows(tmp_path: Path, form: str) -> None:
    path = tmp_path / ("data.npy" if form.startswith("npy") else "data.npz")
    array = X.astype(">f4") if form == "big_endian" else np.asfortranarray(X) if form.endswith("columns") else X
    if path.suffix == ".npy":
        np.save(path, array)
    elif form == "compressed":
        np.savez_compressed(path, x=array, labels=Y)
    else:
        np.savez(path, x=array, labels=Y)
    _, err = packs(path, tmp_path / "dest", "--workers", 2 if form == "compressed" else 1, "--max-count", 3)
    samples = packed_samples(tmp_path / "dest")
    expected = array if form == "big_endian" else X
    if path.suffix == ".npy":
        assert "there are no labels" in err
        assert samples == {f"{n:09d}": {"npy": npy(expected[n])} for n in range(10)}
    else:
        assert samples == {f"{n:09d}": {"x.npy": npy(expected[n]), "cls": b"%d" % Y[n]} for n in range(10)}


class Bomb:
    def __reduce__(self) -> Any:
        return (pickle.loads, (b"not reached",))


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        (
            {"x": X, "y": Y[:9]},
            [],
            "its arrays differ in their number of rows (x 10, y 9); save arrays of equal length",
        ),
        ({"x": np.array([Bomb()] * 10)}, [], "cannot be read as arrays: the npy file holds Python objects"),
        ({"y": Y, "x": np.array([Bomb()] * 10)}, ["--label-column", "x"], "holds Python objects"),
        ({"x": X, "scale": np.float32(3)}, [], "the array 'scale' is a single value and has no rows"),
        ({"x": X[:0]}, [], "has no rows"),
        ({}, [], "holds no arrays"),
        ({"y": Y}, [], "holds only labels"),
        ({"x": X}, ["--label-column", "z"], "has no column 'z'; its columns are x"),
        ({"x": X, "z": Y}, ["--label-column", "x"], "data.npz', row 0, array 'x' is [[0.0, "),
        ({"x": X}, ["--classes", "{0}/c.json"], "has no column of labels to number"),
        ({"x": X}, ["--keep-columns", "--stems"], "--stems and --keep-columns would have no effect on a file of"),
        ({"x": X}, ["--labels", "{0}/c.json"], "--labels would have no effect"),
        ({"x": X}, ["--resize", "8"], "--resize is for images"),
    ],
)
def test_arrays_that_are_no_samples(tmp_path: Path, arrays: dict[str, Any], options: list[str], message: str) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    (tmp_path / "c.json").write_text(json.dumps({"classes": ["a"]}))
    err = refusal(tmp_path / "data.npz", tmp_path / "dest", *(option.format(tmp_path) for option in options))
    assert message in err


def test_files_that_are_cut_short_or_hold_other_things(tmp_path: Path) -> None:
    np.savez(tmp_path / "whole.npz", x=X)
    np.save(tmp_path / "whole.npy", X)
    for name in ("whole.npz", "whole.npy"):
        path = tmp_path / f"cut-{name}"
        path.write_bytes((tmp_path / name).read_bytes()[:-30])
        assert "cannot be read as arrays" in refusal(path, tmp_path / "dest")
    np.savez_compressed(tmp_path / "bad.npz", x=np.random.default_rng(0).integers(0, 255, (10, 4000), np.uint8))
    content = bytearray((tmp_path / "bad.npz").read_bytes())
    content[20_000] ^= 255
    (tmp_path / "bad.npz").write_bytes(content)
    assert "bad.npz' cannot be read as arrays" in refusal(tmp_path / "bad.npz", tmp_path / "dest")


@pytest.mark.parametrize("content", ["pair", "dict", "tensor"])
def test_tensors_row_by_row(tmp_path: Path, content: str) -> None:
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    torch.save({"pair": (x, y), "dict": {"x": x, "y": y}, "tensor": x}[content], tmp_path / "data.pt")
    packs(tmp_path / "data.pt", tmp_path / "dest", "--workers", 1, "--max-count", 3)
    labels = [{} if content == "tensor" else {"cls": b"%d" % label} for label in Y]
    field = "npy" if content == "tensor" else "x.npy"
    assert packed_samples(tmp_path / "dest") == {f"{n:09d}": {field: npy(X[n])} | labels[n] for n in range(10)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"x": torch.zeros(3), "epoch": 5}, "does not hold tensors alone; save a tensor, a dict, or a tuple such as"),
        ({"x": torch.zeros(3, dtype=torch.bfloat16)}, "convert the tensor before saving it, for example with .float()"),
    ],
)
def test_other_things_in_a_file_of_tensors(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "data.pt")
    status, _, err = pack(tmp_path / "data.pt", tmp_path / "dest")
    assert (status, message in err) == (2, True), err


class Trap:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.folder),))


def test_nothing_in_a_file_of_tensors_or_arrays_is_executed(tmp_path: Path) -> None:
    torch.save(Trap(tmp_path / "made"), tmp_path / "data.pt")
    err = refusal(tmp_path / "data.pt", tmp_path / "dest")
    assert "is damaged, of an old format, or holds more than tensors; save only tensors" in err
    np.savez_compressed(tmp_path / "data.npz", x=np.array([Trap(tmp_path / "made")]))
    assert "data.npz' cannot be read as arrays" in refusal(tmp_path / "data.npz", tmp_path / "dest")
    assert not (tmp_path / "made").exists()

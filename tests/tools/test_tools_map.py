"""`map_shards` and `streamload map`: a dataset made of another one, in its order, with its keys."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers.faults import FaultServer
from typer.testing import CliRunner

from streamload import ShardWriter, StreamLoader, TarDataset, map_shards
from streamload.cli.main import app
from streamload.errors import StreamloadError
from streamload.index.listing import list_shards

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

Sample = dict[str, Any]
COUNT = 60


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small shards of ten samples."""
    folder = tmp_path_factory.mktemp("mapped") / "source"
    with ShardWriter(folder, max_count=10) as writer:
        for number in range(COUNT):
            writer.write({"__key__": f"{number:03d}", "txt": f"text {number}", "cls": number % 3})
    return folder


def even_with_length(sample: Sample) -> Sample | None:
    number = int(sample["__key__"])
    return {**sample, "length.cls": len(sample["txt"])} if number % 2 == 0 else None


def joined(samples: list[Sample]) -> Sample:
    return {"__key__": samples[0]["__key__"], "txt": b"+".join(sample["txt"] for sample in samples)}


def rows(folder: Path, *fields: str) -> list[tuple[Any, ...]]:
    return list(TarDataset(folder, fields=("__key__", *fields)))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.tar"))}


def test_samples_are_left_out_or_get_fields_and_small_shards_are_merged(source: Path, tmp_path: Path) -> None:
    map_shards(even_with_length, source, tmp_path / "new", workers=1, max_count=1000)
    expected = [(f"{n:03d}", f"text {n}", n % 3, len(f"text {n}")) for n in range(0, COUNT, 2)]
    assert rows(tmp_path / "new", "txt", "cls", "length.cls") == expected
    assert list(content(tmp_path / "new")) == ["shard-000000.tar"]


@pytest.mark.parametrize("kind", ["local", "tar.gz", "remote"])
def test_each_shard_becomes_one_of_its_name_with_the_bytes_of_a_writer(source: Path, tmp_path: Path, kind: str) -> None:
    urls: Any = source
    if kind == "tar.gz":
        urls = [tmp_path / f"{number}.tar.gz" for number in range(6)]
        for number, path in enumerate(urls):
            path.write_bytes(gzip.compress((source / f"shard-{number:06d}.tar").read_bytes()))
    with FaultServer(source) as server:
        if kind == "remote":
            urls = f"{server.url}/shard-{{000000..000005}}.tar"
        map_shards(lambda sample: sample, urls, tmp_path / "copied", workers=2 if kind == "local" else 1)
    names = [f"{number}.tar" for number in range(6)] if kind == "tar.gz" else list(content(source))
    assert content(tmp_path / "copied") == dict(zip(names, content(source).values(), strict=True))
    assert list_shards(tmp_path / "copied").counts == (10,) * 6
    if kind == "local":
        map_shards(long_enough, source, tmp_path / "fewer", workers=1, where="label != 1")
        assert list_shards(tmp_path / "fewer").counts == (6, 7, 7, 6, 7)
        assert list(content(tmp_path / "fewer")) == names[1:]  # of the first shard nothing is left


def test_shards_of_one_name_in_several_folders_are_numbered(source: Path, tmp_path: Path) -> None:
    for name in "ab":
        shutil.copytree(source, tmp_path / name)
    urls = [tmp_path / "a", tmp_path / "b"]
    map_shards(with_vector, urls, tmp_path / "vectors", sidecar=True, workers=1)
    assert list(content(tmp_path / "vectors")) == [f"shard-{number:06d}.tar" for number in range(12)]
    joined = TarDataset(urls, fields=("__key__", "vector.npy?"), join=tmp_path / "vectors")
    assert [key for key, _ in joined] == 2 * [f"{n:03d}" for n in range(COUNT)]
    assert all(vector is None or vector[0] == int(key) for key, vector in joined)
    assert sum(vector is None for _, vector in joined) == 20
    for max_count in (60, 1000):  # in two new shards, and in one
        with pytest.raises((ValueError, StreamloadError), match="two samples have the key '000'"):
            map_shards(with_vector, urls, tmp_path / str(max_count), workers=1, max_count=max_count)


def test_shards_of_other_names_in_the_destination_are_in_the_way(source: Path, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    shutil.copy(source / "shard-000000.tar", tmp_path / "new" / "old.tar")
    with pytest.raises(ValueError, match="already holds 1 shard"):
        map_shards(even_with_length, source, tmp_path / "new", workers=1)
    with pytest.raises(ValueError, match=r"holds 'old.tar', which neither an index nor a packing run names"):
        map_shards(even_with_length, source, tmp_path / "new", workers=1, overwrite=True)
    assert list(content(tmp_path / "new")) == ["old.tar"]


def test_a_shard_that_is_too_large_is_cut(source: Path, tmp_path: Path) -> None:
    map_shards(lambda sample: sample, source, tmp_path / "new", workers=1, max_count=4)
    names = [f"shard-00000{n}{further}.tar" for n in range(6) for further in ("", "_000001", "_000002")]
    assert list(content(tmp_path / "new")) == names
    assert list_shards(tmp_path / "new").counts == (4, 4, 2) * 6
    assert [key for (key,) in rows(tmp_path / "new")] == [f"{n:03d}" for n in range(COUNT)]


def with_vector(sample: Sample) -> Sample | None:
    number = int(sample["__key__"])
    return None if 10 <= number < 20 else {**sample, "vector.npy": np.full(3, number)}


def vectors(samples: list[Sample]) -> Iterator[Sample]:
    for sample in samples:
        yield {"vector.npy": np.full(3, int(sample["__key__"]))}


def test_a_sidecar_holds_the_new_fields_alone_and_is_joined(source: Path, tmp_path: Path) -> None:
    map_shards(with_vector, source, tmp_path / "some", sidecar=True, workers=1)
    assert list_shards(tmp_path / "some").counts == (10, 0, 10, 10, 10, 10)
    assert sorted(TarDataset(tmp_path / "some")[0]) == ["__key__", "__url__", "vector.npy"]
    options: dict[str, Any] = {"num_workers": 0, "where": "label >= 0", "collate_fn": list}
    fields = ("__key__", "txt", "vector.npy?")
    with StreamLoader(source, 10, fields=fields, join=tmp_path / "some", **options) as loader:
        rows = [row for batch in loader for row in batch]
    assert [(key, text, None if 10 <= n < 20 else n) for n, (key, text) in enumerate(row[:2] for row in rows)] == [
        (f"{n:03d}", f"text {n}", None if vector is None else int(vector[0])) for n, (_, _, vector) in enumerate(rows)
    ]
    map_shards(vectors, source, tmp_path / "all", sidecar=True, batch_size=4, workers=1)
    expected = [(f"{n:03d}", [n] * 3) for n in range(COUNT)]
    assert vectors_of(source, tmp_path / "all") == expected
    map_shards(lambda sample: sample, source, tmp_path / "last", where="key >= '025'", workers=1)
    assert vectors_of(tmp_path / "last", tmp_path / "all") == expected[25:], "the shards keep their names"
    turned = [source / f"shard-{number:06d}.tar" for number in (3, 0, 5)]
    map_shards(vectors, turned, tmp_path / "three", sidecar=True, batch_size=10, workers=1)
    assert vectors_of(turned[1:2], tmp_path / "three") == expected[:10]


def vectors_of(shards: Any, sidecar: Path) -> list[tuple[str, list[int]]]:
    joined = TarDataset(shards, fields=("__key__", "vector.npy"), join=sidecar)
    return [(key, vector.tolist()) for key, vector in joined]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda sample: {**sample, "txt": b"other"}, {}, "samples already have a field 'txt'.*sample '000'"),
        (lambda sample: {"__key__": "x", "a.txt": "a"}, {}, "{'__key__': 'x', 'a.txt': 'a'} was returned for '000'"),
        (
            lambda sample: [sample, sample],
            {},
            "the function returned 2 samples for 1; a sidecar needs one, or None, for each",
        ),
        (lambda samples: samples[:1], {"batch_size": 4}, "the function returned 1 sample for 4"),
        (lambda _: [7], {"batch_size": 1}, "7 was returned for '000'"),
        (lambda sample: sample, {}, "has no field"),
        (lambda _: "text", {}, "the function returned str"),
        (with_vector, {"max_count": 5}, "leave out max_bytes and max_count"),
        (lambda _: 1 / 0, {"sidecar": False}, "ZeroDivisionError"),
        (lambda _: {"__key__": "x"}, {"sidecar": False}, "has no field"),
        (lambda _: "text", {"sidecar": False}, "'t'|str"),
        (lambda sample: [sample, sample], {"sidecar": False}, "key"),
    ],
)
def test_a_wrong_function_is_one_error_and_nothing_is_left(
    source: Path, tmp_path: Path, function: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((StreamloadError, ValueError), match=message):
        map_shards(function, source, tmp_path / "new", workers=1, **{"sidecar": True, **options})
    assert content(tmp_path / "new") == {}


def test_only_shards_that_changed_are_done_again(source: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)

    def until_050(sample: Sample) -> Sample:
        if sample["__key__"] == "050" and not (tmp_path / "go on").exists():
            raise ValueError("not yet")
        return sample

    with pytest.raises(StreamloadError, match=r"not yet.*sample '050'"):
        map_shards(until_050, copied, tmp_path / "new", workers=1)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "new").glob("*.tar")}
    (tmp_path / "go on").touch()
    os.utime(copied / "shard-000001.tar", ns=(0, 0))
    map_shards(until_050, copied, tmp_path / "new", workers=1, resume=True)
    assert content(tmp_path / "new") == content(source)
    after = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in (tmp_path / "new").glob("*.tar")}
    assert len(before) == 5
    assert {name for name in before if before[name] != after[name]} == {"shard-000001.tar"}


def test_batches_of_one_shard_each_and_a_condition(source: Path, tmp_path: Path) -> None:
    map_shards(joined, source, tmp_path / "new", batch_size=3, where="label == 1", workers=1)
    found = rows(tmp_path / "new", "txt")
    assert found[0] == ("001", "text 1+text 4+text 7")
    assert sum(len(text.split("+")) for _, text in found) == 20
    assert all(len({int(one) // 10 for one in text.replace("text ", "").split("+")}) == 1 for _, text in found)


def long_enough(sample: Sample) -> Sample | None:
    return sample if len(sample["txt"]) >= 7 else None


def test_the_folder_of_the_shards_is_no_destination(source: Path) -> None:
    before = content(source)
    with pytest.raises(ValueError, match="is the folder of the shards"):
        map_shards(even_with_length, source, source / "." / "../source", overwrite=True)
    assert content(source) == before


def test_the_command(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "filters_here.py").write_text(
        "def first(sample):\n    return sample if sample['cls'] == b'0' else None\n"
    )
    done = CliRunner().invoke(app, ["map", "filters_here:first", str(source), "new", "--workers", "1"])
    assert done.exit_code == 0, done.output
    assert {label for _, label in rows(tmp_path / "new", "cls")} == {0}
    for function, message in (
        ("filters_here", "write MODULE:FUNCTION"),
        ("nowhere:first", "cannot be imported"),
        ("filters_here:second", "has no attribute 'second'"),
    ):
        wrong = CliRunner().invoke(app, ["map", function, str(source), "other"])
        assert wrong.exit_code == 2
        assert message in " ".join(wrong.output.split())

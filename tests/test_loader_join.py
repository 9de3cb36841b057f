"""`join`: fields of the same samples that lie in sidecars, read exactly, in the same order."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from make_shards import write_samples
from servers.faults import FaultServer
from typer.testing import CliRunner

from streamload import Mixture, Portion, ShardWriter, StreamLoader, TarDataset
from streamload.cli.main import app
from streamload.errors import DatasetIndexError, DecodeError, SampleError, ShardNotFoundError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SAMPLES = 300
PER_SHARD = 50
LACKING = 123
FIELDS = ("__key__", "bin", "emb.npy")


def key(number: int) -> str:
    return f"{number:05d}"


def content(number: int) -> bytes:
    return number.to_bytes(4, "little") * (200 + number % 7)


def embedding(number: int) -> np.ndarray[Any, Any]:
    return np.arange(number, number + 64, dtype=np.float32)


def write_main(place: Path, first: int = 0) -> Path:
    numbers = range(first, first + SAMPLES)
    samples = [{"__key__": key(number), "bin": content(number), "cls": number % 10} for number in numbers]
    return Path(write_samples(place, samples, max_count=PER_SHARD))


def write_sidecar(place: Path, first: int = 0) -> Path:
    """Samples have one field or two, so that they are of unlike sizes."""
    with ShardWriter(place, max_count=PER_SHARD) as writer:
        for number in range(first, first + SAMPLES):
            extra = {"cap.txt": f"caption {number}"} if number % 3 else {}
            writer.write({"__key__": key(number), "emb.npy": embedding(number), **extra})
    return place


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with shards, `emb`, and `lacking`, in which one sample is not there."""
    place = tmp_path_factory.mktemp("join")
    write_main(place / "shards")
    write_sidecar(place / "emb")
    lacking = shutil.copytree(place / "emb", place / "lacking")
    name = f"shard-{LACKING // PER_SHARD:06d}.tar"
    with tarfile.open(place / "emb" / name) as whole, tarfile.open(lacking / name, "w") as rest:
        for member in whole:
            if not member.name.startswith(key(LACKING)):
                rest.addfile(member, whole.extractfile(member))
    assert CliRunner().invoke(app, ["index", str(lacking)]).exit_code == 0
    return place


def rows(loader: Any) -> Iterator[tuple[int, bytes, Any]]:
    for keys, contents, embeddings in loader:
        yield from zip(map(int, keys), contents, embeddings, strict=True)


def check(found: list[tuple[int, bytes, Any]]) -> list[int]:
    for number, data, values in found:
        assert data == content(number)
        assert np.array_equal(np.asarray(values), embedding(number))
    return [number for number, _, _ in found]


def numbers_of(urls: Any, **options: Any) -> list[int]:
    with StreamLoader(urls, 32, shuffle=True, fields=("__key__",), num_workers=0, **options) as loader:
        return [int(name) for (keys,) in loader for name in keys]


def test_a_joined_field_comes_with_its_sample_in_the_same_order(dataset: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"fields": FIELDS, "join": [dataset / "emb"], "num_workers": 1}
    with StreamLoader(dataset / "shards", 32, shuffle=True, **options) as loader:
        assert check(list(rows(loader))) == numbers_of(dataset / "shards")
        assert check(list(rows(loader))) != numbers_of(dataset / "shards")  # the next epoch
    bare = shutil.copytree(dataset / "shards", tmp_path / "bare", ignore=shutil.ignore_patterns(".streamload"))
    with StreamLoader(bare, 32, shuffle=True, fields=FIELDS, join=str(dataset / "emb"), num_workers=0) as loader:
        assert check(list(rows(loader))) == numbers_of(dataset / "shards")


@pytest.mark.parametrize(("main_is_remote", "workers"), [(True, 0), (False, 1)])
def test_shards_and_sidecars_may_lie_in_different_places(dataset: Path, main_is_remote: bool, workers: int) -> None:
    with FaultServer(dataset) as server:
        remote = f"{server.url}/{{}}/shard-{{{{000000..000005}}}}.tar".format
        main = remote("shards") if main_is_remote else dataset / "shards"
        with StreamLoader(
            main, 32, shuffle=True, fields=FIELDS, join=[remote("emb")], num_workers=workers, memory_budget="64MiB"
        ) as loader:
            assert check(list(rows(loader))) == numbers_of(dataset / "shards")
            assert sorted(check(list(rows(loader)))) == list(range(SAMPLES))
        log = server.report().log
        if not main_is_remote:
            assert not [path for _, path, _ in log if "/shards/" in path]
        with StreamLoader(main, 32, fields=("emb.npy",), join=[remote("emb")], num_workers=workers) as loader:
            values = np.concatenate([np.asarray(batch) for (batch,) in loader])
        assert np.array_equal(values[:, 0], np.arange(SAMPLES))


def test_a_dataset_by_number_has_the_fields_of_both(dataset: Path) -> None:
    joined = TarDataset(dataset / "shards", join=dataset / "emb")
    assert sorted(joined[4]) == ["__key__", "__url__", "bin", "cap.txt", "cls", "emb.npy"]
    assert joined[4]["cap.txt"] == "caption 4"
    assert "cap.txt" not in joined[3]
    assert joined[4]["__url__"] == str(dataset / "shards" / "shard-000000.tar")
    assert np.array_equal(joined[-1]["emb.npy"], embedding(SAMPLES - 1))
    fields = ("cls;emb.npy", "cap.txt?", "emb.npy;bin")
    both = TarDataset(dataset / "shards", fields=fields, join=[dataset / "emb"], verify=True)
    label, caption, values = both[4]
    assert (label, caption) == (4, "caption 4")
    assert np.array_equal(values, embedding(4))
    assert both[3][1] is None


def test_a_sample_that_a_sidecar_lacks_lacks_the_field(dataset: Path) -> None:
    options: dict[str, Any] = {"join": dataset / "lacking", "num_workers": 0}
    with StreamLoader(dataset / "shards", 32, fields=FIELDS, **options) as loader:
        with pytest.raises(SampleError, match=r"no field 'emb.npy'; it has bin, cls; its sidecar lacks") as caught:
            list(loader)
        assert caught.value.key == key(LACKING)
    with StreamLoader(dataset / "shards", 32, fields=FIELDS, on_error="skip", **options) as loader:
        assert check(list(rows(loader))) == [number for number in range(SAMPLES) if number != LACKING]
    samples = TarDataset(dataset / "shards", fields=("__key__", "emb.npy?"), join=dataset / "lacking")
    assert [name for name, values in samples if values is None] == [key(LACKING)]


def test_damage_in_a_sidecar_is_named_with_the_sidecar(dataset: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(dataset / "emb", tmp_path / "emb")
    shard = damaged / "shard-000002.tar"
    data = bytearray(shard.read_bytes())
    where = data.index(embedding(110).tobytes())
    data[where] ^= 1
    times = shard.stat()
    shard.write_bytes(data)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    with StreamLoader(dataset / "shards", 32, fields=FIELDS, join=damaged, num_workers=0, verify=True) as loader:
        with pytest.raises(DecodeError, match=r"emb.npy.*damaged") as caught:
            list(loader)
    assert caught.value.url == str(shard)
    assert caught.value.key == key(110)


def test_datasets_of_a_mixture_have_sidecars_of_their_own(dataset: Path, tmp_path: Path) -> None:
    write_main(tmp_path / "more", 1000)
    write_sidecar(tmp_path / "more-emb", 1000)
    mixture = Mixture(
        {
            "some": Portion(dataset / "shards", 1, join=dataset / "emb"),
            "more": Portion(tmp_path / "more", 1, join=[tmp_path / "more-emb"]),
        }
    )
    with StreamLoader(mixture, 30, shuffle=True, fields=FIELDS, num_workers=0) as loader:
        found = check(list(rows(loader)))
    assert sorted(found) == [*range(SAMPLES), *range(1000, 1000 + SAMPLES)]


def test_what_is_no_sidecar_is_refused_with_what_to_do(dataset: Path, tmp_path: Path) -> None:
    def refused(join: Any, error: type[Exception], match: str) -> None:
        with pytest.raises(error, match=match):
            StreamLoader(dataset / "shards", join=join)

    bare = shutil.copytree(dataset / "emb", tmp_path / "bare", ignore=shutil.ignore_patterns(".streamload"))
    refused(bare, DatasetIndexError, r"join=.*bare' has no index.*streamload index")
    few = tmp_path / "few"
    write_samples(few, [{"__key__": key(0), "emb.npy": embedding(0)}])
    refused([few], ValueError, r"few' has 1 shard, but 'shard-000001.tar', one of 6, has no unique match")
    refused(write_main(tmp_path / "same"), ValueError, r"same' has the field 'bin', which the shards have too")
    refused(dataset / "nothing", ShardNotFoundError, "no such shard or folder")
    with pytest.raises(ValueError, match=r"no sample has 'emb'; there are bin, cls, "):
        StreamLoader(dataset / "shards", fields=("emb",), join=dataset / "emb")
    with pytest.raises(ValueError, match=r"join= and a Mixture don't go together"):
        StreamLoader(Mixture({"a": (dataset / "shards", 1)}), join=dataset / "emb")


def test_samples_in_another_order_are_refused(dataset: Path, tmp_path: Path) -> None:
    with ShardWriter(tmp_path / "turned", max_count=PER_SHARD) as writer:
        for shard in range(0, SAMPLES, PER_SHARD):
            for number in reversed(range(shard, shard + PER_SHARD)):
                writer.write({"__key__": key(number), "emb.npy": embedding(number)})
    with StreamLoader(dataset / "shards", fields=FIELDS, join=tmp_path / "turned", num_workers=0) as loader:
        with pytest.raises(DatasetIndexError, match="ordered differently from those of its shard"):
            list(loader)


@pytest.mark.exhaustive
def test_parts_of_a_sidecar_are_fetched_once_and_released(tmp_path: Path) -> None:
    for name, size in (("shards", 0), ("large", 100 << 10)):
        write_samples(tmp_path / name, [{f"{name}.bin": bytes(size)}] * 1_000, max_count=100)
    options: dict[str, Any] = {"shuffle": 200, "memory_budget": "80MiB", "num_workers": 0}
    with FaultServer(tmp_path) as server:
        urls = f"{server.url}/{{}}/shard-{{{{000000..000009}}}}.tar".format
        with StreamLoader(urls("shards"), 10, join=urls("large"), fields=("__key__", "large.bin"), **options) as loader:
            assert sorted(int(name) for keys, _ in loader for name in keys) == list(range(1_000))
        assert server.report().sent_bytes < 1.1 * 1_000 * (100 << 10)


def test_a_sidecar_of_other_shards_is_refused(dataset: Path, tmp_path: Path) -> None:
    write_sidecar(tmp_path / "others", SAMPLES)
    samples = TarDataset(dataset / "shards", fields=("emb.npy?",), join=tmp_path / "others")
    with pytest.raises(DatasetIndexError, match="matches no sample of its shard, .*;") as caught:
        samples[0]
    assert str(caught.value.url).endswith("others/shard-000000.tar")

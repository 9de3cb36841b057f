"""`streamload index|ls|verify` for shards in a bucket and for compressed ones."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from backports import zstd
from image_folders import files_below, run
from indexed_shards import read_index, table_in
from remote_places import Place
from servers.nginx import WebServer
from written_shards import assert_same_tables

from streamload import ShardWriter, StreamLoader
from streamload.cli import main as streamload
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages
from streamload.tar.scan import scan_shard

pytestmark = pytest.mark.usefixtures("feeders_in_threads")


def put(dataset: Path, bucket: Place) -> Place:
    for path in dataset.glob("*.tar"):
        shutil.copy(path, bucket.folder)
    return bucket


def numbers(folder: Path, count: int = 3000) -> Path:
    """One shard of 9 MB and one of a few samples."""
    with ShardWriter(folder, max_count=count, index=False) as writer:
        for number in range(count + 7):
            noise = np.random.default_rng(number).bytes(1500) if number < count else b"small"
            writer.write({"__key__": f"{number:06d}", "bin": noise, "cls": number})
    return folder


def compressed(folder: Path) -> Path:
    """The same shards, one as gzip and one as zstd."""
    packed = folder.parent / "packed"
    packed.mkdir()
    first, second = sorted(folder.glob("*.tar"))
    (packed / f"{first.name}.gz").write_bytes(gzip.compress(first.read_bytes(), 1))
    (packed / f"{second.name}.zst").write_bytes(zstd.compress(second.read_bytes()))
    return packed


def test_index_of_a_bucket_is_that_of_the_local_folder(dataset: Path, bucket: Place) -> None:
    before = set(put(dataset, bucket).files())
    status, out, err = run(streamload.app, "index", bucket.url, "--workers", 2, *bucket.options)
    assert (status, out) == (0, "indexed 3 shards, 12 samples\n")
    assert "indexing: 3 of 3 shards" in err
    written = bucket.files()
    assert set(written) - before == {name for name in files_below(dataset) if name.startswith(".streamload/")}
    for path in (dataset / ".streamload").glob("tables-*"):
        assert written[f".streamload/{path.name}"] == path.read_bytes()
    listing = list_shards(bucket.url, storages=Storages(bucket.storage_options))
    assert listing.counts == (5, 5, 2)
    assert all(shard.etag for shard in listing.shards)
    assert run(streamload.app, "verify", bucket.url, *bucket.options)[:2] == (0, "3 shards verified, no damage\n")
    local = run(streamload.app, "ls", "--samples", dataset)
    assert run(streamload.app, "ls", "--samples", bucket.url, *bucket.options) == local


@pytest.mark.parametrize("remote", [False, True])
def test_compressed_shards_are_indexed_listed_verified_and_loaded(tmp_path: Path, bucket: Place, remote: bool) -> None:
    plain = numbers(tmp_path / "numbers", 600)
    packed = compressed(plain)
    url, options = str(packed), ()
    if remote:
        url, options = bucket.url, bucket.options
        for path in packed.iterdir():
            shutil.copy(path, bucket.folder)
    assert run(streamload.app, "index", url, *options)[0] == 0
    index = read_index((bucket.folder if remote else packed) / ".streamload")
    for entry, path in zip(index.shards, sorted(plain.glob("*.tar")), strict=True):
        assert entry.bytes == (packed / entry.name).stat().st_size
        assert_same_tables(table_in(index, entry.name), scan_shard(memoryview(path.read_bytes()), "", every_byte=True))
    assert run(streamload.app, "verify", url, *options)[0] == 0
    status, out, _ = run(streamload.app, "ls", url, *options)
    assert status == 0
    assert out.splitlines()[1].split()[:3] == ["shard-000000.tar.gz", f"{index.shards[0].bytes:,}", "600"]
    storage_options = bucket.storage_options if remote else None
    with StreamLoader(url, 50, fields=("cls", "bin"), storage_options=storage_options, num_workers=0) as loader:
        assert len(loader) == 13
        for _ in range(2):
            found = [pair for labels, rows in loader for pair in zip(labels.tolist(), rows, strict=True)]
            assert [label for label, _ in found] == list(range(607))
            assert found[5][1] == np.random.default_rng(5).bytes(1500)


@pytest.mark.exhaustive
def test_output_may_lie_elsewhere(dataset: Path, bucket: Place, tmp_path: Path, nginx: WebServer) -> None:
    put(dataset, bucket)
    assert run(streamload.app, "index", bucket.url, "--output", tmp_path / "index", *bucket.options)[0] == 0
    storages = Storages(bucket.storage_options)
    assert list_shards(bucket.url, tmp_path / "index", storages).counts == (5, 5, 2)
    web = nginx.folder / tmp_path.name
    shutil.copytree(dataset, web, ignore=shutil.ignore_patterns(".streamload"))
    shards = f"{nginx.url}/{tmp_path.name}/shard-{{000000..000002}}.tar"
    status, _, err = run(streamload.app, "index", shards)
    assert (status, "--output" in err) == (2, True)
    of_s3 = ("--storage-option", f"s3={json.dumps(bucket.storage_options)}")
    assert run(streamload.app, "index", shards, "--output", f"{bucket.url}/of-the-web", *of_s3)[0] == 0
    assert list_shards(shards, f"{bucket.url}/of-the-web", Storages({"s3": bucket.storage_options})).counts == (5, 5, 2)
    assert run(streamload.app, "ls", shards)[1].splitlines()[-1].startswith("3 shards, 12 samples, ")


@pytest.mark.parametrize("remote", [False, True])
def test_a_damaged_shard_leaves_the_index_as_it_was(tmp_path: Path, bucket: Place, remote: bool) -> None:
    for number in range(3):
        with ShardWriter(tmp_path / "d" / f"s{number}-%06d.tar", max_count=5) as writer:
            for sample in range(3 + number):
                writer.write({"__key__": str(sample), "txt": "text"})
    folder, options, url = tmp_path / "d", (), str(tmp_path / "d")
    if remote:
        shutil.copytree(folder, bucket.folder, dirs_exist_ok=True)
        folder, options, url = bucket.folder, bucket.options, bucket.url
    # The first one is another shard now, of which the index must not hold the table either.
    (folder / "s0-000000.tar").write_bytes((folder / "s1-000000.tar").read_bytes())
    (folder / "s2-000000.tar").write_bytes((folder / "s2-000000.tar").read_bytes()[:2000])
    before = files_below(folder)
    status, out, err = run(streamload.app, "index", url, *options)
    assert (status, out) == (1, "")
    assert err.count("error:") == 1
    assert f"{url}/s2-000000.tar" in err
    assert files_below(folder) == before
    status, out, err = run(streamload.app, "verify", url, *options)
    assert status == 1
    assert all(f"s{number}-000000.tar" in line for number, line in zip((0, 2), out.splitlines(), strict=True))


def test_memory_and_wrong_options(dataset: Path, bucket: Place) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(f"{dataset}/", "/indexed/", recursive=True)
    try:
        memory.rm("/indexed/.streamload", recursive=True)
        assert run(streamload.app, "index", "memory://indexed")[0] == 0
        assert list_shards("memory://indexed").counts == (5, 5, 2)
    finally:
        memory.rm("/indexed", recursive=True)
    put(dataset, bucket)
    for option, message in (("no-value", "KEY=VALUE"), ("client_kwargs={x", "not JSON")):
        status, _, err = run(streamload.app, "ls", bucket.url, "--storage-option", option)
        assert (status, message in err) == (2, True)
    wrong = [text.replace("secret-key", "other") for text in bucket.options]
    status, _, err = run(streamload.app, "index", bucket.url, *wrong)
    assert status == 1
    assert err.count("error:") == 1


@pytest.mark.parametrize("cut", [4, 300])
def test_a_compressed_shard_that_is_cut_is_damaged_even_behind_the_archive(
    tmp_path: Path, bucket: Place, cut: int
) -> None:
    packed = compressed(numbers(tmp_path / "numbers", 50))
    whole = (packed / "shard-000000.tar.gz").read_bytes()
    (bucket.folder / "a.tar.gz").write_bytes(whole[:-cut])
    for command in ("index", "verify"):
        status, out, err = run(streamload.app, command, f"{bucket.url}/a.tar.gz", *bucket.options)
        assert (status, "the shard is truncated" in out + err) == (1, True)
    assert not (bucket.folder / ".streamload").exists()

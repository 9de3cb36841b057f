"""`shardify SOURCE s3://...`: the same shards as in a local folder, and runs that are stopped are resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import psutil
import pytest
import webdataset
from image_folders import files_below, images, pack
from matrix import exhaustive
from remote_places import Place, new_place
from servers.rclone import S3Server

from streamload import StreamLoader
from streamload.errors import StorageError
from streamload.index.dataset_index import DatasetIndex
from streamload.index.listing import list_shards
from streamload.pack import work
from streamload.pack.output import shown_bytes
from streamload.storage.object_storage import ObjectStorage
from streamload.storage.storages import Storages


@pytest.fixture
def bucket(rclone_s3: S3Server, tmp_path: Path) -> Place:
    return new_place(rclone_s3, tmp_path)


def packed(bucket: Place, source: Path, staging: Path, *options: object, **limits: int) -> tuple[int, str, str]:
    return pack(source, f"{bucket.url}/set", "--staging", staging, *options, *bucket.options, **limits)


def without_etags(files: dict[str, bytes]) -> dict[str, object]:
    """Files by name; of an index what does not depend on the storage."""
    found: dict[str, object] = {}
    for name, content in files.items():
        if not name.endswith("index.json"):
            found[name] = content
            continue
        index = DatasetIndex.from_json(content, "")
        found[name] = index.fields, [(shard.name, shard.bytes, shard.samples) for shard in index.shards]
    return found


def in_set(bucket: Place) -> dict[str, bytes]:
    return {name.removeprefix("set/"): content for name, content in bucket.files().items()}


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(
    "options",
    [
        exhaustive((("--max-count", 3),)),
        ("--max-count", 2, "--split", "train=0.7,val=0.3"),
        ("--max-count", 5, "--resize", 4),
        exhaustive((("--max-count", 2, "--workers", 1),)),
    ],
)
def test_the_same_as_in_a_local_folder(tmp_path: Path, bucket: Place, options: tuple[object, ...]) -> None:
    source = images(tmp_path)
    status, out, err = packed(bucket, source, tmp_path / "staging", "--workers", 2, *options)
    assert (status, err.count("error")) == (0, 0)
    assert f"StreamLoader('{bucket.url}/set" in out
    assert pack(source, tmp_path / "local", "--workers", 2, *options)[0] == 0
    local = files_below(tmp_path / "local")
    assert without_etags(in_set(bucket)) == without_etags(local)
    assert os.listdir(tmp_path / "staging") == []
    shards = sorted(str(bucket.folder / "set" / name) for name in local if name.endswith(".tar"))
    keys = [sample["__key__"] for sample in webdataset.WebDataset(shards, shardshuffle=False)]
    assert len(set(keys)) == 12


def test_a_loader_reads_it_by_its_etags(tmp_path: Path, bucket: Place) -> None:
    assert packed(bucket, images(tmp_path), tmp_path / "staging", "--max-count", 5)[0] == 0
    storages = Storages(bucket.storage_options)
    listing = list_shards(f"{bucket.url}/set", storages=storages)
    assert listing.counts == (5, 5, 2)
    found = storages.for_url(bucket.url).list(f"{bucket.url}/set/*.tar")
    assert [shard.etag for shard in listing.shards] == [info.etag for info in found]
    with StreamLoader(
        f"{bucket.url}/set", 12, fields=("cls",), storage_options=bucket.storage_options, num_workers=0
    ) as loader:
        assert sorted(value for (batch,) in loader for value in batch.tolist()) == [0] * 6 + [1] * 6


def test_what_is_there_is_refused_or_replaced(tmp_path: Path, bucket: Place) -> None:
    source, staging = images(tmp_path), tmp_path / "staging"
    assert packed(bucket, source, staging, "--max-count", 2)[0] == 0
    before = bucket.files()
    status, _, err = packed(bucket, source, staging)
    assert (status, "6 shards already" in err) == (2, True)
    status, _, err = packed(bucket, source, staging, "--max-count", 2, "--resume")
    assert (status, "no unfinished run to resume" in err) == (0, True)
    status, _, err = packed(bucket, source, staging, "--resume")
    assert (status, "other options: --max-count was 2 and is None; " in err) == (2, True)
    assert bucket.files() == before
    assert packed(bucket, source, staging, "--max-count", 7, "--overwrite")[0] == 0
    assert pack(source, tmp_path / "local", "--max-count", 7)[0] == 0
    assert without_etags(in_set(bucket)) == without_etags(files_below(tmp_path / "local"))
    status, _, err = packed(bucket, source, staging, "--split", "train=0.5,val=0.5")
    assert (status, "another --split" in err) == (2, True)


def test_a_bad_file_leaves_nothing_or_is_left_out(tmp_path: Path, bucket: Place) -> None:
    source, staging = images(tmp_path), tmp_path / "staging"
    (source / "cat" / "zz.jpg").write_bytes(b"no image")
    status, _, err = packed(bucket, source, staging, "--max-count", 2, "--no-shuffle", "--workers", 1)
    assert (status, "nothing was published" in err, "zz.jpg" in err) == (1, True, True)
    assert bucket.files() == {}
    assert os.listdir(staging) == []
    options = ("--skip-bad", "--max-count", 1, "--no-shuffle")  # the bad one is a shard of its own, so numbers shift
    assert packed(bucket, source, staging, *options)[0] == 0
    assert pack(source, tmp_path / "local", *options)[0] == 0
    assert without_etags(in_set(bucket)) == without_etags(files_below(tmp_path / "local"))


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("options", [("--max-count", 2), ("--max-count", 2, "--resize", 4)])
@pytest.mark.parametrize("failing", ["shard-000003.tar", "index.json"])
def test_an_upload_that_fails_is_resumed(
    tmp_path: Path,
    bucket: Place,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    options: tuple[object, ...],
    lost: bool,
) -> None:
    source, staging = images(tmp_path), tmp_path / "staging"
    real, written = ObjectStorage.write, list[str]()

    def broken(storage: ObjectStorage, url: str, content: bytes | str) -> None:
        if url.endswith(failing):
            raise StorageError("the bucket is full", url=url)
        written.append(url.rpartition("/")[2])
        real(storage, url, content)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "write", broken)
        status, _, err = packed(bucket, source, staging, *options)
        assert (status, "bucket is full" in err, "--resume" in err) == (1, True, True)
    finished = {name for name in written if name.endswith(".tar")}
    assert {"shard-000000.tar", "shard-000001.tar"} < finished
    status, _, err = packed(bucket, source, staging, *options)
    assert (status, "was not finished" in err) == (2, True)
    status, _, err = packed(bucket, source, staging, "--max-count", 3, "--resume")
    assert (status, "--max-count was 2 and is 3" in err) == (2, True)
    if lost:
        for path in staging.iterdir():
            path.rename(tmp_path / "lost")
    written.clear()
    with monkeypatch.context() as patched:
        failing = "nothing"
        patched.setattr(ObjectStorage, "write", broken)
        assert packed(bucket, source, staging, *options, "--resume")[0] == 0
    assert finished.isdisjoint(written)
    assert pack(source, tmp_path / "local", *options)[0] == 0
    assert without_etags(in_set(bucket)) == without_etags(files_below(tmp_path / "local"))
    assert os.listdir(staging) == []


def test_a_run_that_is_stopped_says_where_and_how_much_it_keeps(
    tmp_path: Path, bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, staging = images(tmp_path), tmp_path / "staging"
    options = ("--resize", 4, "--workers", 1)
    real: Callable[..., None] = work.keep
    calls: list[object] = []

    def interrupted(*finished: object) -> None:
        calls.append(finished)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*finished)

    with monkeypatch.context() as patched:
        patched.setattr(work, "keep", interrupted)
        status, _, err = packed(bucket, source, staging, *options, piece_files=4)
    (folder,) = staging.iterdir()
    kept_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert status == 130
    assert f"what is finished is kept, {shown_bytes(kept_bytes)} of it in {str(folder)!r}: run the same" in err
    assert packed(bucket, source, staging, *options, "--resume", piece_files=4)[0] == 0
    assert os.listdir(staging) == []


def test_an_unfinished_run_is_thrown_away_with_overwrite(
    tmp_path: Path, bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, staging = images(tmp_path), tmp_path / "staging"

    def broken(storage: ObjectStorage, url: str, content: bytes | str) -> None:
        if url.endswith("000002.tar"):
            raise StorageError("the bucket is full", url=url)
        real(storage, url, content)

    real = ObjectStorage.write
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "write", broken)
        assert packed(bucket, source, staging, "--max-count", 2)[0] == 1
    assert packed(bucket, source, staging, "--max-count", 7, "--overwrite")[0] == 0
    assert pack(source, tmp_path / "local", "--max-count", 7)[0] == 0
    assert without_etags(in_set(bucket)) == without_etags(files_below(tmp_path / "local"))


@pytest.mark.parametrize("stop_after", [6, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in (1, 3))])
def test_a_killed_run_is_resumed_to_the_same_bytes(tmp_path: Path, bucket: Place, stop_after: int) -> None:
    source, staging = images(tmp_path), tmp_path / "staging"
    arguments = [str(source), f"{bucket.url}/set", "--max-count", "1", "--staging", str(staging), "--workers", "2"]
    command = [sys.executable, "-W", "error", "-m", "streamload.cli.shardify", *arguments, *bucket.options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list((bucket.folder / "set").glob("*.tar"))) < stop_after and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    workers = psutil.Process(process.pid).children() if process.poll() is None else []
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert psutil.wait_procs(workers, timeout=20)[1] == []
    assert packed(bucket, source, staging, "--max-count", 1, "--resume")[0] == 0
    assert pack(source, tmp_path / "local", "--max-count", 1)[0] == 0
    assert without_etags(in_set(bucket)) == without_etags(files_below(tmp_path / "local"))
    assert os.listdir(staging) == []


def test_stopped_while_it_cleans_up_nothing_stays_after_resume(
    tmp_path: Path, bucket: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, staging = images(tmp_path), tmp_path / "staging"
    real = ObjectStorage.delete

    def stopped(storage: ObjectStorage, url: str) -> None:
        real(storage, url)
        if url.endswith("packing/run.json") and list(bucket.folder.rglob("index.json")):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "delete", stopped)
        status, _, err = packed(bucket, source, staging)
    assert (status, "everything is published" in err) == (130, True)
    status, _, err = packed(bucket, source, staging, "--resume")
    assert (status, "holds 1 shard already" in err) == (0, True)
    assert os.listdir(staging) == []
    assert not [name for name in bucket.files() if "packing" in name]


def test_memory_and_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    memory = fsspec.filesystem("memory")
    try:
        assert pack(images(tmp_path), "memory://packed/set/", "--max-count", 5)[0] == 0
        assert list_shards("memory://packed/set").counts == (5, 5, 2)
        assert os.listdir(tmp_path / "tmp") == []
    finally:
        memory.rm("/packed", recursive=True)

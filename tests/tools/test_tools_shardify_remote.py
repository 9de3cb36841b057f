"""`shardify SOURCE s3://...`: the same shards as in a local folder, and runs that are stopped are resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import webdataset
from image_folders import files_below, images, pack
from matrix import exhaustive
from remote_places import Place

from streamload.errors import StorageError
from streamload.index.dataset_index import DatasetIndex
from streamload.storage.object_storage import ObjectStorage


def packed(bucket: Place, source: Path, *options: object) -> tuple[int, str, str]:
    return pack(source, f"{bucket.url}/set", *options, *bucket.options)


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
        exhaustive((("--max-count", 5, "--resize", 4),)),
        exhaustive((("--max-count", 2, "--workers", 1),)),
    ],
)
def test_the_same_as_in_a_local_folder(tmp_path: Path, bucket: Place, options: tuple[object, ...]) -> None:
    source = images(tmp_path)
    status, out, err = packed(bucket, source, "--workers", 2, *options)
    assert (status, err.count("error")) == (0, 0)
    assert f"StreamLoader('{bucket.url}/set" in out
    assert pack(source, tmp_path / "local", "--workers", 2, *options)[0] == 0
    local = files_below(tmp_path / "local")
    assert without_etags(in_set(bucket)) == without_etags(local)
    shards = sorted(str(bucket.folder / "set" / name) for name in local if name.endswith(".tar"))
    keys = [sample["__key__"] for sample in webdataset.WebDataset(shards, shardshuffle=False)]
    assert len(set(keys)) == 12


@pytest.mark.parametrize("options", [("--max-count", 2), ("--max-count", 2, "--resize", 4)])
@pytest.mark.parametrize("failing", ["shard-000003.tar", "index.json"])
def test_an_upload_that_fails_is_resumed(
    tmp_path: Path, bucket: Place, monkeypatch: pytest.MonkeyPatch, failing: str, options: tuple[object, ...]
) -> None:
    source = images(tmp_path)
    real = ObjectStorage.write

    def broken(storage: ObjectStorage, url: str, content: bytes | str) -> None:
        if url.endswith(failing):
            raise StorageError("the bucket is full", url=url)
        real(storage, url, content)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "write", broken)
        status, _, err = packed(bucket, source, *options)
        assert (status, "bucket is full" in err, "--resume" in err) == (1, True, True)
    finished = {path: path.stat().st_mtime_ns for path in (bucket.folder / "set").glob("*.tar")}
    assert len(finished) >= 2
    status, _, err = packed(bucket, source, *options)
    assert (status, "unfinished run" in err) == (2, True)
    assert packed(bucket, source, *options, "--resume")[0] == 0
    assert finished == {path: path.stat().st_mtime_ns for path in finished}, "they are not uploaded again"
    assert pack(source, tmp_path / "local", *options)[0] == 0
    assert without_etags(in_set(bucket)) == without_etags(files_below(tmp_path / "local"))

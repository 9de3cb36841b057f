"""Local storage, and the listing of a dataset with what indexes say about it."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from indexed_shards import index_shards

from streamload import ShardWriter, StreamLoader
from streamload.errors import DatasetIndexError, ShardChangedError, ShardNotFoundError, StorageError
from streamload.index.listing import SHARDIFY, Listing, ShardNaming, find_shards, list_shards, write_mark
from streamload.storage.local_files import LocalStorage, local_path, open_regular


def touch(folder: Path, *names: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(name.encode())
    return [str(folder / name) for name in names]


def write(folder: Path, counts: list[int], *, prefix: str = "shard", field: str = "txt", index: bool = True) -> None:
    for number, count in enumerate(counts):
        with ShardWriter(folder, prefix=f"{prefix}{number}", index=index) as writer:
            for sample in range(count):
                writer.write({"__key__": str(sample), field: str(sample)})


def names(listing: Listing) -> list[str]:
    return [shard.name for shard in listing.shards]


# Storage


@pytest.mark.parametrize("url", ["s3:/bucket/x", "S3:/bucket/x", Path("s3://bucket/x"), "gs:/bucket/x", "https:/h/a"])
def test_a_url_with_one_slash_is_not_taken_for_a_path(url: str | Path, tmp_path: Path) -> None:
    meant = str(url).replace(":/", "://")
    for act in (list_shards, ShardWriter):
        with pytest.raises(ValueError, match=f"did you mean '{meant}'"):
            act(url)


def test_a_folder_may_be_called_as_a_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "s3:" / "bucket", [1])
    monkeypatch.chdir(tmp_path)
    assert names(list_shards("s3:/bucket")) == ["shard0-000000.tar"]


def test_a_missing_shard_comes_with_advice(tmp_path: Path) -> None:
    touch(tmp_path, "train-000001.tar", "other")
    storage = LocalStorage()
    for name, says in (
        ("zzz", r"nothing in .* has a similar name"),
        ("no/a.tar", r"folder .*/no' does not exist"),
        ("other/a.tar", r"folder .*/other' does not exist"),
    ):
        with pytest.raises(ShardNotFoundError, match=says):
            storage.info(str(tmp_path / name))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="a folder"):
        LocalStorage().info(str(tmp_path))
    with pytest.raises(StorageError, match="not a regular file"):
        LocalStorage().info(str(tmp_path / "pipe"))
    for act in (open_regular, partial(LocalStorage().read_bytes, most_bytes=9)):
        with pytest.raises(StorageError, match="not a regular file"):
            act(str(tmp_path / "pipe"))


# Names to shards


def test_shards_come_as_listed_and_globs_sorted(tmp_path: Path) -> None:
    touch(tmp_path, "b.tar", "a.tar", "c-1.tar", "c-0.tar", ".hidden.tar", "notes.txt")
    (tmp_path / "folder.tar").mkdir()
    assert names(list_shards([tmp_path / "b.tar", str(tmp_path / "a.tar")])) == ["b.tar", "a.tar"]
    assert names(list_shards(f"{tmp_path}/{{b,a}}.tar")) == ["b.tar", "a.tar"]
    assert names(list_shards(f"{tmp_path}/*.tar")) == ["a.tar", "b.tar", "c-0.tar", "c-1.tar"]
    assert names(list_shards([f"{tmp_path}/c-[10].tar", f"{tmp_path}/?.tar"])) == [
        "c-0.tar",
        "c-1.tar",
        "a.tar",
        "b.tar",
    ]
    assert names(list_shards(f"{tmp_path}/.h*.tar")) == [".hidden.tar"]
    assert names(list_shards(f"file://{tmp_path}/c-*.tar::{tmp_path}/a.tar")) == ["c-0.tar", "c-1.tar", "a.tar"]
    for url in (tmp_path, f"{tmp_path}/", f"file://{tmp_path}"):
        assert names(list_shards(url)) == ["a.tar", "b.tar", "c-0.tar", "c-1.tar"]


def test_names_with_glob_characters_can_be_named(tmp_path: Path) -> None:
    (path,) = touch(tmp_path / "d[1]", "a[0].tar")
    assert [shard.url for shard in list_shards(path).shards] == [path]
    assert [shard.url for shard in list_shards(tmp_path / "d[1]").shards] == [path]


@pytest.mark.parametrize("name", ["a.TAR", "a.Tar", "a.tar.gz", "a.tgz", "a.tar.zst", "a.TAR.XZ", "a.tar.bz2"])
def test_shards_are_known_by_their_ending_in_any_case(tmp_path: Path, name: str) -> None:
    (path,) = touch(tmp_path, name)
    touch(tmp_path, "notes.gz", "b.tar.md5", "b.tar.idx")
    for urls in (path, f"{tmp_path}/a*", tmp_path):
        assert names(list_shards(urls)) == [name]


@pytest.mark.parametrize("name", ["a.tar.lz4", "a.tar.lzma", "a.TAR.br", "a.tar.Z", "a.tar.lz", "a.taz"])
def test_compressions_that_are_not_known_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, [1])
    (path,) = touch(tmp_path, name)
    for urls in (path, f"{tmp_path}/*", tmp_path, f"s3://bucket/{name}"):
        with pytest.raises(ValueError, match="decompress them, or use gz"):
            list_shards(urls)


@pytest.mark.parametrize("second", ["{0}/a.tar", "{0}/./a.tar", "{0}/*.tar", "file://{0}/a.tar", "{0}//a.tar", "{0}"])
def test_the_same_shard_twice_is_refused(tmp_path: Path, second: str) -> None:
    (path,) = touch(tmp_path, "a.tar")
    with pytest.raises(ValueError, match=r"a\.tar' twice"):
        list_shards([path, second.format(tmp_path)])


def test_matches_that_are_not_files_are_named(tmp_path: Path) -> None:
    os.symlink(tmp_path / "gone", tmp_path / "a.tar")
    with pytest.raises(ShardNotFoundError, match="the link leads to .*gone"):
        list_shards(tmp_path)


# Folders and indexes


def test_files_of_other_tools_beside_the_shards_are_ignored(tmp_path: Path) -> None:
    """Their indexes, which may be about other shards by now, are neither shards nor damage."""
    write(tmp_path, [2, 3], index=False)
    shards = names(list_shards(tmp_path))
    touch(tmp_path / ".nv-meta", ".info.json")
    touch(tmp_path, "shardindex.json", f"{shards[0]}.idx", f"{shards[0].removesuffix('.tar')}.idx")
    for urls in (tmp_path, tmp_path / "*.tar"):
        assert names(list_shards(urls)) == shards
        assert list_shards(urls).counts is None
        with StreamLoader(urls, 1, num_workers=0) as loader:
            assert len(list(loader)) == 5


def test_a_folder_with_nothing_of_ours_gives_advice(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    touch(tmp_path / "images" / "cat", "0.jpg")
    for name in ("train", "val"):
        touch(tmp_path / "sets" / name, "0.tar")
    for name, says in (
        ("empty", "no index and no"),
        ("images", "shardify"),
        ("sets", r"name one of them, such as train, val \(at '.*sets'\)"),
        ("x-*.tar", r"no file matches .*x-\*\.tar"),
        ("missing/*.tar", "no file matches"),
    ):
        with pytest.raises(ShardNotFoundError, match=says):
            list_shards(f"{tmp_path}/{name}")


def test_an_index_gives_counts_and_fields(tmp_path: Path) -> None:
    write(tmp_path, [3, 1, 2])
    for urls in (tmp_path, f"{tmp_path}/*.tar"):
        listing = list_shards(urls)
        assert names(listing) == ["shard0-000000.tar", "shard1-000000.tar", "shard2-000000.tar"]
        assert listing.counts == (3, 1, 2)
        assert listing.fields == ("txt",)
        assert tuple(shard.index_folder for shard in listing.shards) == (str(tmp_path / ".streamload"),) * 3
    assert list_shards(tmp_path / "shard2-000000.tar").counts == (2,)


def test_a_partly_indexed_dataset_has_no_counts(tmp_path: Path) -> None:
    write(tmp_path, [1])
    write(tmp_path, [1], prefix="unknown", index=False)
    listing = list_shards(f"{tmp_path}/*.tar")
    assert listing.counts is None
    assert tuple(shard.index_folder for shard in listing.shards) == (str(tmp_path / ".streamload"), None)
    assert listing.fields == ("txt",)


def test_a_folder_whose_index_forgets_shards_is_not_read_in_part(tmp_path: Path) -> None:
    write(tmp_path, [1])
    touch(tmp_path, "forgotten.tar")
    with pytest.raises(
        DatasetIndexError, match=r"1 shard that its index does not list.*forgotten\.tar.*streamload index"
    ):
        list_shards(tmp_path)


def test_a_shard_that_the_index_names_and_is_gone_is_missing(tmp_path: Path) -> None:
    write(tmp_path, [1, 1, 1])
    (tmp_path / "shard0-000000.tar").rename(tmp_path / ".shard0.tar")
    index_shards([tmp_path / ".shard0.tar", tmp_path / "shard1-000000.tar"], str(tmp_path / ".streamload"))
    with pytest.raises(ShardNotFoundError, match="but its index names it.*shard0-000000"):
        list_shards(tmp_path)
    (tmp_path / "shard0-000000.tar").write_bytes((tmp_path / ".shard0.tar").read_bytes())
    listing = list_shards(tmp_path)
    assert names(listing) == [".shard0.tar", *(f"shard{number}-000000.tar" for number in range(3))]
    assert listing.counts == (1, 1, 1, 1)


def test_a_shard_of_another_size_is_stale(tmp_path: Path) -> None:
    write(tmp_path, [1])
    path = tmp_path / "shard0-000000.tar"
    path.write_bytes(path.read_bytes() + bytes(512))
    for urls in (tmp_path, path):
        with pytest.raises(ShardChangedError, match="since it was indexed.*rebuild the index"):
            list_shards(urls)
    assert find_shards(tmp_path) == [str(path)]


def test_an_unfinished_set_without_a_shard_is_no_empty_folder(tmp_path: Path) -> None:
    write(tmp_path, [1], index=False)
    (tmp_path / "shard0-000000.tar").unlink()
    write_mark(LocalStorage(), str(tmp_path), ShardNaming("shard-", 6, ".tar"), SHARDIFY)
    for find in (list_shards, find_shards):
        with pytest.raises(DatasetIndexError, match="shardify.*interrupted.*--resume"):
            find(tmp_path)


def test_a_broken_index_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [1])
    index = tmp_path / ".streamload" / "index.json"
    index.write_bytes(index.read_bytes()[:-20])
    for urls in (tmp_path, tmp_path / "shard0-000000.tar"):
        with pytest.raises(DatasetIndexError, match="not JSON .*rebuild the index"):
            list_shards(urls)


@pytest.mark.parametrize("content", ["", "{", '{"kind": "wids"}', "\0" * 100])
def test_what_does_not_look_like_an_index_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    write(tmp_path, [1, 1])
    (tmp_path / ".streamload" / "index.json").write_text(content)
    for urls in (tmp_path, tmp_path / "*.tar"):
        caplog.clear()
        assert list_shards(urls).counts is None
        assert len(caplog.messages) == 1
        assert "not a streamload index" in caplog.text


def test_an_index_that_lies_elsewhere(tmp_path: Path) -> None:
    write(tmp_path / "with", [2, 3])
    for name in ("shard0-000000.tar", "shard1-000000.tar"):
        touch(tmp_path / "without")
        (tmp_path / "without" / name).write_bytes((tmp_path / "with" / name).read_bytes())
    assert list_shards(tmp_path / "without").counts is None
    for index in (tmp_path / "with", tmp_path / "with" / ".streamload", str(tmp_path / "with")):
        listing = list_shards(tmp_path / "without", index)
        assert listing.counts == (2, 3)
        assert [shard.folder for shard in listing.shards] == [str(tmp_path / "without")] * 2
        assert tuple(shard.index_folder for shard in listing.shards) == (str(tmp_path / "with" / ".streamload"),) * 2
    with pytest.raises(DatasetIndexError, match=r"holds no index\.json"):
        list_shards(tmp_path / "without", tmp_path / "without")


@pytest.mark.parametrize("url", ["file://host/a.tar", "file:a.tar", "file:", "file://", "file://localhost"])
def test_a_file_url_of_another_host_or_without_a_path_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="three slashes"):
        local_path(url)

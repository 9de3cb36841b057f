"""`**` in a pattern: what the standard library's glob finds, links that lead back, and indexes in several folders."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from make_shards import write_numbers
from servers.rclone import S3Server
from typer.testing import CliRunner

from streamload import StreamLoader
from streamload.cli import main as tools
from streamload.errors import StorageError
from streamload.index.listing import list_shards
from streamload.storage.storages import Storages

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

FILES = ["a.tar", "x.txt", ".h.tar", "b/c.tar", "b/b/c.tar", "b-1/c.tar", "b/.h/c.tar", ".h/b/c.tar", "d/e/f/g.tar"]
PATTERNS = ["**/*.tar", "**", "**/**", "b/**", "**/c.tar", "**/b/**/*.tar", "*/**/c.tar", "d/**/f/*", "**/.h/*.tar"]
PATTERNS += ["**/.*", ".h/**/*.tar", "a**r", "**/b*/c.tar", "d/**/e/**/f/**/*", "none/**/*", "**.tar"]


def touch(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def found(storages: Storages, root: str, pattern: str) -> list[str]:
    matches = storages.for_url(f"{root}/{pattern}").list(f"{root}/{pattern}")
    return [match.url.removeprefix(f"{root}/") for match in matches]


def by_glob(folder: Path, pattern: str) -> list[str]:
    matches = set(glob.glob(pattern, root_dir=folder, recursive=True))
    return sorted(match for match in matches if (folder / match).is_file())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_files_are_those_of_glob(pattern: str, tmp_path: Path) -> None:
    touch(tmp_path, FILES)
    assert found(Storages(), str(tmp_path), pattern) == by_glob(tmp_path, pattern)


@pytest.mark.parametrize("filesystem", [None, fsspec.filesystem("file")], ids=["path", "fsspec"])
def test_links_are_followed_but_not_in_a_circle(filesystem: Any, tmp_path: Path) -> None:
    touch(tmp_path, ["data/a/1.tar", "elsewhere/3.tar", "elsewhere/e/4.tar"])
    for link, to in {
        "data/elsewhere": "elsewhere",
        "data/a/link.tar": "data/a/1.tar",
        "data/self": "data/self",
    }.items():
        (tmp_path / link).symlink_to(tmp_path / to)
    storages, root = Storages(filesystem=filesystem), str(tmp_path)
    expected = ["data/a/1.tar", "data/a/link.tar", "data/elsewhere/3.tar", "data/elsewhere/e/4.tar"]
    assert found(storages, root, "data/**/*.tar") == expected
    (tmp_path / "elsewhere" / "e" / "back").symlink_to(tmp_path / "data")
    with pytest.raises(StorageError, match=r"a link probably leads back .*name the folders without `\*\*`"):
        found(storages, root, "data/**/*.tar")
    assert found(storages, root, "data/*/*.tar") == expected[:3]


def test_a_filesystem_that_reports_links(tmp_path: Path) -> None:
    touch(tmp_path, ["a/1.tar"])
    (tmp_path / "a" / "link.tar").symlink_to(tmp_path / "a" / "1.tar")
    (tmp_path / "linked").symlink_to(tmp_path / "a")
    storages = Storages(filesystem=fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file")))
    assert [match.url for match in storages.for_url("a").list("**/*.tar")] == [
        "a/1.tar",
        "a/link.tar",
        "linked/1.tar",
        "linked/link.tar",
    ]


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, ["a/1.tar", "closed/2.tar"])
    listed = os.scandir

    def scandir(folder: str) -> Any:
        if folder.endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError, match="no permission") as caught:
        Storages().for_url(str(tmp_path)).list(f"{tmp_path}/**/*.tar")
    assert caught.value.url == f"{tmp_path}/closed"
    touch(tmp_path, ["closed/in/3.tar"])
    assert found(Storages(), str(tmp_path), "[a-z]*/in/*.tar") == ["closed/in/3.tar"]  # named, so not listed


@pytest.mark.parametrize("place", ["local", "s3", "fsspec"])
def test_shards_in_several_folders_with_an_index_in_each(place: str, rclone_s3: S3Server, tmp_path: Path) -> None:
    bucket = rclone_s3.folder / f"folders-{place}"
    folder = bucket / "set" if place == "s3" else tmp_path
    for name, counts in {"day1": [3, 4], "day2": [5], "day2/more": [6]}.items():
        write_numbers(folder / name, counts, index=False)
    root = f"s3://{bucket.name}/set" if place == "s3" else str(tmp_path)
    options: dict[str, Any] = {"storage_options": rclone_s3.options} if place == "s3" else {}
    if place == "fsspec":
        options = {"filesystem": fsspec.filesystem("file")}
    arguments = [f"--storage-option={name}={value}" for name, value in rclone_s3.options.items() if place == "s3"]
    indexed = CliRunner().invoke(tools.app, ["index", f"{root}/**/*.tar", *arguments])
    assert (indexed.exit_code, indexed.output.splitlines()[-1]) == (0, "indexed 4 shards, 18 samples")
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("index.json")) == [
        f"{name}/.streamload/index.json" for name in ("day1", "day2", "day2/more")
    ]
    shown = CliRunner().invoke(tools.app, ["ls", f"{root}/**/*.tar", *arguments])
    assert (shown.exit_code, shown.output.splitlines()[-1].split(",")[:2]) == (0, ["4 shards", " 18 samples"])
    in_order = ["day1/part000", "day1/part001", "day2/more/part000", "day2/part000"]
    listed = [line.split()[0] for line in shown.output.splitlines()[1:-1]]
    assert listed == [f"{root}/{name}-000000.tar" for name in in_order]
    storages = Storages(options.get("storage_options"), options.get("filesystem"))
    assert list_shards(f"{root}/**/*.tar", None, storages).counts == (3, 4, 6, 5)
    assert list_shards(f"{root}/day2/**", None, storages).counts == (6, 5)
    with StreamLoader(f"{root}/**/*.tar", fields=("cls",), batch_size=4, num_workers=0, **options) as loader:
        assert sorted(label for (labels,) in loader for label in labels.tolist()) == sorted(
            [*range(7), *range(5), *range(6)]
        )

"""SIGKILL of packing and of a ShardWriter at any moment: readers see a whole dataset or are refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from image_folders import files_below, image_folder, pack, packs, run
from remote_places import new_place
from servers.rclone import S3Server

from streamload import ShardWriter, StreamLoader
from streamload.cli import main
from streamload.errors import StreamloadError

pytestmark = pytest.mark.usefixtures("feeders_in_threads")

SPLIT = ("--split", "train=0.5,val=0.5", "--max-count", 1, "--workers", 1)
KILLED = """
import os, signal, sys
from streamload.cli import shardify
from streamload.storage.object_storage import ObjectStorage
from streamload import ShardWriter

left = int(sys.argv.pop(1))

def kill_before(owner, name):
    real = getattr(owner, name)

    def act(*args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, act)

for owner, names in ((os, ("replace", "unlink", "link")), (ObjectStorage, ("write", "delete"))):
    for name in names:
        kill_before(owner, name)
"""
SHARDIFY = KILLED + "shardify.app()"
MAP = (
    KILLED
    + """
import json
from streamload import map_shards

def with_length(sample):
    return {**sample, "length.cls": len(sample["cls"])}

map_shards(with_length, sys.argv[1], sys.argv[2], workers=1, resume=True, **json.loads(sys.argv[3]))
"""
)
PACK = (
    KILLED
    + """
from streamload import pack

def samples_of(number):
    for copy in range(number % 3):
        yield {"__key__": f"{number:03d}_{copy}", "txt": "x" * number, "cls": number}

pack(samples_of, range(20), sys.argv[1], workers=1, max_count=8, resume=True)
"""
)
WRITER = (
    KILLED
    + """
with ShardWriter(sys.argv[1], max_count=1, overwrite=True) as writer:
    for number in range(4):
        writer.write({"__key__": f"new{number}", "cls": number})
"""
)
MOMENTS = 45
"""About as many changes as a run makes."""


def killed(script: str, moment: int, *arguments: object) -> bool:
    """Run a script that is killed before so many changes; whether there were so many."""
    command = [sys.executable, "-W", "error", "-c", script, str(moment), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert ended.returncode in (0, -signal.SIGKILL), ended.stderr.decode()
    return ended.returncode != 0


def keys_of(urls: Any, options: dict[str, str]) -> set[str]:
    with StreamLoader(
        urls, 4, transform=lambda sample: sample["__key__"], decode=False, num_workers=0, storage_options=options
    ) as loader:
        return {key for batch in loader for key in batch}


def keys_or_refusal(urls: Any, options: dict[str, str]) -> set[str] | str:
    try:
        return keys_of(urls, options)
    except StreamloadError as exc:
        return str(exc)


def check(urls: Sequence[str], wholes: Sequence[set[str]], shown: Sequence[str], options: dict[str, str]) -> bool:
    """Assert that all readers of urls refuse them or see a whole dataset; whether the loader refused them."""
    found = keys_or_refusal(list(urls), options)
    refused = isinstance(found, str)
    if isinstance(found, str):  # nothing may be there yet
        assert re.search("--resume|no such shard|no file matches|no index", found)
    else:
        assert found in wholes
    sizes = [len(whole) for whole in wholes]
    status, out, _ = run(main.app, "ls", *urls, "--samples", *shown)
    assert status == 1 if refused else {line.split()[1] for line in out.splitlines()} in wholes
    status, out, _ = run(main.app, "stats", *urls, "--json", *shown)
    assert status == 1 if refused else json.loads(out)["samples"] in sizes
    for command in ("verify", "index"):
        status, _, _ = run(main.app, command, *urls, *shown)
        assert status == 1 or not refused
    return refused


def shards_of(found: dict[str, bytes]) -> dict[str, bytes]:
    """The shards alone: what a command wrote into the index, such as times and ETags, differs."""
    return {name: content for name, content in found.items() if name.endswith(".tar")}


def sources(tmp_path: Path) -> tuple[Path, Path, list[set[str]]]:
    """Two ImageFolders, and the keys of each."""
    names = [[f"{name}/{kind}{n}.jpg" for name in ("bee", "cat") for n in range(2)] for kind in ("old", "new")]
    old, new = (image_folder(tmp_path / kind, *each) for kind, each in zip(("a", "b"), names, strict=True))
    return old, new, [{name.removesuffix(".jpg") for name in each} for each in names]


def at_moments(*few: int) -> pytest.MarkDecorator:
    """Some moments by default, and eleven others."""
    many = [pytest.param(moment, marks=pytest.mark.exhaustive) for moment in range(0, MOMENTS, 4) if moment not in few]
    return pytest.mark.parametrize("moment", [*few, *many])


@at_moments(20, 8)
@pytest.mark.parametrize("over", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_local_folder(tmp_path: Path, moment: int, over: bool) -> None:
    old, new, wholes = sources(tmp_path)
    dest = tmp_path / "dest"
    if over:
        assert pack(old, dest, *SPLIT)[0] == 0
    was_killed = killed(SHARDIFY, moment, new, dest, *SPLIT, *(["--overwrite"] if over else []))
    urls = [f"{dest}/train", f"{dest}/val"]
    wholes = wholes if over else wholes[1:]
    check(urls, wholes, (), {})
    check([f"{dest}/**/*.tar"], wholes, (), {})
    if was_killed:
        assert pack(new, dest, *SPLIT, "--resume", *(["--overwrite"] if over else []))[0] == 0
    assert not check(urls, wholes[-1:], (), {})
    assert pack(new, tmp_path / "whole", *SPLIT)[0] == 0
    assert shards_of(files_below(dest)) == shards_of(files_below(tmp_path / "whole"))


@at_moments(18)
@pytest.mark.parametrize("over", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_bucket(tmp_path: Path, rclone_s3: S3Server, moment: int, over: bool) -> None:
    bucket = new_place(rclone_s3, tmp_path)
    old, new, wholes = sources(tmp_path)
    arguments = (f"{bucket.url}/set", *SPLIT, *bucket.options)
    if over:
        assert pack(old, *arguments)[0] == 0
    was_killed = killed(SHARDIFY, moment, new, *arguments, *(["--overwrite"] if over else []))
    urls = [f"{bucket.url}/set/train", f"{bucket.url}/set/val"]
    wholes = wholes if over else wholes[1:]
    check(urls, wholes, bucket.options, bucket.storage_options)
    check([f"{bucket.url}/set/**/*.tar"], wholes, bucket.options, bucket.storage_options)
    if was_killed:
        packs(new, *arguments, "--resume", *(["--overwrite"] if over else []))
    assert not check(urls, wholes[-1:], bucket.options, bucket.storage_options)
    assert not [name for name in bucket.files() if "unfinished" in name or "packing" in name]
    assert pack(new, tmp_path / "whole", *SPLIT)[0] == 0
    assert shards_of(files_below(bucket.folder / "set")) == shards_of(files_below(tmp_path / "whole"))


@at_moments()
@pytest.mark.parametrize("sidecar", [False, True])
def test_map_into_a_bucket(tmp_path: Path, rclone_s3: S3Server, moment: int, sidecar: bool) -> None:
    bucket = new_place(rclone_s3, tmp_path)
    with ShardWriter(tmp_path / "source", max_count=2) as writer:
        for number in range(12):
            writer.write({"__key__": f"{number:02d}", "cls": number})

    def arguments(dest: object, options: dict[str, str]) -> tuple[object, ...]:
        return tmp_path / "source", dest, json.dumps({"sidecar": sidecar, "storage_options": options})

    remote = arguments(f"{bucket.url}/set", bucket.storage_options)
    assert not killed(MAP, 1000, *arguments(tmp_path / "whole", {}))
    was_killed = killed(MAP, moment, *remote)
    found = keys_or_refusal(f"{bucket.url}/set", bucket.storage_options)
    assert found == {f"{number:02d}" for number in range(12)} or (was_killed and isinstance(found, str))
    if was_killed:
        assert not killed(MAP, 1000, *remote)
    assert shards_of(files_below(bucket.folder / "set")) == shards_of(files_below(tmp_path / "whole"))
    assert not [name for name in bucket.files() if "unfinished" in name or "packing" in name]


@at_moments(8)
def test_pack_into_a_folder(tmp_path: Path, moment: int) -> None:
    assert not killed(PACK, 1000, tmp_path / "whole")
    was_killed = killed(PACK, moment, tmp_path / "dest")
    found = keys_or_refusal(tmp_path / "dest", {})
    assert found == keys_of(tmp_path / "whole", {}) or (was_killed and isinstance(found, str))
    assert not killed(PACK, 1000, tmp_path / "dest")
    assert files_below(tmp_path / "dest") == files_below(tmp_path / "whole")


@at_moments(8)
def test_a_shard_writer(tmp_path: Path, moment: int) -> None:
    wholes = [{f"{kind}{number}" for number in range(4)} for kind in ("old", "new")]
    with ShardWriter(tmp_path / "dest", max_count=1) as writer:
        for number in range(4):
            writer.write({"__key__": f"old{number}", "cls": number})
    was_killed = killed(WRITER, moment, tmp_path / "dest")
    found = keys_or_refusal(tmp_path / "dest", {})
    assert found in wholes or (was_killed and "overwrite=True" in found)
    assert run(main.app, "index", tmp_path / "dest")[0] in (0, 1)
    assert not killed(WRITER, 1000, tmp_path / "dest")
    assert keys_of(tmp_path / "dest", {}) == wholes[1]

"""Indexes as other tools write them: written anew from the descriptions of their formats."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

WITH_NAMES = {"v1.0": True, "v1.1": False, "v1.2": True}


def _listed(shard: Path, *options: str) -> list[str]:
    if shutil.which("tar") is None:
        pytest.skip("GNU tar is not installed")
    done = subprocess.run(["tar", "--list", *options, "--file", str(shard)], capture_output=True, check=True)
    return done.stdout.decode("ascii").splitlines()


def dali_members(shard: Path) -> list[tuple[str, int, int]]:
    """Name, offset and size of each regular file: what wds2idx takes from two listings by GNU tar.

    The header's block plus one is the payload's, the size is the third column of the long listing.
    """
    members = []
    for short, long in zip(_listed(shard, "--block-number"), _listed(shard, "--verbose"), strict=False):
        block, _, name = short.removeprefix("block ").partition(": ")
        if long.startswith("-"):
            members.append((name, (int(block) + 1) * 512, int(long.split(maxsplit=3)[2])))
    return members


def dali_index(shard: Path, version: str = "v1.2") -> bytes:
    """The lines of wds2idx: members that follow each other with one name up to the first dot are a sample."""
    samples: list[list[str]] = []
    before = None
    for name, offset, size in dali_members(shard):
        dot = name.find(".", name.rfind("/") + 1)
        stem, extension = name[:dot], name[dot + 1 :]
        if not stem or stem.endswith("/"):
            continue
        if stem != before:
            samples.append([])
        before = stem
        samples[-1] += [extension, str(offset), str(size), *([name] if WITH_NAMES[version] else [])]
    lines = [f"{version} {len(samples)}", *(" ".join(words) for words in samples)]
    return "".join(f"{line}\n" for line in lines).encode("ascii")


def energon_offsets(shard: Path) -> bytes:
    """The offset of the first header of each sample, and of the end, as `tarfile` finds them."""
    offsets, before = [], None
    with tarfile.open(shard) as archive:
        for member in archive:
            match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name)
            if not member.isreg() or re.match(r"__[^/]*__($|/)", member.name) or match is None:
                continue
            if match[1] != before:
                offsets.append(member.offset)
                before = match[1]
        offsets.append(archive.offset)
    return b"".join(struct.pack("<Q", offset) for offset in offsets)


def energon_info(counts: dict[str, int]) -> bytes:
    return json.dumps({"energon_version": "7.1.0", "shard_counts": counts}).encode()


def wids_file(shards: Sequence[Path]) -> bytes:
    """What `widsindex create` writes; a sample is a run of names that are the same up to the first dot."""
    entries = []
    for shard in sorted(shards):
        with tarfile.open(shard) as archive:
            stems = [name[: name.find(".", name.rfind("/") + 1)] for name in archive.getnames() if "." in name]
        entries.append(
            {
                "url": shard.name,
                "md5sum": "0" * 32,
                "nsamples": sum(1 for _ in itertools.groupby(stems)),
                "filesize": shard.stat().st_size,
            }
        )
    document = {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": entries, "name": "train"}
    return json.dumps(document, indent=2).encode()

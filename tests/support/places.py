"""One dataset in many places: local files, a bucket, a web server and fsspec's memory, also compressed."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from backports import zstd
from indexed_shards import write_index
from servers.nginx import WebServer
from servers.rclone import S3Server

from streamload import ShardWriter, StreamLoader
from streamload.index.dataset_index import INDEX_FOLDER

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda content: gzip.compress(content, 1, mtime=0),
    "zst": zstd.compress,
    "xz": lambda content: lzma.compress(content, preset=0),
    "bz2": lambda content: bz2.compress(content, 1),
}

Step = tuple[list[int], int, dict[str, Any]]
"""A batch as it is compared: the labels, a checksum of the arrays, and the state behind it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where datasets lie.

    Attributes:
        root: the url of the folder of all datasets.
        options: what a loader needs to read there.
    """

    root: str
    options: dict[str, Any] = field(default_factory=dict)

    def urls(self, form: str, shards: Iterable[int]) -> list[str]:
        """The shards of a dataset, one by one, since web servers do not list."""
        ending = "" if form in ("indexed", "plain") else f".{form}"
        return [f"{self.root}/{form}/part{shard:03d}-000000.tar{ending}" for shard in shards]


def write_datasets(folder: Path, sizes: Iterable[Iterable[int]], forms: Iterable[str] = COMPRESSORS) -> None:
    """Write one dataset as `indexed`, as `plain` (without its index) and compressed in several ways.

    Args:
        folder: made if missing.
        sizes: for each shard the lengths in bytes of its samples' arrays.
        forms: names of `COMPRESSORS`.
    """
    number, tables = 0, []
    for shard, lengths in enumerate(sizes):
        with ShardWriter(folder / "indexed" / f"part{shard:03d}-%06d.tar", index=False) as writer:
            for length in lengths:
                value = np.arange(-(-length // 4), dtype=np.uint32).view(np.uint8)[:length] ^ (number % 251)
                writer.write({"__key__": f"{number:06d}", "npy": value, "cls": number})
                number += 1
        tables += writer.tables
    copy(folder / "indexed", folder / "plain")
    write_index(os.fspath(folder / "indexed" / INDEX_FOLDER), tables)  # once: for each shard it would be written anew
    for form in forms:
        (folder / form).mkdir()
        for shard_file in sorted((folder / "plain").iterdir()):
            compressed = COMPRESSORS[form](shard_file.read_bytes())
            (folder / form / f"{shard_file.name}.{form}").write_bytes(compressed)


def copy(folder: Path, to: Path) -> None:
    """Hard links: the bytes are written once."""
    shutil.copytree(folder, to, copy_function=os.link)


def local(folder: Path) -> Place:
    return Place(os.fspath(folder))


def on_s3(server: S3Server, folder: Path) -> Place:
    """The datasets in a bucket of their own."""
    bucket = f"bucket-{folder.name.replace('_', '-')}"
    copy(folder, server.folder / bucket)
    return Place(f"s3://{bucket}", {"storage_options": server.options})


def on_web(server: WebServer, folder: Path) -> Place:
    copy(folder, server.folder / folder.name)
    return Place(f"{server.url}/{folder.name}")


def in_memory(folder: Path) -> Place:
    root = f"memory://{folder.name}"
    fsspec.filesystem("memory").put(f"{folder}/", root, recursive=True)
    return Place(root)


def each_step(loader: StreamLoader, epochs: int = 1) -> Iterator[Step]:
    """What a loader of `("npy", "cls")` gives, each batch with the state behind it."""
    for _ in range(epochs):
        for batch in loader:
            arrays, labels = batch if isinstance(batch[-1], torch.Tensor) else zip(*batch, strict=True)
            whole = b"".join(np.asarray(array).tobytes() for array in arrays)
            yield [int(label) for label in labels], zlib.crc32(whole), loader.state_dict()


def steps(loader: StreamLoader, epochs: int = 1, most: int | None = None) -> list[Step]:
    """The same as a list; at most so many batches."""
    return list(islice(each_step(loader, epochs), most))


def without_names(seen: list[Step]) -> list[Step]:
    """The same, but for what the state says of the shards' names and sizes, which compressing changes."""
    return [(labels, crc, {**state, "fingerprint": ""}) for labels, crc, state in seen]

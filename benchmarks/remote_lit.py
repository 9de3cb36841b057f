"""The images of shards in LitData's own format, as files of a bucket: made once, under many names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from litdata import optimize
from remote_bucket import FIELD

from streamload import TarDataset

CHUNK_BYTES = "64MB"
"""LitData's usual size."""


@dataclass(frozen=True)
class LitFiles:
    """What a bucket has to hold.

    Attributes:
        files: contents by name.
        aliases: further names of these.
    """

    files: dict[str, bytes]
    aliases: dict[str, str]


def lit_files(shards: Sequence[str], copies: int, folder: Path) -> LitFiles:
    """The images of some shards, so many times, below `lit/`.

    Args:
        shards: their paths.
        copies: how often LitData's index has each chunk.
        folder: where the chunks are written.
    """
    # With one worker it starts none that would have to be given the data.
    optimize(
        _images, inputs=list(shards), output_dir=str(folder), num_workers=1, chunk_bytes=CHUNK_BYTES, verbose=False
    )
    index: dict[str, Any] = json.loads((folder / "index.json").read_text())
    files = {f"lit/real/{chunk['filename']}": (folder / chunk["filename"]).read_bytes() for chunk in index["chunks"]}
    chunks, aliases = [], {}
    for copy in range(copies):
        for chunk in index["chunks"]:
            name = f"copy-{copy:03d}-{chunk['filename']}"
            chunks.append({**chunk, "filename": name})
            aliases[f"lit/data/{name}"] = f"lit/real/{chunk['filename']}"
    files["lit/data/index.json"] = json.dumps({**index, "chunks": chunks}).encode()
    return LitFiles(files, aliases)


def _images(shard: str) -> Iterator[dict[str, bytes]]:
    for (image,) in TarDataset(shard, fields=(FIELD,), decode=False):
        yield {FIELD: image}

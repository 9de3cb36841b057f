"""Small ImageFolders for the tests of the command line, and the commands called as a user does."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from indexed_shards import read_index, table_in
from PIL import Image
from typer.testing import CliRunner
from written_shards import samples_in

from streamload.cli import shardify
from streamload.index.listing import list_shards
from streamload.pack.sources.source import IMAGE_FIELDS
from streamload.tar.extensions import IMAGE_FORMATS

FORMATS = {f".{extension}": IMAGE_FORMATS[extension] for extension in IMAGE_FIELDS}


def image_bytes(number: int, extension: str = ".jpg") -> bytes:
    """A whole image, different for each number."""
    pixels = np.random.default_rng(number).integers(0, 256, (9, 11, 3), np.uint8)
    return encoded(pixels, FORMATS[extension.lower()])


def encoded(pixels: Any, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def image_folder(root: Path, *names: str) -> Path:
    """A folder with these images, each of the kind of its extension."""
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(number, path.suffix))
    return root


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too, by its relative path."""
    return {
        os.path.relpath(os.path.join(top, name), folder): Path(top, name).read_bytes()
        for top, _, names in os.walk(folder)
        for name in names
    }


def images(tmp_path: Path, each: int = 6) -> Path:
    names = [f"{name}/{n}{'.png' if n % 3 == 2 else '.jpg'}" for name in ("cat", "bee") for n in range(each)]
    return image_folder(tmp_path / "source", *names)


def run(app: Any, *arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def pack(*arguments: object) -> tuple[int, str, str]:
    """`shardify` in this process, with workers only if they are requested: each takes longer to start than to pack."""
    workers = () if "--workers" in arguments else ("--workers", 1)
    return run(shardify.app, *arguments, *workers)


def packs(*arguments: object) -> tuple[str, str]:
    """`shardify`, which succeeds, and what it prints."""
    status, out, err = pack(*arguments)
    assert status == 0, err
    return out, err


def refusal(source: object, dest: object, *options: object, status: int = 2) -> str:
    """What `shardify` says where it fails and changes nothing."""
    before = Path(str(dest)).exists(), files_below(Path(str(dest)))
    ended, out, err = pack(source, dest, *options)
    assert (ended, out) == (status, ""), err
    assert (Path(str(dest)).exists(), files_below(Path(str(dest)))) == before
    return err


def packed_samples(folder: Path) -> dict[str, dict[str, bytes]]:
    """Every sample of a folder by its key, read through its index."""
    index, found = read_index(folder / ".streamload"), {}
    for shard in list_shards(folder).shards:
        for key, fields in samples_in(Path(shard.url).read_bytes(), table_in(index, shard.name)):
            assert key not in found
            found[key] = fields
    return found

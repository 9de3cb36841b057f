"""Remote folders for the tests of the command line: what lies in them can be read and changed by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from image_folders import files_below
from servers.rclone import S3Server

__all__ = ["Place", "new_place"]


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket.

    Attributes:
        url: the bucket.
        folder: where the server keeps it.
        options: what the command line needs to reach it.
        storage_options: the same for the loader.
    """

    url: str
    folder: Path
    options: tuple[str, ...]
    storage_options: dict[str, str]

    def files(self) -> dict[str, bytes]:
        """Every object by its key."""
        return files_below(self.folder)


def new_place(server: S3Server, tmp_path: Path) -> Place:
    """A new, empty bucket."""
    name = f"t{abs(hash(str(tmp_path))) % 10**10}"
    (server.folder / name).mkdir()
    options = [text for key, value in server.options.items() for text in ("--storage-option", f"{key}={value}")]
    return Place(f"s3://{name}", server.folder / name, tuple(options), server.options)

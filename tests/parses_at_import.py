"""A module of a user that parses the program's arguments when it is imported, as many scripts do."""

from __future__ import annotations

import argparse
from typing import Any

from fsspec.implementations.local import LocalFileSystem

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int, required=True)
SIZE = parser.parse_args().size


class Mounted(LocalFileSystem):
    """Files that only its users' processes can read."""

    cachable = False


def size(value: Any) -> int:
    return int(SIZE)

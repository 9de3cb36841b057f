"""streamload feeds PyTorch training from sharded tar storage: fast, exact, resumable.

The names below are imported on first use, so that the feeder and the workers, which import this package too, load only
what they need.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError("streamload runs on Linux and macOS; on Windows use WSL2")

if TYPE_CHECKING:
    from streamload import errors, images
    from streamload.errors import StreamloadError
    from streamload.loader import StreamLoader
    from streamload.options import RayFeeders
    from streamload.pack.packing import map_shards, pack
    from streamload.sampling.arguments import Mixture, Portion
    from streamload.statistics import Statistics
    from streamload.tar_dataset import TarDataset
    from streamload.write.shard_writer import ShardWriter

__all__ = [
    "Mixture",
    "Portion",
    "RayFeeders",
    "ShardWriter",
    "Statistics",
    "StreamLoader",
    "StreamloadError",
    "TarDataset",
    "errors",
    "images",
    "map_shards",
    "pack",
]
__version__ = "0.1.0"

_HOMES = {
    "Mixture": "streamload.sampling.arguments",
    "Portion": "streamload.sampling.arguments",
    "RayFeeders": "streamload.options",
    "ShardWriter": "streamload.write.shard_writer",
    "Statistics": "streamload.statistics",
    "StreamLoader": "streamload.loader",
    "StreamloadError": "streamload.errors",
    "TarDataset": "streamload.tar_dataset",
    "map_shards": "streamload.pack.packing",
    "pack": "streamload.pack.packing",
}


def __getattr__(name: str) -> Any:
    if name in ("errors", "images"):
        return import_module(f"streamload.{name}")
    if name in _HOMES:
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
    raise AttributeError(f"module 'streamload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

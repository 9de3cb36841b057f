"""The loaders that are compared: one module each, imported only in the process that measures it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

from workloads import Workload

WORKERS = 2
"""Worker processes or threads of every loader."""


class Loader(Protocol):
    """A loader under test. Making it is part of the time to the first batch; its module's imports are not.

    Attributes:
        processes: how many times the measured rate counts: the ceiling's is that of one process.
    """

    processes: int

    def __init__(self, workload: Workload) -> None: ...

    @staticmethod
    def prepare(workload: Workload) -> None:
        """Make what the loader reads, if it is not there."""

    def epoch(self) -> Iterator[Any]:
        """Tuples of batched fields: every sample once, in a new order."""

    def close(self) -> None:
        """Let go of everything, as the loader's documentation has it."""


@dataclass(frozen=True)
class Peer:
    """Where a loader is.

    Attributes:
        module: of this package.
        name: of the class in it.
        library: the distribution whose version is written down.
        workloads: those that it can be measured on.
        same_decoding: False if it reads another format, with a decoder of its own.
        reshuffles: True if each epoch has an order of its own.
        reads_shards: False if it is handed the positions of the samples, which it has no means to find out.
    """

    module: str
    name: str
    library: str
    workloads: tuple[str, ...] = ("tiny", "tokens", "images")
    same_decoding: bool = True
    reshuffles: bool = True
    reads_shards: bool = True

    def load(self) -> type[Loader]:
        """The class, imported."""
        loader: type[Loader] = getattr(import_module(f"peers.{self.module}"), self.name)
        return loader


STREAMLOAD = "streamload"
OWN_FUNCTIONS = "streamload, the user's functions"
CEILING = "ceiling"
AT_ONCE = "ceiling, shuffled, at once"
CEILINGS = (CEILING, "ceiling, shuffled", AT_ONCE)
"""Loops that load nothing: no loaders, and measured for their rate and processor time only."""

PEERS = {
    CEILING: Peer("ceiling", "Ceiling", "numpy", reshuffles=False),
    "ceiling, shuffled": Peer("ceiling", "Shuffled", "numpy", reshuffles=False),
    AT_ONCE: Peer("ceiling", "AtOnce", "numpy", reshuffles=False),
    STREAMLOAD: Peer("own", "Streamload", "streamload"),
    OWN_FUNCTIONS: Peer("own", "OwnFunctions", "streamload"),
    "WebDataset": Peer("wds", "Documented", "webdataset"),
    "WebDataset, not mixed": Peer("wds", "NotMixed", "webdataset"),
    "LitData": Peer("lit", "LitData", "litdata"),
    "LitData, TokensLoader": Peer("lit", "LitTokens", "litdata", ("tokens",), same_decoding=False),
    "SPDL": Peer("spdl_threads", "Shards", "spdl"),
    "SPDL, by position": Peer("spdl_threads", "ByPosition", "spdl", reads_shards=False),
    "SPDL, by position, subprocess": Peer("spdl_threads", "Subprocess", "spdl", reads_shards=False),
    "DataLoader, files": Peer("files", "Files", "torch"),
}

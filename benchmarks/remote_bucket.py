"""A web server with as many shards as are wanted, made of a few real ones, and what it saw of its readers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from streamload import ShardWriter
from streamload.index.dataset import Dataset
from streamload.index.dataset_index import INDEX_FOLDER, IndexFolder
from streamload.index.listing import ShardFinder, list_shards
from streamload.storage.local_files import LocalStorage

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "support"))  # the same server that the tests use

from servers.faults import FaultServer, Report, Script

FIELD = "jpg"
"""What random bytes are called; nobody decodes them."""
NO_LIMIT = Script()
FAR_AWAY = Script(first_byte_s=0.05, bytes_per_s=40e6)
THIN = Script(first_byte_s=0.05, bytes_per_s=5e6)
"""The first byte comes after 50 ms, and each connection carries at most 40 MB/s."""


@dataclass(frozen=True)
class Bucket:
    """A running server and the shards on it.

    Attributes:
        server: the process.
        names: of all shards, in the order in which they are listed.
        shard_bytes: of each shard.
    """

    server: FaultServer
    names: Sequence[str]
    shard_bytes: Sequence[int]

    def urls(self, *, indexed: bool = True) -> list[str]:
        """The shards' addresses; those in a folder without an index, if it is not to be found."""
        folder = "data" if indexed else "bare"
        return [f"{self.server.url}/{folder}/{name}" for name in self.names]

    def pattern(self, protocol: str = "http") -> list[str]:
        """The same, as a user writes it."""
        root = self.server.url if protocol == "http" else "s3:/"
        return [f"{root}/data/train-{{000000..{len(self.names) - 1:06d}}}.tar"]

    @property
    def total_bytes(self) -> int:
        """Of all shards."""
        return sum(self.shard_bytes)


@contextlib.contextmanager
def bucket_of(
    shards: Sequence[str],
    number: int | None = None,
    *,
    others: Mapping[str, bytes] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Iterator[Bucket]:
    """Serve shards that lie beside their index, in turn under other names until there are `number` of them.

    The index knows all names, with the true size of each. `others` are served too, and `aliases` are more names of any.
    """
    number = len(shards) if number is None else number
    folder = os.path.dirname(shards[0])
    files = {f"real/{os.path.basename(path)}": Path(path).read_bytes() for path in set(shards)} | dict(others or {})
    index = ShardFinder().index_of(folder)
    dataset = Dataset(list_shards(list(dict.fromkeys(shards))))
    tables = {shard.name: dataset.find(number) for number, shard in enumerate(dataset.listing.shards)}
    originals = [os.path.basename(shards[place % len(shards)]) for place in range(number)]
    names = [f"train-{place:06d}.tar" for place in range(number)]
    named = list(zip(names, originals, strict=True))
    with TemporaryDirectory(prefix="streamload-bench-") as written:
        entries = [(index.shard(original)._replace(name=name), tables[original]) for name, original in named]
        IndexFolder(LocalStorage(), written).update_with_tables(entries)
        files |= {f"data/{INDEX_FOLDER}/{path.name}": path.read_bytes() for path in Path(written).iterdir()}
    names_of = {f"{folder}/{name}": f"real/{original}" for folder in ("data", "bare") for name, original in named}
    with FaultServer(files, aliases=names_of | dict(aliases or {})) as server:
        yield Bucket(server, names, [tables[original].shard_bytes for original in originals])


@contextlib.contextmanager
def random_shards(number: int, samples: int, sample_bytes: int, *, large_bytes: int = 0) -> Iterator[list[str]]:
    """Shards of random bytes, in a temporary folder; in the middle of the first is one large sample, if wanted."""
    generator = np.random.default_rng(0)
    with TemporaryDirectory(prefix="streamload-bench-") as folder:
        with ShardWriter(folder, max_count=samples, max_bytes=1 << 30) as writer:
            for place in range(number * samples):
                size = large_bytes if large_bytes and place == samples // 2 else sample_bytes
                writer.write({"__key__": f"{place:08d}", FIELD: generator.bytes(size)})
        yield sorted(os.fspath(path) for path in Path(folder).glob("*.tar"))


@dataclass(frozen=True)
class Traffic:
    """What the server saw of a run.

    Attributes:
        requests: of all kinds.
        sent_bytes: of bodies.
        seconds: from the first request for a shard to the end of the last answer.
        most_connections: the most that were answered at once.
        connections: the mean of that over the seconds.
        carried_s: what the answers must have taken, one after the other, by the server's delay and rate.
    """

    requests: int
    sent_bytes: int
    seconds: float
    most_connections: int
    connections: float
    carried_s: float

    @property
    def rate(self) -> float:
        """MB a second."""
        return self.sent_bytes / self.seconds / 1e6

    @property
    def share_of_most(self) -> float:
        """Of what `most_connections` could have carried in these seconds: 1 if none of them ever was idle or slow."""
        return self.carried_s / (self.most_connections * self.seconds)

    @property
    def share(self) -> float:
        """Of what the connections that were in use could have carried meanwhile: 1 if none of them was slow."""
        return self.carried_s / (self.connections * self.seconds)


def traffic(report: Report, script: Script) -> Traffic:
    """What a report says of the requests for shards, which a server with this script answered."""
    spans = [(began_s, ended_s) for path, began_s, ended_s in report.spans if path.endswith((".tar", ".bin"))]
    seconds = max(ended_s for _, ended_s in spans) - min(began_s for began_s, _ in spans)
    steps = sorted([(began_s, 1) for began_s, _ in spans] + [(ended_s, -1) for _, ended_s in spans])
    most = int(np.cumsum([step for _, step in steps]).max())
    carried_s = len(spans) * script.first_byte_s
    if script.bytes_per_s is not None:
        carried_s += report.sent_bytes / script.bytes_per_s
    mean = sum(ended_s - began_s for began_s, ended_s in spans) / seconds
    return Traffic(report.requests, report.sent_bytes, seconds, most, mean, carried_s)

"""One run of one reader of remote shards, in this process and no other: what it found is the last line, as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from decoding import DecodeAndCrop

from streamload import StreamLoader
from streamload.images import RandomResizedCrop

WORKERS = 2
BATCH_SIZE = 128
PART_BYTES = 8 << 20
CROP = 224


@dataclass(frozen=True)
class Question:
    """What is read, by whom and how.

    Attributes:
        reader: a key of READERS.
        urls: the shards.
        shard_bytes: the size of each, for those who read ranges of them.
        raw: take the files' bytes as they are, and only count them; else images are decoded and cropped.
        fields: of streamload; where they are others than the images, they are decoded.
        shuffle: in streamload.
        connections: how many ranges at once, for those who read ranges.
        fsspec: streamload reads through fsspec's filesystem.
        storage_options: of streamload.
        trainer: what this process does beside: "idle", "busy" (a thread of it runs pure Python all the time), or
            "neighbour" (another process does so: it takes as much of the processors, but not the GIL).
        batches: stop after so many.
        memory_budget: of streamload.
        touched: whoever asks has had the memory backed that the reader will take; see `touched_memory`. If
            False, memory has been left alone for a while; None makes no difference.
        passes_before: of streamload, not measured. With a budget smaller than the data all of them fetch it, but
            memory that no process has touched before costs the first one much of its time on a virtual machine.
    """

    reader: str
    urls: Sequence[str]
    shard_bytes: Sequence[int]
    raw: bool = True
    fields: Sequence[str] = ("jpg",)
    shuffle: bool = False
    connections: int = 0
    fsspec: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = "idle"
    batches: int | None = None
    memory_budget: str = "auto"
    touched: bool | None = None
    passes_before: int = 0

    def argument(self) -> str:
        """For the command line of this program."""
        return json.dumps(asdict(self))


@contextlib.contextmanager
def streamload(question: Question) -> Iterator[Iterator[Any]]:
    """With its defaults."""
    filesystem = None
    if question.fsspec:
        import fsspec

        filesystem = fsspec.filesystem("http")
    how: dict[str, Any] = {"transform": {"jpg": RandomResizedCrop(CROP)}}
    if question.raw:
        how = {"decode": False, "transform": {"jpg": len}} if "jpg" in question.fields else {}
    with StreamLoader(
        question.urls,
        BATCH_SIZE,
        shuffle=question.shuffle,
        fields=tuple(question.fields),
        num_workers=WORKERS,
        filesystem=filesystem,
        storage_options=dict(question.storage_options) or None,
        memory_budget=question.memory_budget,
        **how,
    ) as loader:
        for _ in range(question.passes_before):
            for _batch in loader:
                pass
        yield (batch[0] for batch in loader)


@contextlib.contextmanager
def web_dataset(question: Question) -> Iterator[Iterator[Any]]:
    """As its documentation reads from the web: a pipe from curl, one shard after the other in each worker."""
    import webdataset

    urls = [f"pipe:curl -s -f {url}" for url in question.urls]
    decode: Callable[[bytes], Any] = len if question.raw else DecodeAndCrop()
    dataset = webdataset.WebDataset(urls, shardshuffle=False).to_tuple("jpg").map_tuple(decode).batched(BATCH_SIZE)
    yield (batch[0] for batch in webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS))


async def _ranges(question: Question, read: Callable[[str, int, int], Awaitable[int]]) -> int:
    """Read all parts of all shards, so many at once, and keep nothing; how many bytes that were."""
    parts = iter(
        (url, start, min(start + PART_BYTES, size))
        for url, size in zip(question.urls, question.shard_bytes, strict=True)
        for start in range(0, size, PART_BYTES)
    )

    async def one_connection() -> int:
        return sum([await read(*part) for part in parts])

    return sum(await asyncio.gather(*(one_connection() for _ in range(question.connections))))


@contextlib.contextmanager
def bare_obstore(question: Question) -> Iterator[Iterator[Any]]:
    """Ranges of a part each, and nothing done with them: the ceiling."""
    import obstore
    from obstore.store import HTTPStore

    root = question.urls[0].rpartition("/")[0]
    store = HTTPStore.from_url(root, client_options={"allow_http": True})

    async def read(url: str, start: int, end: int) -> int:
        result = await obstore.get_range_async(store, url.rpartition("/")[2], start=start, end=end)
        return len(result)

    yield iter([asyncio.run(_ranges(question, read))] for _ in range(1))


@contextlib.contextmanager
def obstore_to_shared_memory(question: Question) -> Iterator[Iterator[Any]]:
    """The same ranges, written into shared memory, from where other processes could take them."""
    import obstore
    from obstore.store import HTTPStore

    root = question.urls[0].rpartition("/")[0]
    store = HTTPStore.from_url(root, client_options={"allow_http": True})
    memories = {url: os.memfd_create("shard") for url in question.urls}

    async def read(url: str, start: int, end: int) -> int:
        result = await obstore.get_range_async(store, url.rpartition("/")[2], start=start, end=end)
        return os.pwrite(memories[url], result, start)

    yield iter([asyncio.run(_ranges(question, read))] for _ in range(1))


@contextlib.contextmanager
def lit_data(question: Question) -> Iterator[Iterator[Any]]:
    """LitData's own format, as its README reads it from a bucket."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # its options do not reach a server without TLS
    with tempfile.TemporaryDirectory(prefix="streamload-bench-") as cache:
        (url,) = question.urls
        dataset = StreamingDataset(
            url, cache_dir=cache, storage_options=dict(question.storage_options), transform=[_length]
        )
        yield iter(StreamingDataLoader(dataset, batch_size=BATCH_SIZE, num_workers=WORKERS))


def _length(sample: dict[str, bytes], *_: Any, **__: Any) -> int:
    return len(sample["jpg"])


@contextlib.contextmanager
def bare_fsspec(question: Question) -> Iterator[Iterator[Any]]:
    """The same by fsspec's HTTP file system."""
    from fsspec.implementations.http import HTTPFileSystem

    async def read_all() -> int:
        filesystem = HTTPFileSystem(asynchronous=True)
        session = await filesystem.set_session()

        async def read(url: str, start: int, end: int) -> int:
            return len(await filesystem._cat_file(url, start, end))

        try:
            return await _ranges(question, read)
        finally:
            await session.close()

    yield iter([asyncio.run(read_all())] for _ in range(1))


READERS = {
    "streamload": streamload,
    "WebDataset": web_dataset,
    "LitData": lit_data,
    "obstore": bare_obstore,
    "obstore to shared memory": obstore_to_shared_memory,
    "fsspec": bare_fsspec,
}


def spin(stop: Callable[[], bool]) -> None:
    """Pure Python, until told to stop."""
    while not stop():
        sum(number * number % 7 for number in range(10_000))


@contextlib.contextmanager
def beside(trainer: str) -> Iterator[None]:
    """What this process does beside the reading; see `Question.trainer`."""
    if trainer == "busy":
        stop = threading.Event()
        thread = threading.Thread(target=spin, args=(stop.is_set,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
    elif trainer == "neighbour":
        program = "import sys\nwhile True: sum(number * number % 7 for number in range(10_000))"
        with subprocess.Popen([sys.executable, "-c", program]) as process:
            try:
                yield
            finally:
                process.kill()
    else:
        yield


def measure(question: Question) -> dict[str, float | None]:
    """Read everything once; times are `time.monotonic`, those of the pass from the call of `iter` on."""
    began_s = time.monotonic()
    first_s = None
    values = count = 0
    with READERS[question.reader](question) as batches, beside(question.trainer):
        cpu_s, pass_s = time.process_time(), time.monotonic()
        for batch in batches:
            first_s = time.monotonic() if first_s is None else first_s
            values += int(np.asarray(batch).sum(dtype=np.int64)) if question.raw else len(batch)
            count += 1
            if count == question.batches:
                break
        ended_s, cpu_s = time.monotonic(), time.process_time() - cpu_s
    return {
        "began_s": began_s,
        "pass_s": pass_s,
        "first_s": first_s,
        "ended_s": ended_s,
        "cpu": cpu_s / (ended_s - pass_s),
        "processor_s": sum(map(_processor_s, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))),
        "values": values,
    }


def _processor_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def main() -> None:
    question = Question(**json.loads(sys.argv[1]))
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(question)
    print(json.dumps(found), flush=True)
    if question.reader.startswith("obstore"):
        os._exit(0)  # its threads may abort an interpreter that is ending


if __name__ == "__main__":
    main()

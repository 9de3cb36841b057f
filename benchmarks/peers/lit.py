"""LitData, as its README has it: optimized once into chunks, read by StreamingDataset and StreamingDataLoader.

https://github.com/Lightning-AI/litData: `optimize`; `transform=` for what is done to each sample; StreamingDataLoader
rather than torch's. Chunks of 8 MB, so that each worker has several: with its usual 64 MB all of tiny is one chunk, and
epochs take 0.5 to 8 s. It does not mention `persistent_workers`: they are a little faster, and then it needs ten
seconds to shut down. For tokens it has a format of its own ("LLM Pre-training"): they are stored one after another as
one array, and TokensLoader cuts blocks from it, so nothing is decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decoding import decoders
from litdata import StreamingDataLoader, StreamingDataset, TokensLoader, optimize
from sample_table import MappedShards, read_positions
from workloads import Workload

from peers import WORKERS

TOKENS = 2048


class _Samples:
    """The bytes of a sample's first field, and its label, by number."""

    def __init__(self, workload: Workload) -> None:
        self._shards = MappedShards(workload)
        self._positions = [rows.tolist() for rows in read_positions(workload)]

    def __call__(self, number: int) -> dict[str, Any]:
        data, *label = (bytes(self._shards.field(rows[number])) for rows in self._positions)
        return {"data": data} | ({"cls": int(label[0])} if label else {})


_samples: dict[str, _Samples] = {}


def _sample(root: str, name: str, samples: int, number: int) -> dict[str, Any]:
    from workloads import workload

    if name not in _samples:
        _samples[name] = _Samples(workload(name, Path(root), samples))
    return _samples[name](number)


def _tokens(root: str, name: str, samples: int, number: int) -> torch.Tensor:
    (decode,) = decoders(["npy"])
    return torch.from_numpy(decode(_sample(root, name, samples, number)["data"]))


def _optimize(workload: Workload, name: str, function: Any, **options: Any) -> Path:
    read_positions(workload)

    def make(folder: Path) -> None:
        optimize(
            fn=partial(function, str(workload.root), workload.name, workload.samples),
            inputs=list(range(workload.samples)),
            output_dir=str(folder),
            num_workers=WORKERS,
            verbose=False,
            **options,
        )

    return workload.made_once(name, make)


class _Decode:
    def __init__(self, workload: Workload) -> None:
        (self._decode, *self._label) = decoders(workload.fields)

    def __call__(self, sample: dict[str, Any], *_: Any, **__: Any) -> Any:
        value = torch.from_numpy(self._decode(sample["data"]))
        return (value, sample["cls"]) if self._label else (value,)


class LitData:
    """The samples' bytes in its chunks, decoded by its `transform`."""

    processes = 1

    def __init__(self, workload: Workload) -> None:
        dataset = StreamingDataset(str(_chunks(workload)), shuffle=True, transform=[_Decode(workload)])
        self._loader = StreamingDataLoader(
            dataset, batch_size=workload.batch_size, num_workers=WORKERS, persistent_workers=True
        )

    @staticmethod
    def prepare(workload: Workload) -> None:
        _chunks(workload)

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        del self._loader  # its workers end with it


class LitTokens(LitData):
    """Its own format for tokens."""

    def __init__(self, workload: Workload) -> None:
        dataset = StreamingDataset(
            str(_token_chunks(workload)), item_loader=TokensLoader(block_size=TOKENS), shuffle=True
        )
        self._loader = StreamingDataLoader(
            dataset, batch_size=workload.batch_size, num_workers=WORKERS, persistent_workers=True
        )

    @staticmethod
    def prepare(workload: Workload) -> None:
        _token_chunks(workload)

    def epoch(self) -> Iterator[Any]:
        return ((block,) for block in self._loader)


def _chunks(workload: Workload) -> Path:
    return _optimize(workload, "litdata", _sample, chunk_bytes="8MB")


def _token_chunks(workload: Workload) -> Path:
    # Chunks of 64 MB, as whole blocks.
    return _optimize(workload, "litdata-tokens", _tokens, chunk_size=TOKENS * 8000, item_loader=TokensLoader())

"""WebDataset, as its documentation has it, and without the step that costs it most.

https://github.com/webdataset/webdataset, "WebLoader": batches are made in the workers, which shuffle over a buffer;
then they are taken apart, shuffled among the workers, and batched again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import webdataset
from decoding import decoders
from workloads import Workload

from peers import WORKERS


class NotMixed:
    """Without the last step: a batch mixes the samples of a thousand of one worker only."""

    processes = 1

    def __init__(self, workload: Workload) -> None:
        dataset = (
            webdataset.WebDataset(workload.shards(), shardshuffle=100)
            .shuffle(1000)
            .to_tuple(*workload.fields)
            .map_tuple(*decoders(workload.fields))
            .batched(workload.batch_size)
        )
        self._loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=WORKERS, persistent_workers=True)

    @staticmethod
    def prepare(workload: Workload) -> None:
        workload.shards()

    def epoch(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        del self._loader  # its workers end with it


class Documented(NotMixed):
    """With all of it."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._loader = self._loader.unbatched().shuffle(1000).batched(workload.batch_size)

"""A stand-in for a GPU: it copies as late as it may, so whatever is used or freed too early has wrong bytes."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from streamload.trainer.page_locked import HostRegistry


class LateCopying:
    """One entry of the stream of copies, and the event behind it."""

    def __init__(self, device: LateDevice, sources: Sequence[torch.Tensor], copies: list[torch.Tensor]) -> None:
        self.device = device
        self.sources = [weakref.ref(source) for source in sources]
        self.copies = copies
        self.done = False
        self.given = False

    def passed(self) -> bool:
        return self.done

    def wait(self) -> None:
        self.device.waits += 1
        self.device.run(self)

    def give(self, copies: Sequence[torch.Tensor]) -> None:
        assert not self.given
        assert [id(copy) for copy in copies] == [id(copy) for copy in self.copies], "their memory is kept for the loop"
        self.given = True

    def run(self) -> None:
        for source, copy in zip(self.sources, self.copies, strict=True):
            memory = source()
            if memory is None:  # a device would read what is there now, if anything is
                self.device.too_early += 1
            else:
                copy.copy_(memory)
        self.done = True


class LateDevice:
    """Copies are made when somebody waits for them, or when the test says so; until then they hold rubbish.

    Attributes:
        begun: how many batches it was told to copy.
        waits: how often the host has waited for a copy.
        too_early: tensors whose memory was gone before they were copied.
        locked: what is page-locked: bytes by address.
        fails_at: the number of the batch that there is no memory for, counted from 1.
    """

    def __init__(self, fails_at: int = 0) -> None:
        self.stream: deque[LateCopying] = deque()
        self.of: dict[int, LateCopying] = {}
        self.begun = self.waits = self.too_early = 0
        self.locked: dict[int, int] = {}
        self.ever_locked = 0
        self.fails_at = fails_at

    def registry(self) -> HostRegistry:
        return HostRegistry(self._lock, self._unlock)

    def _lock(self, address: int, size_bytes: int, _: int) -> int:
        assert address not in self.locked
        self.locked[address] = size_bytes
        self.ever_locked += 1
        return 0

    def _unlock(self, address: int) -> int:
        del self.locked[address]
        return 0

    def begin(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], LateCopying]:
        self.begun += 1
        if self.begun == self.fails_at:
            raise RuntimeError("out of memory")
        copies = [torch.full_like(tensor, 77) for tensor in tensors]
        copying = LateCopying(self, tensors, copies)
        self.of.update({id(copy): copying for copy in copies})
        self.stream.append(copying)
        return list(copies), copying

    def run(self, last: LateCopying | None = None) -> None:
        """Make the copies that were begun, in order, up to the one given."""
        while self.stream and not (last is not None and last.done):
            self.stream.popleft().run()

    def read(self, tensor: torch.Tensor) -> Any:
        """What work on the loop's current stream would see: only copies that this stream was told to wait for."""
        copying = self.of[id(tensor)]
        if copying.given:
            self.run(copying)
        return tensor.tolist()

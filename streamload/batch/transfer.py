"""Page-locked memory: slots are registered with CUDA once, so that pinning costs no copy and no thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

import torch

from streamload.memory.mapped import Bytes

__all__ = ["HostRegistry", "cuda_registry", "pinning"]


class HostRegistry(Protocol):
    """The calls of the CUDA runtime that page-lock memory; they return its error code, 0 for success."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        """Page-lock memory that is mapped already."""

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        """Undo it."""


def cuda_registry() -> HostRegistry | None:
    """The CUDA runtime, or None where there is no GPU to copy to."""
    if not torch.cuda.is_available():
        return None
    registry: HostRegistry = torch.cuda.cudart()
    return registry


def pinning(registry: HostRegistry) -> Callable[[Bytes], None]:
    """What to do with every newly mapped slot: page-lock it until it is unmapped.

    Memory that CUDA refuses (the limit of locked memory) stays as it is: copies from it work, and wait.
    """

    def pin(memory: Bytes) -> None:
        address = memory.ctypes.data
        if int(registry.cudaHostRegister(address, memory.nbytes, 0)) == 0:
            # Finalizers run last made, first called: so before the one that unmaps the memory.
            weakref.finalize(memory, registry.cudaHostUnregister, address).atexit = False

    return pin

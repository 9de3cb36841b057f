"""Page-locked memory: slots are registered with CUDA once, so that pinning costs no copy and no thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from streamload.memory.mapped import Bytes

__all__ = ["HostRegistry", "cuda_registry", "pinning"]


_FOR_EVERY_DEVICE = 1  # cudaHostRegisterPortable


class HostRegistry(NamedTuple):
    """The two calls of the CUDA runtime that page-lock memory; they return its error code, 0 for success.

    Attributes:
        register: takes the address, the bytes and flags of memory that is mapped already.
        unregister: takes the address.
    """

    register: Callable[[int, int, int], int]
    unregister: Callable[[int], int]


def cuda_registry() -> HostRegistry | None:
    """The CUDA runtime's, or None where there is no GPU to copy to."""
    if not torch.cuda.is_available():
        return None
    runtime = torch.cuda.cudart()
    return HostRegistry(runtime.cudaHostRegister, runtime.cudaHostUnregister)


def pinning(registry: HostRegistry) -> Callable[[Bytes], None]:
    """What to do with every newly mapped slot: page-lock it until it is unmapped.

    Memory that CUDA refuses (the limit of locked memory) stays as it is: copies from it work, and wait.
    """

    def pin(memory: Bytes) -> None:
        address = memory.ctypes.data
        if int(registry.register(address, memory.nbytes, _FOR_EVERY_DEVICE)) == 0:
            # Finalizers run last made, first called: so before the one that unmaps the memory.
            weakref.finalize(memory, registry.unregister, address).atexit = False

    return pin

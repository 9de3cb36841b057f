"""What CUDA opens once for a process, and keeps, is opened before the first test, so that no test seems to leave it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def cuda_has_begun() -> None:
    if torch.cuda.is_available():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.ones(1000).pin_memory().to("cuda", non_blocking=True).sum()
            torch.mm(torch.ones(8, 8, device="cuda"), torch.ones(8, 8, device="cuda"))
        torch.cuda.synchronize()

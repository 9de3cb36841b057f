"""Headers are read by NumPy in these tests, where the archives are small: so few are read one by one elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from streamload.tar import header_chain


@pytest.fixture(scope="module", autouse=True)
def few_bytes() -> Iterator[None]:
    """Read headers one by one in no archive."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(header_chain, "FEW_BYTES", 0)
        yield

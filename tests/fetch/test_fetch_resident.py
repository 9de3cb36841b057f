"""Opening shards: what was listed is what is mapped, or an error says what has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamload.errors import ShardChangedError
from streamload.fetch.resident import ResidentShards
from streamload.index.listing import Shard


@pytest.fixture
def listed(tmp_path: Path) -> Shard:
    path = tmp_path / "a.tar"
    path.write_bytes(b"content")
    return Shard(str(path), "a.tar", 7, path.stat().st_mtime_ns, str(tmp_path))


@pytest.mark.parametrize("change", ["longer", "shorter", "as long but newer", "replaced"])
def test_a_shard_that_has_changed_is_refused_with_both_sizes(listed: Shard, change: str) -> None:
    path = Path(listed.url)
    if change == "as long but newer":
        os.utime(path, ns=(listed.mtime_ns + 1, listed.mtime_ns + 1))
    elif change == "replaced":
        new = path.with_name("new")
        new.write_bytes(b"another")
        os.utime(new, ns=(listed.mtime_ns - 10**9, listed.mtime_ns - 10**9))
        os.replace(new, path)
    else:
        path.write_bytes(b"content and more" if change == "longer" else b"cut")
        os.utime(path, ns=(listed.mtime_ns, listed.mtime_ns))
    with pytest.raises(ShardChangedError, match=r"listed with 7 bytes .* make a new loader") as caught:
        ResidentShards((listed,)).open(0)
    assert caught.value.url == listed.url
    assert f"has {path.stat().st_size} (mtime {path.stat().st_mtime_ns})" in str(caught.value)
